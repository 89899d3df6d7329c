#include "exec/cuda/gpu_rings.h"

#include <bit>
#include <utility>

#include "base/check.h"
#include "exec/cuda/driver.h"
#include "exec/cuda/format.h"

namespace mkernel {
namespace {

constexpr std::size_t kLine = 128;  // of any cache on either side

constexpr std::size_t whole_lines(std::size_t bytes) { return (bytes + kLine - 1) / kLine * kLine; }

// In a stream of its own: a synchronous copy could wait for kernels that spin.
Status upload(int device, std::byte* dst, const std::vector<std::byte>& src) {
  const DeviceGuard guard(device);
  cudaError_t status = guard.status();
  cudaStream_t stream = nullptr;
  if (status == cudaSuccess) status = cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
  if (status == cudaSuccess) status = cudaMemcpyAsync(dst, src.data(), src.size(), cudaMemcpyHostToDevice, stream);
  if (status == cudaSuccess) status = cudaStreamSynchronize(stream);
  if (stream != nullptr) (void)cudaStreamDestroy(stream);
  if (status != cudaSuccess) return cuda_error(status, fmt::format("writing the command rings of GPU {}", device));
  return Ok{};
}

}  // namespace

Result<GpuRings> GpuRings::create(VirtualGpus& gpus, const Topology& topo, std::uint32_t depth) {
  GpuRings rings;
  rings.topo_ = topo;
  const auto world = static_cast<std::size_t>(topo.world());
  const auto nodes = static_cast<std::size_t>(topo.nodes);
  const std::size_t ring_bytes = whole_lines(depth * sizeof(std::uint64_t)) + kLine;
  Result<PinnedMemory> pinned = PinnedMemory::create(world * nodes * ring_bytes);
  if (!pinned) return pinned.error();
  rings.pinned_ = std::move(*pinned);
  rings.tables_.resize(world);
  for (std::int32_t rank = 0; rank < topo.world(); ++rank) {
    for (std::int32_t node = 0; node < topo.nodes; ++node) {
      std::byte* const at = rings.pinned_.host() + rings.index(rank, node) * ring_bytes;
      const RingMemory memory{reinterpret_cast<std::uint64_t*>(at + kLine), reinterpret_cast<std::uint32_t*>(at),
                              depth};
      rings.rings_.push_back(!gpus.has(rank) || node == topo.node_of(rank) ? nullptr
                                                                           : std::make_unique<CommandRing>(memory));
    }
  }
  for (const int device : gpus.devices()) {
    const Status created = rings.create_on(gpus, device, depth);
    if (!created) return created.error();
  }
  return Result<GpuRings>(std::move(rings));
}

// Per rank of the device: its table, then a line each for the head and the tail seen of every ring.
Status GpuRings::create_on(VirtualGpus& gpus, int device, std::uint32_t depth) {
  const auto nodes = static_cast<std::size_t>(topo_.nodes);
  const std::size_t table_bytes = whole_lines(nodes * sizeof(DeviceRing));
  const std::size_t rank_bytes = table_bytes + nodes * 2 * kLine;
  std::vector<std::int32_t> ranks;
  for (std::int32_t rank = 0; rank < topo_.world(); ++rank) {
    if (gpus.has(rank) && gpus.rank(rank).device == device) ranks.push_back(rank);
  }
  Result<DeviceHeap> heap = DeviceHeap::create(device, static_cast<std::int64_t>(ranks.size() * rank_bytes), {});
  if (!heap) return heap.error();
  std::vector<std::byte> image(ranks.size() * rank_bytes);
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    auto* const table = reinterpret_cast<DeviceRing*>(image.data() + i * rank_bytes);
    std::byte* const words = heap->data() + i * rank_bytes + table_bytes;
    for (std::int32_t node = 0; node < topo_.nodes; ++node) {
      CommandRing* const of = ring(ranks[i], node);
      if (of == nullptr) continue;
      const RingView view = of->view();
      std::byte* const pair = words + static_cast<std::size_t>(node) * 2 * kLine;
      table[node] = {pinned_.on_gpu(view.slots),
                     reinterpret_cast<std::uint32_t*>(pair),
                     reinterpret_cast<std::uint32_t*>(pair + kLine),
                     pinned_.on_gpu(view.tail),
                     depth,
                     view.depth_log2};
    }
    tables_[static_cast<std::size_t>(ranks[i])] = reinterpret_cast<const DeviceRing*>(heap->data() + i * rank_bytes);
  }
  const Status uploaded = upload(device, heap->data(), image);
  if (!uploaded) return uploaded.error();
  heaps_.push_back(std::move(*heap));
  return Ok{};
}

}  // namespace mkernel
