#include "bench/shapes.h"

namespace mkernel::bench {
namespace {

constexpr Shape kOddShapes[] = {
    // primes and neighbours of powers of two
    {127, 129, 255},
    {1009, 2003, 3001},
    {5003, 4999, 1021},
    {4095, 4097, 4093},
    {8191, 1000, 1024},
    {1000, 8191, 4096},
    {255, 4095, 1000},
    {129, 127, 8191},
    // no round numbers
    {1000, 1000, 1000},
    {777, 1234, 2345},
    {333, 7777, 999},
    {12345, 678, 910},
    {6144, 2050, 3000},
    {3333, 3333, 3328},
    {10000, 10000, 1000},
    // small K
    {3000, 3000, 96},
    {4104, 4104, 40},
    {2000, 3000, 17},
    {4095, 4095, 33},
    // tall, wide, deep
    {65537, 64, 512},
    {64, 65537, 512},
    {20000, 192, 2048},
    {192, 20000, 2048},
    {100, 100, 16384},
    // decode
    {1, 4096, 4096},
    {1, 8192, 8192},
    {16, 4096, 4096},
    {16, 8192, 8192},
    {64, 8000, 4096},
    {128, 6000, 8192},
};
static_assert(sizeof(kOddShapes) / sizeof(kOddShapes[0]) == 30);

}  // namespace

std::vector<Shape> core_shapes() {
  std::vector<Shape> shapes = {{4096, 4096, 4096}, {8192, 8192, 8192}, {16384, 16384, 16384}};
  for (std::int64_t m = 2048; m <= 32768; m *= 2) {
    shapes.push_back({m, m / 16, m});
    shapes.push_back({m, m, m / 16});
  }
  return shapes;
}

std::span<const Shape> odd_shapes() { return kOddShapes; }

}  // namespace mkernel::bench
