// Timelines as files that ui.perfetto.dev and chrome://tracing open.
#pragma once
#include <filesystem>
#include <span>
#include <string_view>

#include "mkernel/mkernel.h"
#include "plan/topology.h"

namespace mkernel {

// Writes Chrome's trace event format (JSON; times in microseconds with three decimals): one process per rank ("rank 3
// (node 0 gpu 3)"), one thread per SM ("SM 0") and per link ("to node 1"). Bars of a track that overlap, which a
// thread's calls cannot do, go to further threads ("to node 1 (2)"). `title` is kept as otherData.title.
//
// Tracks from kLinkTrack on are links: kLinkTrack + node. Every rank of `topo` gets its process, also without events.
// The file appears under its name whole or not at all. Errors: kIo.
Status write_trace(const std::filesystem::path& path, std::span<const TraceEvent> events, const Topology& topo,
                   std::string_view title);

inline constexpr int kLinkTrack = 1000;

}  // namespace mkernel
