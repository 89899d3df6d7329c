// The network that a virtual cluster is measured with, and what nothing can be faster than.
#pragma once
#include <cstdint>
#include <string>

namespace mkernel::bench {

// What was asked for; a rate may depend on the rank's size and on what was measured.
struct LinkRule {
  enum class Kind {
    kNone,      // as fast as the wire can
    kScaled,    // the share of a 50 GB/s port that a rank's SMs are of a whole GPU, 5 us
    kBalanced,  // the wire takes as long as the GEMM alone, 5 us
    kFixed,
  };
  Kind kind = Kind::kScaled;
  double gigabytes_per_s = 0;  // kFixed
  double latency_us = 5;
};

// Per rank and direction; 0 GB/s: unlimited.
struct LinkRate {
  double gigabytes_per_s = 0;
  double latency_us = 0;
};

// `sms` of a rank, `gpu_sms` of the GPU, `wire_bytes` of the busiest rank per call, `gemm_us` of the GEMM alone.
LinkRate resolve_link(const LinkRule& rule, int sms, int gpu_sms, std::int64_t wire_bytes, double gemm_us);

// How long the wire is busy, latency included; 0 without bytes.
double wire_us(const LinkRate& link, std::int64_t wire_bytes);

// "scaled", "balanced", "none", "12.5:5".
std::string link_text(const LinkRule& rule);

// max(min(our GEMM, cuBLAS), max(communication, wire)), in us.
double floor_us(double our_gemm_us, double cublas_us, double communication_us, double wire);

}  // namespace mkernel::bench
