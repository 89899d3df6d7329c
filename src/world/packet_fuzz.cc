// Bytes of a stranger as frames, however they are cut: the same frames come out, none is longer than allowed, and what
// was taken is what was sent.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/check.h"
#include "world/packet.h"

namespace mkernel {
namespace {

constexpr std::size_t kMaxPayload = 512;

// All frames of `bytes`, fed in parts of `part` bytes; `rest`: whether the parser has given up.
std::vector<std::string> frames_of(std::string_view bytes, std::size_t part, bool& broken) {
  FrameParser parser(kMaxPayload);
  std::vector<std::string> frames;
  for (std::size_t at = 0; at < bytes.size(); at += part) {
    parser.feed(bytes.substr(at, part));
    while (const std::optional<Frame> frame = parser.next()) {
      MK_CHECK_OP(frame->payload.size(), <=, kMaxPayload);
      frames.push_back(encode_frame(frame->type, frame->payload));
    }
  }
  broken = parser.broken();
  return frames;
}

// Reads numbers and texts as the first byte says; nothing is read beyond the end.
void read_payload(std::string_view bytes) {
  PacketReader reader(bytes);
  std::size_t taken = 0;
  for (std::size_t i = 0; i < 20; ++i) {
    const bool text = i < bytes.size() && (bytes[i] & 1) != 0;
    const std::size_t got = text ? 4 + reader.text().size() : (static_cast<void>(reader.number()), 4);
    if (!reader.ok()) break;
    taken += got;
  }
  MK_CHECK_OP(taken, <=, bytes.size());
  if (reader.complete()) MK_CHECK_OP(taken, ==, bytes.size());
}

}  // namespace
}  // namespace mkernel

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace mkernel;
  const std::string_view bytes(reinterpret_cast<const char*>(data), size);
  bool broken = false;
  const std::vector<std::string> whole = frames_of(bytes, std::max<std::size_t>(1, size), broken);
  std::string joined;
  for (const std::string& frame : whole) joined += frame;
  MK_CHECK(bytes.starts_with(joined));
  for (const std::size_t part : {std::size_t{1}, std::size_t{3}, std::size_t{13}}) {
    bool also_broken = false;
    MK_CHECK(frames_of(bytes, part, also_broken) == whole);
    MK_CHECK_OP(also_broken, ==, broken);
  }
  read_payload(bytes);
  return 0;
}
