// How a process of a world uses verbs: what its environment says, and which card is nearest.
#pragma once
#include <functional>
#include <string>
#include <vector>

#include "mkernel/result.h"
#include "net/verbs/nic_choice.h"

namespace mkernel {

struct VerbsSettings {
  NicFilter nics;
  int gid_index = -1;  // -1: chosen
  int traffic_class = 0;
  int service_level = 0;
  int lanes = 2;        // queue pairs per peer
  int timeout = 17;     // 4.096 us * 2^timeout per retry of the hardware
  int retry_count = 6;  // 7 is for ever to some devices (rdma_rxe)
  int rails = 16;       // ports per rank, at most
};

// MKERNEL_IB_HCA, _GID_INDEX, _TC, _SL, _QPS_PER_CONNECTION, _TIMEOUT and _RETRY_CNT, and where one is not set NCCL_IB_
// and the same; MKERNEL_IB_RAILS. Errors: kBadArgument.
Result<VerbsSettings> verbs_settings_from(const std::function<const char*(const char*)>& environment);

// Why a port is not used; empty: it may be.
std::string why_not_used(const VerbsSettings& settings, const Nic& nic);

// The ports for GPU number `gpu` of a node's: of those that assign_nics() gives it, nearest first, the ones whose link
// is of the first one's kind, and no more than `settings` allows. By name, so that equal machines pair equal cards.
std::vector<Nic> rails_of(const VerbsSettings& settings, const std::vector<Nic>& usable,
                          const std::vector<int>& assigned);

// The same from a sysfs tree. Errors: kUnsupported, with what there is instead.
Result<std::vector<Nic>> choose_nics(const VerbsSettings& settings, const std::string& sysfs,
                                     const std::vector<GpuPlace>& gpus, int gpu);

}  // namespace mkernel
