// Which headers are understood, and that everything else is refused with a sentence that says why.
#include <cstddef>
#include <cstring>
#include <string>
#include <string_view>
#include <vector>

#include <gtest/gtest.h>

#include "base/npy.h"

namespace mkernel {
namespace {

using namespace std::string_literals;

constexpr std::string_view kName = "dir/a.npy";
constexpr std::uint64_t kNoLimit = 1 << 20;

std::span<const std::byte> bytes_of(std::string_view text) {
  return {reinterpret_cast<const std::byte*>(text.data()), text.size()};
}

std::string preamble(int major, std::size_t header_bytes) {
  std::string text = "\x93NUMPY"s + static_cast<char>(major) + '\0';
  for (int i = 0; i < (major == 1 ? 2 : 4); ++i) text += static_cast<char>(header_bytes >> (8 * i) & 0xff);
  return text;
}

// A file of version 1.0 with this text as its header and this many bytes of data.
std::string file_with(std::string_view header, std::size_t data_bytes) {
  return preamble(1, header.size()) + std::string(header) + std::string(data_bytes, 'x');
}

Result<NpyHeader> parse(std::string_view file) { return parse_npy_header(bytes_of(file), file.size(), kName); }

struct Accepted {
  const char* header;
  std::size_t data_bytes;
  NpyType type;
  bool fortran;
  int dims;
  std::int64_t rows, cols;
};

TEST(NpyHeader, EverySpellingThatPythonWouldReadTheSameIsUnderstood) {
  const Accepted cases[] = {
      {"{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), }      \n", 24, NpyType::kF32, false, 2, 2, 3},
      {"{'descr':'<f4','fortran_order':False,'shape':(2,3)}", 24, NpyType::kF32, false, 2, 2, 3},
      {"{'shape': (2, 3), 'fortran_order': True, 'descr': '<f8'}\n", 48, NpyType::kF64, true, 2, 2, 3},
      {"{\"descr\": \"<f2\", \"fortran_order\": False, \"shape\": (2, 3)}\n", 12, NpyType::kF16, false, 2, 2, 3},
      {"{'descr': '<f4', 'fortran_order': False, 'shape': (2L, 3L), }\n", 24, NpyType::kF32, false, 2, 2, 3},
      {"{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3,), }\n", 24, NpyType::kF32, false, 2, 2, 3},
      {" \t\n{ 'descr' :\r\n'<f4' , 'fortran_order' : False , 'shape' : ( 2 , 3 , ) , } \f\n \n", 24, NpyType::kF32,
       false, 2, 2, 3},
      {"{'descr': '<f4', 'fortran_order': True, 'shape': (5,), }\n", 20, NpyType::kF32, true, 1, 1, 5},
      {"{'descr': '<f4', 'fortran_order': False, 'shape': (5L,)}\n", 20, NpyType::kF32, false, 1, 1, 5},
      {"{'descr': '<f4', 'fortran_order': False, 'shape': (0, 7)}\n", 0, NpyType::kF32, false, 2, 0, 7},
      {"{'descr': '<f4', 'fortran_order': False, 'shape': (7, 0)}\n", 0, NpyType::kF32, false, 2, 7, 0},
      {"{'descr': '<f4', 'fortran_order': False, 'shape': (0,)}\n", 0, NpyType::kF32, false, 1, 1, 0},
      {"{'descr': '<f4', 'fortran_order': True, 'shape': (9223372036854775807, 0)}\n", 0, NpyType::kF32, true, 2,
       INT64_MAX, 0},
      {"{'descr': '<V2', 'fortran_order': False, 'shape': (1, 3)}\n", 6, NpyType::kBf16, false, 2, 1, 3},
      {"{'descr': '|V2', 'fortran_order': False, 'shape': (1, 3)}\n", 6, NpyType::kBf16, false, 2, 1, 3},
      {"{'descr': 'bfloat16', 'fortran_order': False, 'shape': (1, 3)}\n", 6, NpyType::kBf16, false, 2, 1, 3},
      {"{'descr': '<u2', 'fortran_order': False, 'shape': (1, 3)}\n", 6, NpyType::kU16, false, 2, 1, 3},
      {"{'descr': '|i1', 'fortran_order': False, 'shape': (1, 3)}\n", 3, NpyType::kI8, false, 2, 1, 3},
      {"{'descr': '<i4', 'fortran_order': False, 'shape': (1, 3)}\n", 12, NpyType::kI32, false, 2, 1, 3},
      {"{'descr': '<i8', 'fortran_order': False, 'shape': (1, 3)}\n", 24, NpyType::kI64, false, 2, 1, 3},
  };
  for (const Accepted& expected : cases) {
    SCOPED_TRACE(expected.header);
    const std::string file = file_with(expected.header, expected.data_bytes);
    const Result<NpyHeader> header = parse(file);
    ASSERT_TRUE(header) << header.error().message;
    EXPECT_EQ(header->type, expected.type);
    EXPECT_EQ(header->fortran, expected.fortran);
    EXPECT_EQ(header->dims, expected.dims);
    EXPECT_EQ(header->rows, expected.rows);
    EXPECT_EQ(header->cols, expected.cols);
    EXPECT_EQ(header->data_offset, file.size() - expected.data_bytes);
    EXPECT_EQ(header->data_bytes, static_cast<std::int64_t>(expected.data_bytes));
  }
}

TEST(NpyHeader, AllThreeVersionsAreUnderstood) {
  const std::string header = "{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), }\n";
  for (const int major : {1, 2, 3}) {
    const Result<NpyHeader> parsed = parse(preamble(major, header.size()) + header + std::string(24, 'x'));
    ASSERT_TRUE(parsed) << parsed.error().message;
    EXPECT_EQ(parsed->data_offset, (major == 1 ? 10u : 12u) + header.size());
  }
}

TEST(NpyHeader, TheLongestHeaderIsUnderstoodFromItsFirstBytesAlone) {
  std::string header = "{'descr': '<f4', 'fortran_order': False, 'shape': (300, 100), }";
  header.resize(65535, ' ');
  for (const int major : {1, 2}) {
    const std::string first = (preamble(major, header.size()) + header + std::string(8, 'x')).substr(0, 65547);
    const Result<NpyHeader> parsed =
        parse_npy_header(bytes_of(first), (major == 1 ? 10u : 12u) + 65535u + 120000u, kName);
    ASSERT_TRUE(parsed) << parsed.error().message;
    EXPECT_EQ(parsed->rows, 300);
  }
}

struct Refused {
  std::string file;
  const char* says;
};

// The text of a header around one value.
std::string with_descr(const std::string& descr) {
  return file_with("{'descr': " + descr + ", 'fortran_order': False, 'shape': (2, 3), }\n", 24);
}
std::string with_order(const std::string& order) {
  return file_with("{'descr': '<f4', 'fortran_order': " + order + ", 'shape': (2, 3), }\n", 24);
}
std::string with_shape(const std::string& shape) {
  return file_with("{'descr': '<f4', 'fortran_order': False, 'shape': " + shape + ", }\n", 24);
}

std::vector<Refused> refused_files() {
  const std::string good = "{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), }\n";
  return {
      // Not a .npy file, or not all of one.
      {"", "the file is empty"},
      {"\x93", "ends inside its header, after 1 bytes"},
      {"\x93NUMPY", "ends inside its header"},
      {"\x93NUMPY\x01", "ends inside its header"},
      {"\x93NUMPY\x01\x00"s, "ends inside its header"},
      {"\x93NUMPY\x01\x00v"s, "ends inside its header"},
      {"\x93NUMPY\x02\x00v\x00\x00"s, "ends inside its header, after 11 bytes"},
      {"hello, world", "does not begin with \\x93NUMPY"},
      {"\x93NUMPX\x01\x00v\x00"s + good, "does not begin with"},
      {"\x92NUMPY\x01\x00v\x00"s + good, "does not begin with"},
      {"1.0,2.0\n3.0,4.0\n", "does not begin with"},
      {"PK\x03\x04 and so on", "this is an archive (.npz)"},
      {"\x93NUMPY\x00\x01"s + good, "the format version is 0.1, accepted are 1.0, 2.0 and 3.0"},
      {"\x93NUMPY\x04\x00"s + good, "the format version is 4.0"},
      {"\x93NUMPY\x01\x01"s + good, "the format version is 1.1"},
      {"\x93NUMPY\xff\xff"s + good, "the format version is 255.255"},
      {preamble(1, 65535) + good, "ends inside its header"},
      {preamble(1, good.size() + 25) + good + std::string(24, 'x'), "ends inside its header"},
      {preamble(2, 65536) + good, "is said to have 65536 bytes, accepted are at most 65535"},
      {preamble(3, 0xffffffff) + good, "is said to have 4294967295 bytes"},
      // Not a dictionary.
      {file_with("", 24), "the header is not a dictionary: it has its end instead of '{'"},
      {file_with("    \n", 24), "not a dictionary"},
      {file_with("['descr']", 24), "not a dictionary: it has \"['descr']\" instead of '{'"},
      {file_with("dict(descr='<f4')", 24), "not a dictionary"},
      {file_with("{", 24), "a key must be a string, not its end"},
      {file_with("{}", 24), "the header has no 'descr'"},
      {file_with("{,}", 24), "a key must be a string"},
      {file_with("{'descr'}", 24), "after the key 'descr', the header has \"}\" instead of ':'"},
      {file_with("{'descr' '<f4'}", 24), "instead of ':'"},
      {file_with("{'descr':}", 24), "'descr' must be a string"},
      {file_with("{descr: '<f4'}", 24), "a key must be a string"},
      {file_with("{u'descr': '<f4'}", 24), "a key must be a string"},
      {file_with("{'descr", 24), "a key is a string without end"},
      {file_with("{'descr\": '<f4'}", 24), "after the key 'descr\": ', the header has \"<f4'}\" instead of ':'"},
      {file_with("{'de\\x73cr': '<f4'}", 24), "a key holds a character that is not accepted"},
      {file_with("{'descr\n': '<f4'}", 24), "a key holds a character that is not accepted"},
      {file_with("{'descr\xc3\xa9': '<f4'}", 24), "a key holds a character that is not accepted"},
      {file_with("{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3)", 24), "instead of '}'"},
      {file_with("{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3),", 24), "a key must be a string"},
      {file_with("{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3),,}", 24), "a key must be a string"},
      {file_with("{'descr': '<f4' 'fortran_order': False, 'shape': (2, 3)}", 24), "after an entry"},
      {file_with("{'descr': '<f4'; 'fortran_order': False, 'shape': (2, 3)}", 24), "after an entry"},
      {file_with(good + "{}", 24), "goes on after its dictionary, with \"{}\""},
      {file_with(good + ";", 24), "goes on after its dictionary"},
      {file_with(good + "\0"s, 24), "goes on after its dictionary, with \"?\""},
      {file_with("\0"s + good, 24), "not a dictionary"},
      {file_with("{\0}"s, 24), "a key must be a string, not \"?}\""},
      {file_with("# a comment\n" + good, 24), "not a dictionary"},
      {file_with("\xef\xbb\xbf" + good, 24), "not a dictionary: it has \"???{'descr'"},
      // Keys.
      {file_with("{'fortran_order': False, 'shape': (2, 3)}", 24), "the header has no 'descr'"},
      {file_with("{'descr': '<f4', 'shape': (2, 3)}", 24), "the header has no 'fortran_order'"},
      {file_with("{'descr': '<f4', 'fortran_order': False}", 24), "the header has no 'shape'"},
      {file_with("{'descr': '<f4', 'descr': '<f4', 'shape': (2, 3)}", 24), "has 'descr' twice"},
      {file_with("{'fortran_order': False, 'fortran_order': False}", 24), "has 'fortran_order' twice"},
      {file_with("{'shape': (2, 3), 'shape': (2, 3)}", 24), "has 'shape' twice"},
      {file_with("{'Descr': '<f4'}", 24), "the unknown key \"Descr\", accepted are 'descr'"},
      {file_with("{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), 'x': 1}", 24), "unknown key \"x\""},
      {file_with("{'': 1}", 24), "unknown key \"\""},
      {file_with("{'" + std::string(100, 'k') + "': 1}", 24), "kkkk...\", accepted"},
      // Element types.
      {with_descr("'>f4'"), "the element type is \">f4\", accepted are '<f4', '<f8'"},
      {with_descr("'>f4'"), "this one is big-endian, a.astype('<f4') in NumPy turns it"},
      {with_descr("'>i8'"), "a.astype('<i8')"},
      {with_descr("'<c8'"), "the element type is \"<c8\""},
      {with_descr("'|O'"), "the element type is \"|O\""},
      {with_descr("'<U3'"), "the element type is"},
      {with_descr("'|b1'"), "the element type is"},
      {with_descr("'|u1'"), "the element type is"},
      {with_descr("'<u4'"), "the element type is"},
      {with_descr("'<V4'"), "the element type is"},
      {with_descr("'f4'"), "the element type is \"f4\""},
      {with_descr("'=f4'"), "the element type is"},
      {with_descr("'<f4 '"), "the element type is"},
      {with_descr("''"), "the element type is \"\""},
      {with_descr("4"), "'descr' must be a string, not \"4, "},
      {with_descr("None"), "'descr' must be a string"},
      {with_descr("[('x', '<f4')]"), "the elements are structured"},
      {with_descr("('<f4', (2,))"), "'descr' must be a string"},
      // Order.
      {with_order("false"), "'fortran_order' must be True or False, not \"false"},
      {with_order("0"), "'fortran_order' must be True or False"},
      {with_order("None"), "'fortran_order' must be True or False"},
      {with_order("'False'"), "'fortran_order' must be True or False"},
      {with_order(""), "'fortran_order' must be True or False"},
      {with_order("Falsehood"), "after an entry, the header has \"hood"},
      // Shapes.
      {with_shape("()"), "the array has 0 dimensions, accepted are 1 and 2"},
      {with_shape("(2, 3, 1)"), "the array has 3 dimensions"},
      {with_shape("(1, 1, 1, 1, 1, 1, 1, 6)"), "the array has 8 dimensions"},
      {with_shape("6"), "'shape' must be a tuple"},
      {with_shape("[2, 3]"), "'shape' must be a tuple"},
      {with_shape("(6)"), "'shape' is a number in parentheses, accepted is a tuple like (3,)"},
      {with_shape("(,)"), "'shape' must hold whole numbers"},
      {with_shape("(2,,3)"), "'shape' must hold whole numbers"},
      {with_shape("(2 3)"), "'shape' needs a comma or ')'"},
      {with_shape("(2, 3"), "'shape' must hold whole numbers"},
      {with_shape("(2, 3]"), "'shape' needs a comma or ')'"},
      {with_shape("((2, 3))"), "'shape' must hold whole numbers"},
      {with_shape("(-2, 3)"), "'shape' has a negative number"},
      {with_shape("(2, -3)"), "'shape' has a negative number"},
      {with_shape("(+2, 3)"), "'shape' must hold whole numbers"},
      {with_shape("(2.0, 3)"), "'shape' needs a comma or ')'"},
      {with_shape("(2e0, 3)"), "'shape' needs a comma or ')'"},
      {with_shape("(0x2, 3)"), "'shape' needs a comma or ')'"},
      {with_shape("(1_0, 3)"), "'shape' needs a comma or ')'"},
      {with_shape("(02, 3)"), "'shape' has a number with a leading zero"},
      {with_shape("(2LL, 3)"), "'shape' needs a comma or ')'"},
      {with_shape("(L, 3)"), "'shape' must hold whole numbers"},
      {with_shape("(True, 6)"), "'shape' must hold whole numbers"},
      {with_shape("('2', 3)"), "'shape' must hold whole numbers"},
      {with_shape("(2*1, 3)"), "'shape' needs a comma or ')'"},
      {with_shape("(9223372036854775808, 1)"), "'shape' has a number that does not fit 63 bits"},
      {with_shape("(18446744073709551618, 3)"), "'shape' has a number that does not fit 63 bits"},
      {with_shape("(" + std::string(400, '9') + ", 3)"), "'shape' has a number that does not fit 63 bits"},
      // Sizes.
      {with_shape("(4294967296, 4294967296)"), "4294967296 x 4294967296 of '<f4', which does not fit 63 bits"},
      {with_shape("(4611686018427387904, 4)"), "which does not fit 63 bits"},
      {with_shape("(4611686018427387904, 1)"), "which does not fit 63 bits"},
      {with_shape("(9223372036854775807,)"), "which does not fit 63 bits"},
      {with_shape("(1, 2305843009213693951)"),
       "promises 9223372036854775804 bytes of data (1 x 2305843009213693951 of '<f4'), but the file holds 24"},
      {with_shape("(3, 3)"), "promises 36 bytes of data (3 x 3 of '<f4'), but the file holds 24"},
      {with_shape("(7,)"), "promises 28 bytes of data"},
      {with_shape("(1, 5)"), "promises 20 bytes of data (1 x 5 of '<f4'), but the file holds 24"},
      {with_shape("(0, 3)"), "promises 0 bytes of data"},
      {with_descr("'<f8'"), "promises 48 bytes of data (2 x 3 of '<f8'), but the file holds 24"},
      {file_with(good, 23), "but the file holds 23"},
      {file_with(good, 25), "but the file holds 25"},
      {file_with(good, 0), "but the file holds 0"},
  };
}

TEST(NpyHeader, EveryMalformedFileIsRefusedWithItsNameAndTheReason) {
  const std::vector<Refused> cases = refused_files();
  EXPECT_GE(cases.size(), 60u);
  for (const Refused& refused : cases) {
    SCOPED_TRACE(refused.says);
    const Result<NpyHeader> header = parse(refused.file);
    ASSERT_FALSE(header);
    const Error& error = header.error();
    EXPECT_EQ(error.kind, ErrorKind::kBadArgument);
    EXPECT_EQ(error.message.rfind("dir/a.npy: ", 0), 0u) << error.message;
    EXPECT_NE(error.message.find(refused.says), std::string::npos) << error.message;
    EXPECT_LT(error.message.size(), 250u) << error.message;
    for (const char c : error.message) EXPECT_TRUE(c >= ' ' && c <= '~') << error.message;
    EXPECT_FALSE(parse_npy(bytes_of(refused.file), kName, kNoLimit));
  }
}

TEST(NpyHeader, EveryTruncationIsRefused) {
  const std::string file = npy_header(NpyType::kF32, 2, 3) + std::string(24, 'x');
  ASSERT_TRUE(parse(file));
  for (std::size_t bytes = 0; bytes < file.size(); ++bytes) EXPECT_FALSE(parse(file.substr(0, bytes))) << bytes;
}

TEST(NpyHeader, OneDamagedByteIsRefusedOrChangesNothingButBlanksOrOrder) {
  const std::string file = npy_header(NpyType::kF32, 2, 3) + std::string(24, 'x');
  for (std::size_t at = 0; at < file.size() - 24; ++at) {
    for (int value = 0; value < 256; ++value) {
      std::string damaged = file;
      damaged[at] = static_cast<char>(value);
      const Result<NpyHeader> header = parse(damaged);
      if (!header) continue;
      // A type of the same size, or the version 3 of a file that is long enough, cannot be told from the truth.
      ASSERT_EQ(header->data_bytes, 24) << at << " " << value;
      ASSERT_EQ(header->rows * header->cols, 6) << at << " " << value;
      ASSERT_EQ(npy_type_bytes(header->type), 4) << at << " " << value;
    }
  }
}

TEST(NpyHeader, WhatIsComposedIsUnderstood) {
  for (int i = 0; i < kNpyTypeCount; ++i) {
    const NpyType type = static_cast<NpyType>(i);
    for (const std::int64_t rows : {std::int64_t{0}, std::int64_t{1}, std::int64_t{99999}, INT64_MAX}) {
      const std::int64_t cols = rows == INT64_MAX ? 0 : 3;
      const std::string header = npy_header(type, rows, cols);
      EXPECT_EQ(header.size() % 64, 0u);
      const std::uint64_t data_bytes = static_cast<std::uint64_t>(rows * cols * npy_type_bytes(type));
      const std::string file = header + std::string(data_bytes, '\0');
      const Result<NpyHeader> parsed = parse(file);
      ASSERT_TRUE(parsed) << parsed.error().message;
      EXPECT_EQ(parsed->type, type);
      EXPECT_EQ(parsed->rows, rows);
      EXPECT_EQ(parsed->cols, cols);
      EXPECT_FALSE(parsed->fortran);
    }
  }
}

}  // namespace
}  // namespace mkernel
