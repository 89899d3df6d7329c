// What things cost in virtual time. Every preset says where its figures come from.
#pragma once
#include <string_view>
#include <vector>

#include "exec/schedule.h"
#include "mkernel/result.h"
#include "net/local/local_transport.h"
#include "net/transport.h"

namespace mkernel {

struct CostModel {
  int sms = 132;
  double gemm_flops_per_ns = 990e3;   // of the whole GPU, at peak
  double gemm_efficiency = 0.68;      // of the peak, in the main loop
  Nanos tile_ns = 700;                // fixed cost of a GEMM tile: prologue and what the epilogue leaves exposed
  double cache_bytes = 50e6;          // L2 of a GPU
  double memory_bytes_per_ns = 0;     // of a GPU that stands for all ranks, for what its L2 cannot hold; 0: no bound
  double attend_efficiency = 0.63;    // of the peak, in the main loop of attention
  Nanos attend_ns = 1700;             // fixed cost of a kAttend task: the pipeline drains and starts again
  double backward_efficiency = 0.55;  // of the peak, of attention's backward at 10 flops per score and dimension
  Nanos park_ns = 1650;               // loading or storing the state of a tile
  double sm_bytes_per_ns = 79;        // read + written by one SM that reduces or copies
  Nanos move_ns = 600;                // fixed cost of a reduce or copy task
  double nvlink_bytes_per_ns = 450;   // per GPU and direction
  Nanos flag_ns = 700;                // a flag raised on one GPU is seen on another of the node
  Nanos own_flag_ns = 400;            // a flag raised and seen on the same GPU
  Nanos record_ns = 1350;             // from a record's store to the proxy that reads it, and from host to GPU
  double net_bytes_per_ns = 50;       // per GPU and direction
  double wire_bytes_per_ns = 0;       // per rank, of the kernel that moves the network's bytes on one GPU; 0: none does
  Nanos wire_ns = 0;                  // what it takes for a network write, whatever its size
  Nanos net_ns = 2000;                // one way, first byte
  Nanos post_ns = 150;                // of the proxy, per network write
  bool unordered = false;             // writes overtake each other; arrivals are counted
  double jitter = 0;                  // each task takes up to this fraction longer, by the seed

  RoleCosts role_costs() const {
    return {gemm_flops_per_ns * gemm_efficiency / sms, sm_bytes_per_ns, static_cast<double>(move_ns),
            gemm_flops_per_ns * attend_efficiency / sms, gemm_flops_per_ns * backward_efficiency / sms};
  }
};

// "h200x8-ib", "h200x8-efa" or "h200-virtual". Errors: kBadArgument, names those that exist.
Result<CostModel> find_preset(std::string_view name);
std::vector<std::string_view> preset_names();

}  // namespace mkernel
