// Small reproducible random numbers: the same sequence on every machine.
#pragma once
#include <cstdint>

namespace mkernel {

// splitmix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, OOPSLA 2014): a bijection that mixes.
constexpr std::uint64_t mix64(std::uint64_t x) {
  x += 0x9e3779b97f4a7c15;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

class Random {
 public:
  explicit constexpr Random(std::uint64_t seed) : state_(mix64(seed)) {}

  constexpr std::uint64_t next() { return mix64(state_ += 0x9e3779b97f4a7c15); }
  // Uniform in [0, bound); bound >= 1. (The bias of the remainder is below bound / 2^64.)
  constexpr std::uint64_t below(std::uint64_t bound) { return next() % bound; }
  // Uniform in [0, 1).
  constexpr double uniform() { return static_cast<double>(next() >> 11) * 0x1p-53; }
  constexpr bool chance(double probability) { return uniform() < probability; }

 private:
  std::uint64_t state_;
};

}  // namespace mkernel
