#include "bench/link.h"

#include <fmt/format.h>

#include <algorithm>

namespace mkernel::bench {
namespace {

constexpr double kPortGigabytesPerS = 50;  // 400 Gbit/s per GPU, as the nodes that are stood for have

}  // namespace

LinkRate resolve_link(const LinkRule& rule, int sms, int gpu_sms, std::int64_t wire_bytes, double gemm_us) {
  switch (rule.kind) {
    case LinkRule::Kind::kNone: return {0, 0};
    case LinkRule::Kind::kScaled: return {kPortGigabytesPerS * sms / std::max(gpu_sms, 1), rule.latency_us};
    case LinkRule::Kind::kBalanced:
      // 10^9 bytes per second are 10^3 bytes per microsecond.
      return {gemm_us > 0 ? static_cast<double>(wire_bytes) / gemm_us * 1e-3 : 0, rule.latency_us};
    case LinkRule::Kind::kFixed: break;
  }
  return {rule.gigabytes_per_s, rule.latency_us};
}

double wire_us(const LinkRate& link, std::int64_t wire_bytes) {
  if (wire_bytes == 0) return 0;
  const double busy = link.gigabytes_per_s > 0 ? static_cast<double>(wire_bytes) / link.gigabytes_per_s * 1e-3 : 0;
  return busy + link.latency_us;
}

std::string link_text(const LinkRule& rule) {
  switch (rule.kind) {
    case LinkRule::Kind::kNone: return "none";
    case LinkRule::Kind::kScaled: return "scaled";
    case LinkRule::Kind::kBalanced: return "balanced";
    case LinkRule::Kind::kFixed: break;
  }
  return fmt::format("{}:{}", rule.gigabytes_per_s, rule.latency_us);
}

double floor_us(double our_gemm_us, double cublas_us, double communication_us, double wire) {
  return std::max(std::min(our_gemm_us, cublas_us), std::max(communication_us, wire));
}

}  // namespace mkernel::bench
