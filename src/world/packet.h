// What processes say to each other while they start and watch each other: frames of {magic, type, length, payload}, and
// payloads of numbers and texts. Nothing here trusts the other side.
#pragma once
#include <cstdint>
#include <cstring>
#include <optional>
#include <string>
#include <string_view>

namespace mkernel {

// A payload as it is built. Numbers are little-endian, as on every machine that mKernel runs on.
class PacketWriter {
 public:
  PacketWriter& number(std::uint32_t value) {
    bytes_.append(reinterpret_cast<const char*>(&value), sizeof value);
    return *this;
  }
  PacketWriter& text(std::string_view value) {
    number(static_cast<std::uint32_t>(value.size()));
    bytes_.append(value);
    return *this;
  }
  const std::string& bytes() const { return bytes_; }

 private:
  std::string bytes_;
};

// Reads a payload in order. After a read beyond its end ok() is false, and all further reads give nothing.
class PacketReader {
 public:
  explicit PacketReader(std::string_view bytes) : bytes_(bytes) {}

  std::uint32_t number() {
    std::uint32_t value = 0;
    if (bytes_.size() < sizeof value) return fail(), 0;
    std::memcpy(&value, bytes_.data(), sizeof value);
    bytes_.remove_prefix(sizeof value);
    return value;
  }
  std::string text() {
    const std::uint32_t size = number();
    if (bytes_.size() < size) return fail(), "";
    std::string value(bytes_.substr(0, size));
    bytes_.remove_prefix(size);
    return value;
  }
  bool ok() const { return ok_; }
  // Everything has been read, and all of it was there.
  bool complete() const { return ok_ && bytes_.empty(); }

 private:
  void fail() {
    ok_ = false;
    bytes_ = {};
  }
  std::string_view bytes_;
  bool ok_ = true;
};

enum class FrameType : std::uint32_t {
  kHello = 1,  // job, version, rank, size: a process asks to be let in
  kRefused,    // text: it is not
  kAccepted,   // it is, and waits for the others
  kWelcome,    // all are there
  kBeat,       // nothing but a sign of life
  kGather,     // number, label, text: a rank's part of an exchange
  kGathered,   // number, count, texts: all ranks' parts
  kFailure,    // kind, text: the world has failed
  kGoodbye,    // the sender leaves in good order
};
inline constexpr std::uint32_t kFrameTypeEnd = static_cast<std::uint32_t>(FrameType::kGoodbye) + 1;

struct Frame {
  FrameType type = FrameType::kBeat;
  std::string payload;
};

inline constexpr std::uint32_t kFrameMagic = 0x314e4b6d;  // "mKN1"
inline constexpr std::size_t kFrameHeaderBytes = 12;

inline std::string encode_frame(FrameType type, std::string_view payload = {}) {
  PacketWriter writer;
  writer.number(kFrameMagic)
      .number(static_cast<std::uint32_t>(type))
      .number(static_cast<std::uint32_t>(payload.size()));
  return writer.bytes() + std::string(payload);
}

// Takes frames from bytes as they come in, however they are cut.
class FrameParser {
 public:
  // A frame whose payload is said to be longer is garbage.
  explicit FrameParser(std::size_t max_payload) : max_payload_(max_payload) {}

  void feed(std::string_view bytes) { buffer_.append(bytes); }
  // The next whole frame; nothing while it is not there, and for ever once broken().
  std::optional<Frame> next() {
    if (broken_ || buffer_.size() < kFrameHeaderBytes) return std::nullopt;
    PacketReader header(buffer_);
    const std::uint32_t magic = header.number();
    const std::uint32_t type = header.number();
    const std::uint32_t length = header.number();
    broken_ = magic != kFrameMagic || type == 0 || type >= kFrameTypeEnd || length > max_payload_;
    if (broken_ || buffer_.size() < kFrameHeaderBytes + length) return std::nullopt;
    Frame frame{static_cast<FrameType>(type), buffer_.substr(kFrameHeaderBytes, length)};
    buffer_.erase(0, kFrameHeaderBytes + length);
    return frame;
  }
  // The other side speaks another language.
  bool broken() const { return broken_; }

 private:
  std::size_t max_payload_;
  std::string buffer_;
  bool broken_ = false;
};

}  // namespace mkernel
