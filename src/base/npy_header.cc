// Headers of .npy files: what np.save writes, understood and composed.
#include <algorithm>
#include <cstring>
#include <optional>
#include <utility>

#include "base/check.h"
#include "base/npy.h"
#include "base/npy_detail.h"

namespace mkernel {
namespace {

using npy_detail::file_error;
using npy_detail::matrix_bytes;
using npy_detail::sized;

constexpr std::string_view kMagic = "\x93NUMPY";
constexpr std::string_view kAccepted = "accepted are '<f4', '<f8', '<f2', '<V2' (bf16), '<u2', '<i4', '<i8' and '|i1'";

// A piece of the file for a message: short, on one line, printable.
std::string excerpt(std::string_view text) {
  constexpr std::size_t kMaxChars = 40;
  std::string result = "\"";
  for (const char c : text.substr(0, kMaxChars)) result += c >= ' ' && c <= '~' ? c : '?';
  return result + (text.size() > kMaxChars ? "...\"" : "\"");
}

// What the dictionary in a header says, before sizes are looked at.
struct HeaderDict {
  std::optional<std::string> descr;
  std::optional<bool> fortran;
  std::optional<std::vector<std::int64_t>> shape;
};

// Reads the one Python literal that a header is: a dictionary with the keys descr, fortran_order and shape, in any
// order and with any blanks. Each read function returns false after it has set the error.
class DictReader {
 public:
  explicit DictReader(std::string_view text) : text_(text) {}

  bool read(HeaderDict& dict) {
    if (!expect('{', "the header is not a dictionary: it")) return false;
    while (!take('}')) {
      if (!read_item(dict)) return false;
      if (take(',')) continue;
      if (!expect('}', "after an entry, the header")) return false;
      break;
    }
    skip_blanks();
    if (at_ < text_.size()) return fail("the header goes on after its dictionary, with " + rest());
    if (!dict.descr) return fail("the header has no 'descr'");
    if (!dict.fortran) return fail("the header has no 'fortran_order'");
    if (!dict.shape) return fail("the header has no 'shape'");
    return true;
  }

  const std::string& error() const { return error_; }

 private:
  bool read_item(HeaderDict& dict) {
    std::string key;
    if (!read_string(key, "a key")) return false;
    if (!expect(':', "after the key '" + key + "', the header")) return false;
    if (key == "descr") return once(key, dict.descr.has_value()) && read_descr(dict.descr.emplace());
    if (key == "fortran_order") return once(key, dict.fortran.has_value()) && read_bool(dict.fortran.emplace());
    if (key == "shape") return once(key, dict.shape.has_value()) && read_shape(dict.shape.emplace());
    return fail("the header has the unknown key " + excerpt(key) +
                ", accepted are 'descr', 'fortran_order' and 'shape'");
  }

  bool read_descr(std::string& descr) {
    skip_blanks();
    if (peek() == '[') return fail("the elements are structured, " + std::string(kAccepted));
    return read_string(descr, "'descr'");
  }

  bool read_bool(bool& value) {
    skip_blanks();
    for (const bool candidate : {false, true}) {
      const std::string_view word = candidate ? "True" : "False";
      if (text_.substr(at_, word.size()) != word) continue;
      at_ += word.size();
      value = candidate;
      return true;
    }
    return fail("'fortran_order' must be True or False, not " + rest());
  }

  bool read_shape(std::vector<std::int64_t>& shape) {
    if (!expect('(', "'shape' must be a tuple, but the header")) return false;
    bool comma = true;  // between the numbers a comma is needed, after the only number too
    while (!take(')')) {
      if (!comma) return fail("'shape' needs a comma or ')' where the header has " + rest());
      std::int64_t size = 0;
      if (!read_size(size)) return false;
      shape.push_back(size);
      comma = take(',');
    }
    if (shape.size() == 1 && !comma) return fail("'shape' is a number in parentheses, accepted is a tuple like (3,)");
    return true;
  }

  // A decimal number as Python 2 and 3 write it: no sign, no leading zeros, perhaps the L of a Python 2 long.
  bool read_size(std::int64_t& size) {
    skip_blanks();
    const std::size_t begin = at_;
    if (peek() == '-') return fail("'shape' has a negative number, " + rest());
    while (at_ < text_.size() && text_[at_] >= '0' && text_[at_] <= '9') {
      if (__builtin_mul_overflow(size, std::int64_t{10}, &size) ||
          __builtin_add_overflow(size, std::int64_t{text_[at_] - '0'}, &size)) {
        return fail("'shape' has a number that does not fit 63 bits");
      }
      ++at_;
    }
    if (at_ == begin) return fail("'shape' must hold whole numbers, not " + rest());
    if (at_ - begin > 1 && text_[begin] == '0') return fail("'shape' has a number with a leading zero");
    if (peek() == 'L') ++at_;
    return true;
  }

  bool read_string(std::string& value, const char* what) {
    skip_blanks();
    const char quote = peek();
    if (quote != '\'' && quote != '"') return fail(std::string(what) + " must be a string, not " + rest());
    const std::size_t begin = ++at_;
    for (; at_ < text_.size() && text_[at_] != quote; ++at_) {
      if (text_[at_] < ' ' || text_[at_] > '~' || text_[at_] == '\\') {
        return fail(std::string(what) + " holds a character that is not accepted, at " + rest());
      }
    }
    if (at_ == text_.size()) return fail(std::string(what) + " is a string without end");
    value = text_.substr(begin, at_++ - begin);
    return true;
  }

  bool once(const std::string& key, bool seen) { return !seen || fail("the header has '" + key + "' twice"); }

  void skip_blanks() { at_ = std::min(text_.find_first_not_of(" \t\r\n\f", at_), text_.size()); }
  char peek() const { return at_ < text_.size() ? text_[at_] : '\0'; }

  bool take(char c) {
    skip_blanks();
    if (peek() != c || at_ == text_.size()) return false;
    ++at_;
    return true;
  }

  bool expect(char c, const std::string& where) {
    return take(c) || fail(where + " has " + rest() + " instead of '" + c + "'");
  }

  std::string rest() const { return at_ < text_.size() ? excerpt(text_.substr(at_)) : "its end"; }

  bool fail(std::string what) {
    error_ = std::move(what);
    return false;
  }

  std::string_view text_;
  std::size_t at_ = 0;
  std::string error_;
};

std::optional<NpyType> type_of_descr(std::string_view descr) {
  for (int i = 0; i < kNpyTypeCount; ++i) {
    const NpyType type = static_cast<NpyType>(i);
    if (descr == npy_descr(type)) return type;
  }
  if (descr == "|V2" || descr == "bfloat16") return NpyType::kBf16;
  return std::nullopt;
}

std::string refused_descr(const std::string& descr) {
  std::string what = "the element type is " + excerpt(descr) + ", " + std::string(kAccepted);
  if (descr.size() == 3 && descr[0] == '>') {
    what += "; this one is big-endian, a.astype('<" + descr.substr(1) + "') in NumPy turns it";
  }
  return what;
}

// Where the header's text lies in the file.
struct Preamble {
  std::size_t begin = 0;
  std::size_t bytes = 0;
};

Result<Preamble> parse_preamble(std::span<const std::byte> first, std::uint64_t file_bytes, std::string_view name) {
  const auto byte_at = [&](std::size_t i) { return std::to_integer<std::size_t>(first[i]); };
  const std::size_t magic_bytes = std::min(kMagic.size(), first.size());
  if (first.empty()) return file_error(name, "the file is empty");
  if (std::memcmp(first.data(), kMagic.data(), magic_bytes) != 0) {
    const bool archive = first.size() >= 2 && std::memcmp(first.data(), "PK", 2) == 0;
    return file_error(name, archive ? "this is an archive (.npz), accepted is one matrix as np.save writes it"
                                    : "this is not a .npy file: it does not begin with \\x93NUMPY");
  }
  const std::string cut = "the file ends inside its header, after " + std::to_string(file_bytes) + " bytes";
  if (first.size() < 8) return file_error(name, cut);
  const std::size_t major = byte_at(6);
  const std::size_t minor = byte_at(7);
  if (major < 1 || major > 3 || minor != 0) {
    return file_error(name, "the format version is " + std::to_string(major) + "." + std::to_string(minor) +
                                ", accepted are 1.0, 2.0 and 3.0");
  }
  Preamble preamble{major == 1 ? std::size_t{10} : std::size_t{12}, 0};
  if (first.size() < preamble.begin) return file_error(name, cut);
  for (std::size_t i = preamble.begin; i-- > 8;) preamble.bytes = preamble.bytes << 8 | byte_at(i);
  if (preamble.bytes > kNpyMaxHeaderBytes - 12) {
    return file_error(name, "the header is said to have " + std::to_string(preamble.bytes) +
                                " bytes, accepted are at most " + std::to_string(kNpyMaxHeaderBytes - 12));
  }
  if (first.size() < preamble.begin + preamble.bytes) return file_error(name, cut);
  return preamble;
}

}  // namespace

std::int64_t npy_type_bytes(NpyType type) {
  switch (type) {
    case NpyType::kI8: return 1;
    case NpyType::kF16:
    case NpyType::kBf16:
    case NpyType::kU16: return 2;
    case NpyType::kF32:
    case NpyType::kI32: return 4;
    case NpyType::kF64:
    case NpyType::kI64: return 8;
  }
  MK_CHECK(false);
  return 0;
}

std::string_view npy_descr(NpyType type) {
  switch (type) {
    case NpyType::kF16: return "<f2";
    case NpyType::kBf16: return "<V2";
    case NpyType::kF32: return "<f4";
    case NpyType::kF64: return "<f8";
    case NpyType::kU16: return "<u2";
    case NpyType::kI8: return "|i1";
    case NpyType::kI32: return "<i4";
    case NpyType::kI64: return "<i8";
  }
  MK_CHECK(false);
  return "";
}

NpyType npy_type_of(Dtype dtype) {
  switch (dtype) {
    case Dtype::kBf16: return NpyType::kBf16;
    case Dtype::kFp16: return NpyType::kF16;
    case Dtype::kFp32: return NpyType::kF32;
  }
  MK_CHECK(false);
  return NpyType::kF32;
}

Result<NpyHeader> parse_npy_header(std::span<const std::byte> first_bytes, std::uint64_t file_bytes,
                                   std::string_view name) {
  MK_CHECK_OP(first_bytes.size(), <=, file_bytes);
  MK_CHECK_OP(first_bytes.size(), >=, std::min<std::uint64_t>(file_bytes, kNpyMaxHeaderBytes));
  const Result<Preamble> preamble = parse_preamble(first_bytes, file_bytes, name);
  if (!preamble) return preamble.error();
  const std::span<const std::byte> text = first_bytes.subspan(preamble->begin, preamble->bytes);
  DictReader reader(std::string_view(reinterpret_cast<const char*>(text.data()), text.size()));
  HeaderDict dict;
  if (!reader.read(dict)) return file_error(name, reader.error());

  NpyHeader header;
  const std::optional<NpyType> type = type_of_descr(*dict.descr);
  if (!type) return file_error(name, refused_descr(*dict.descr));
  const std::vector<std::int64_t>& shape = *dict.shape;
  if (shape.empty() || shape.size() > 2) {
    return file_error(name, "the array has " + std::to_string(shape.size()) + " dimensions, accepted are 1 and 2");
  }
  header.type = *type;
  header.fortran = *dict.fortran;
  header.dims = static_cast<int>(shape.size());
  header.rows = header.dims == 1 ? 1 : shape[0];
  header.cols = shape.back();
  header.data_offset = preamble->begin + preamble->bytes;

  const std::string size = sized(header.rows, header.cols, header.type);
  const std::optional<std::int64_t> bytes = matrix_bytes(header.rows, header.cols, header.type);
  if (!bytes) return file_error(name, "the header promises " + size + ", which does not fit 63 bits");
  header.data_bytes = *bytes;
  const std::uint64_t held = file_bytes - header.data_offset;
  if (static_cast<std::uint64_t>(*bytes) != held) {
    return file_error(name, "the header promises " + std::to_string(*bytes) + " bytes of data (" + size +
                                "), but the file holds " + std::to_string(held));
  }
  return header;
}

std::string npy_header(NpyType type, std::int64_t rows, std::int64_t cols) {
  MK_CHECK_OP(rows, >=, 0);
  MK_CHECK_OP(cols, >=, 0);
  std::string dict = "{'descr': '" + std::string(npy_descr(type)) + "', 'fortran_order': False, 'shape': (" +
                     std::to_string(rows) + ", " + std::to_string(cols) + "), }";
  // NumPy lets the data begin at a multiple of 64. Without padding a matrix needs from 70 to 106 bytes, so this is 128.
  constexpr std::size_t kDataOffset = 128;
  MK_CHECK_OP(dict.size() + 11, <=, kDataOffset);
  dict.resize(kDataOffset - 11, ' ');
  dict += '\n';
  std::string header(kMagic);
  header += {'\x01', '\x00', static_cast<char>(dict.size() & 0xff), static_cast<char>(dict.size() >> 8)};
  return header + dict;
}

}  // namespace mkernel
