#include "world/packet.h"

#include <gtest/gtest.h>

#include <random>

namespace mkernel {
namespace {

TEST(Packet, WhatIsWrittenIsReadBackAndNothingMore) {
  const std::string bytes = PacketWriter().number(7).text("seven").text("").number(0xffffffff).bytes();
  PacketReader reader(bytes);
  EXPECT_EQ(reader.number(), 7u);
  EXPECT_EQ(reader.text(), "seven");
  EXPECT_EQ(reader.text(), "");
  EXPECT_FALSE(reader.complete());
  EXPECT_EQ(reader.number(), 0xffffffffu);
  EXPECT_TRUE(reader.complete());
  EXPECT_EQ(reader.number(), 0u);
  EXPECT_FALSE(reader.ok());
}

TEST(Packet, EveryTruncationIsNoticed) {
  const std::string bytes = PacketWriter().text("a text").number(3).bytes();
  for (std::size_t size = 0; size < bytes.size(); ++size) {
    PacketReader reader(std::string_view(bytes).substr(0, size));
    reader.text();
    reader.number();
    EXPECT_FALSE(reader.complete()) << size;
  }
  const std::string giant = PacketWriter().number(0xffffffff).bytes();
  PacketReader huge(giant);
  EXPECT_EQ(huge.text(), "");
  EXPECT_FALSE(huge.ok());
}

TEST(FrameParser, FramesComeOutHoweverTheBytesAreCut) {
  std::string bytes;
  for (int i = 0; i < 20; ++i)
    bytes += encode_frame(FrameType::kGather, std::string(static_cast<std::size_t>(i * 7), 'x'));
  for (const std::size_t step : {1u, 2u, 11u, 12u, 13u, 1000u, 100'000u}) {
    FrameParser parser(1000);
    int count = 0;
    for (std::size_t at = 0; at < bytes.size(); at += step) {
      parser.feed(std::string_view(bytes).substr(at, step));
      while (const auto frame = parser.next()) {
        EXPECT_EQ(frame->type, FrameType::kGather);
        EXPECT_EQ(frame->payload.size(), static_cast<std::size_t>(count++ * 7));
      }
    }
    EXPECT_EQ(count, 20);
    EXPECT_FALSE(parser.broken());
  }
}

TEST(FrameParser, GarbageAndGiantLengthsBreakIt) {
  const std::string good = encode_frame(FrameType::kBeat);
  const std::string bad[] = {
      "GET / HTTP/1.1\r\n\r\n",
      std::string(100, '\0'),
      PacketWriter().number(kFrameMagic).number(0).number(0).bytes(),
      PacketWriter().number(kFrameMagic).number(kFrameTypeEnd).number(0).bytes(),
      PacketWriter().number(kFrameMagic).number(1).number(0xffffffff).bytes(),
      PacketWriter().number(kFrameMagic).number(1).number(1001).bytes(),
  };
  for (const std::string& bytes : bad) {
    FrameParser parser(1000);
    parser.feed(bytes + good);
    EXPECT_FALSE(parser.next());
    EXPECT_TRUE(parser.broken());
  }
  std::mt19937 random(1);
  for (int i = 0; i < 10'000; ++i) {
    FrameParser parser(1000);
    std::string bytes(random() % 64, '\0');
    for (char& c : bytes) c = static_cast<char>(random());
    parser.feed(bytes);
    while (parser.next()) {
    }
  }
}

}  // namespace
}  // namespace mkernel
