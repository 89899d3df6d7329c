// Numbers as people read them.
#pragma once
#include <cstdint>
#include <string>

namespace mkernel::cli {

// "3.21 ms": four significant digits in the largest unit that leaves at least 1.
std::string format_us(double us);
// "1.50 MiB"; whole bytes below 1 KiB.
std::string format_bytes(double bytes);
// "12.3 GFLOP/s".
std::string format_flops(double flops_per_s);
// "1 234 567".
std::string format_count(std::int64_t count);

}  // namespace mkernel::cli
