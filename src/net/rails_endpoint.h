// Several endpoints of one rank, each over a card of its own, as one.
//
// A put goes over one rail with all that belongs to it, payload, stamp or arrivals, so what makes the order of one rail
// right makes that of all right. A stamp always takes the same rail, by its flag, of those that both sides have.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "net/process_endpoint.h"

namespace mkernel {

// Which of `rails` puts of a flag go over.
std::size_t rail_of(std::int64_t flag, std::uint32_t rails);

// `rails`: from 1 to kMaxRails, all of one kind, each with room for `queue_depth` puts in flight, which is how many
// there will be over all of them: so none is full before all are. Peers may have other numbers of rails; the first
// ones of both sides are connected.
std::unique_ptr<ProcessEndpoint> create_rails_endpoint(std::int32_t world, int queue_depth,
                                                       std::vector<std::unique_ptr<ProcessEndpoint>> rails);

}  // namespace mkernel
