// Waits that last too long: who waits for what from whom.
#pragma once
#include <atomic>
#include <cstdint>

#include "exec/host/host_shared.h"

namespace mkernel {

// Checks how long `rank` has made no progress on `call`; warns, or fails the world, when that is too long. Called by
// SMs that found nothing to do. Returns when to check again at the latest.
Nanos check_stall(HostShared& shared, std::int32_t rank, const Call& call, Nanos now);

}  // namespace mkernel
