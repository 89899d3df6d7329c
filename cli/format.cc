#include "cli/format.h"

#include <fmt/format.h>

#include <array>
#include <cmath>

namespace mkernel::cli {
namespace {

// Four significant digits for 1 <= value < 1000.
std::string four_digits(double value) {
  if (value >= 999.95) return fmt::format("{:.0f}", value);
  if (value >= 99.995) return fmt::format("{:.1f}", value);
  return fmt::format("{:.{}f}", value, value >= 9.9995 ? 2 : 3);
}

}  // namespace

std::string format_us(double us) {
  if (us < 1) return fmt::format("{:.0f} ns", us * 1e3);
  if (us < 1e3) return four_digits(us) + " us";
  if (us < 1e6) return four_digits(us / 1e3) + " ms";
  return four_digits(us / 1e6) + " s";
}

std::string format_bytes(double bytes) {
  if (bytes < 1024) return fmt::format("{:.0f} bytes", bytes);
  static constexpr std::array<const char*, 6> kUnits = {"KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
  std::size_t unit = 0;
  for (bytes /= 1024; bytes >= 1024 && unit + 1 < kUnits.size(); ++unit) bytes /= 1024;
  return fmt::format("{} {}", four_digits(bytes), kUnits[unit]);
}

std::string format_flops(double flops_per_s) {
  static constexpr std::array<const char*, 5> kUnits = {"FLOP/s", "MFLOP/s", "GFLOP/s", "TFLOP/s", "PFLOP/s"};
  static constexpr std::array<double, 5> kScales = {1, 1e6, 1e9, 1e12, 1e15};
  std::size_t unit = 0;
  while (unit + 1 < kUnits.size() && flops_per_s >= kScales[unit + 1]) ++unit;
  return fmt::format("{} {}", four_digits(flops_per_s / kScales[unit]), kUnits[unit]);
}

std::string format_count(std::int64_t count) {
  std::string text = std::to_string(count);
  const std::size_t first = count < 0 ? 1 : 0;
  for (std::size_t i = text.size(); i > first + 3;) text.insert(i -= 3, 1, ' ');
  return text;
}

}  // namespace mkernel::cli
