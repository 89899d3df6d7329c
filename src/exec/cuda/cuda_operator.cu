#include "exec/cuda/cuda_operator.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <utility>

#include "base/check.h"
#include "exec/cuda/attention_config.h"
#include "exec/cuda/driver.h"
#include "exec/cuda/format.h"
#include "exec/cuda/tensor_map.h"
#include "plan/flag_init.h"

namespace mkernel {
namespace {

constexpr std::int64_t kPitchUnit = 8;  // elements of 16 bytes
constexpr std::int64_t kCopyUnit = 64;  // of 128 bytes: a row of a TMA box is one request to L2 then, not two

std::int64_t rounded(std::int64_t elements) { return ceil_div(elements, kPitchUnit) * kPitchUnit; }
std::int64_t copy_pitch(std::int64_t cols) { return ceil_div(cols, kCopyUnit) * kCopyUnit; }

// Whether rows are contiguous and start at multiples of 16 bytes, as TMA wants them.
bool is_wide(const Matrix& m) {
  const bool address = reinterpret_cast<std::uintptr_t>(m.data) % 16 == 0;
  const bool contiguous = m.col_stride == 1 || m.cols <= 1;
  const bool pitch = m.rows <= 1 || (m.row_stride % kPitchUnit == 0 && m.row_stride >= m.cols);
  return address && contiguous && pitch;
}
Matrix transposed(const Matrix& m) { return {m.data, m.cols, m.rows, m.col_stride, m.row_stride}; }

// Whether a dense row-major matrix of this width would not be wide.
bool needs_copy(std::int64_t cols) { return cols % kPitchUnit != 0; }

// Whether a dense row-major matrix of this width would have rows that do not begin at multiples of 128 bytes.
bool off_lines(std::int64_t cols) { return cols % kCopyUnit != 0; }
bool off_lines(const Matrix& m) {
  return m.rows > 1 && (m.row_stride % kCopyUnit != 0 || reinterpret_cast<std::uintptr_t>(m.data) % 128 != 0);
}

std::int64_t a_copy_bytes(const CudaOperatorConfig& config, const AlignedCopies& aligned, std::int32_t rank) {
  const Plan::Extent a = config.source->plan().a_extent(rank);
  return config.any_layout || needs_copy(a.cols) || (aligned.a && off_lines(a.cols)) ? a.rows * copy_pitch(a.cols) * 2
                                                                                     : 0;
}
std::int64_t b_copy_bytes(const CudaOperatorConfig& config, const AlignedCopies& aligned, std::int32_t rank) {
  const Plan::Extent b = config.source->plan().b_extent(rank);
  return config.any_layout || needs_copy(b.cols) || (aligned.b && off_lines(b.cols)) ? b.rows * copy_pitch(b.cols) * 2
                                                                                     : 0;
}

Repack repack(const Matrix& from, const Matrix& to) {
  const DeviceMatrix src{from.data, from.row_stride, from.col_stride, 0};
  return {to.data, to.row_stride, src, from.rows, from.cols};
}

Error layout_error(const char* name, const Matrix& m, std::int32_t rank, const char* accepted) {
  return bad_argument(fmt::format(
      "{} of rank {} at address {} with strides {}, {} cannot be read by TMA: {} are accepted as they are; with "
      "any_layout every layout is, and copied first",
      name, rank, m.data, m.row_stride, m.col_stride, accepted));
}

}  // namespace

DeviceMatrix device_matrix(const Matrix& m) {
  // The pitch of a single row is free; TMA wants one that the row fits in.
  const std::int64_t row_stride = m.rows <= 1 ? rounded(std::max<std::int64_t>(m.cols, 1)) : m.row_stride;
  return {m.data, is_wide(m) ? row_stride : m.row_stride, is_wide(m) ? 1 : m.col_stride, is_wide(m) ? 1 : 0};
}

CudaOperatorImpl::CudaOperatorImpl(std::uint32_t number, const CudaOperatorConfig& config, Partition partition,
                                   std::int32_t first_rank)
    : number_(number),
      config_(config),
      partition_(partition),
      layout_(config.source->plan()),
      first_rank_(first_rank),
      ranks_(static_cast<std::size_t>(config.source->plan().topo().world())) {}

CudaOperatorImpl::~CudaOperatorImpl() {
  for (Rank& rank : ranks_) {
    if (rank.done != nullptr) cudaEventDestroy(rank.done);
  }
}

std::vector<std::byte*> CudaOperatorImpl::heaps() const {
  std::vector<std::byte*> heaps;
  for (const Rank& rank : ranks_) heaps.push_back(rank.memory.data());
  return heaps;
}

std::int64_t CudaOperatorImpl::bytes_needed(const CudaOperatorConfig& config, std::int32_t rank, int sms) {
  const Plan& plan = config.source->plan();
  std::int64_t tasks = 0;
  const bool attention = plan.spec().op == Op::kRingAttention;
  const AlignedCopies aligned = attention ? AlignedCopies{} : choose_copies(plan.spec(), sms);
  for (int role = 0; role < kRoleCount; ++role) {
    if (attention && role == static_cast<int>(Role::kCompute)) continue;  // tables of its own
    for (std::int32_t lane = 0; lane < plan.lanes(static_cast<Role>(role)); ++lane) {
      tasks += plan.count(rank, static_cast<Role>(role), lane);
    }
  }
  const PlanSpec& spec = plan.spec();
  const bool window = config.share && spec.op == Op::kGemmAllReduce;
  return HeapLayout(plan).bytes() + (window ? spec.m * rounded(spec.n) * 2 : 0) +
         tasks * static_cast<std::int64_t>(sizeof(DeviceTask) + sizeof(std::uint64_t)) +
         a_copy_bytes(config, aligned, rank) + b_copy_bytes(config, aligned, rank);
}

RankMemory CudaOperatorImpl::place(std::int32_t rank, const TaskTable& table, int sms) const {
  RankMemory at;
  std::int64_t end = layout_.bytes();
  const auto add = [&](std::int64_t bytes) {
    const std::int64_t begin = ceil_div(end, 256) * 256;
    end = begin + bytes;
    return begin;
  };
  const auto size = [](const auto& v) { return static_cast<std::int64_t>(v.size() * sizeof(v[0])); };
  at.window = add(has_window() ? plan().spec().m * rounded(plan().spec().n) * 2 : 0);
  // Processes keep a copy of all windows' slots, for a slot holds an address.
  at.c_slots = add(static_cast<std::int64_t>(2 * sizeof(DeviceMatrix)) * (has_window() ? plan().topo().gpus : 1));
  at.control = add(sizeof(DeviceControl));
  at.heads = add(static_cast<std::int64_t>(table.lanes.size() * sizeof(DeviceHead)));
  at.begun = add(std::int64_t{sms} * 4);
  at.lanes = add(size(table.lanes));
  at.tasks = add(size(table.tasks));
  at.claims = add(static_cast<std::int64_t>(table.tasks.size() * sizeof(std::uint64_t)));
  at.records = add(size(table.records));
  // A float for every accumulator of every consumer thread, also where one warpgroup's are not used.
  constexpr std::int64_t kSumRows = kConsumerThreads / 2;
  at.part_sums = add(std::int64_t{table.parts} * kSumRows * plan().spec().tiling.bn * 4);
  at.parts_done = add(std::int64_t{table.parts} * 4);
  at.a_copy = add(a_copy_bytes(config_, ranks_[static_cast<std::size_t>(rank)].aligned, rank));
  at.b_copy = add(b_copy_bytes(config_, ranks_[static_cast<std::size_t>(rank)].aligned, rank));
  at.attention = add(ranks_[static_cast<std::size_t>(rank)].attention_at.bytes);
  at.bytes = end;
  return at;
}

Status CudaOperatorImpl::make_table(std::int32_t r, int sms) {
  Rank& self = rank(r);
  if (!is_attention()) {
    Result<TaskTable> table = make_task_table(*config_.source, r, {sms, 0});
    if (!table.ok()) return table.error();
    self.table = std::move(*table);
    return Ok{};
  }
  Result<AttentionTable> table =
      make_attention_table(*config_.source, r, partition_.compute > 0 ? partition_.compute : sms, sms);
  if (!table.ok()) return table.error();
  self.attention = std::move(*table);
  self.attention_at = place_attention(plan().spec(), self.attention);
  self.table.tasks = self.attention.tasks;
  self.table.lanes = self.attention.lanes;
  return Ok{};
}

Status CudaOperatorImpl::take_memory(VirtualGpus& gpus) {
  for (std::int32_t r = 0; r < plan().topo().world(); ++r) {
    if (!gpus.has(r)) continue;
    if (Status status = make_table(r, gpus.rank(r).sms); !status.ok()) return status;
    Rank& self = rank(r);
    if (!is_attention()) self.aligned = choose_copies(plan().spec(), gpus.rank(r).sms);
    self.at = place(r, self.table, gpus.rank(r).sms);
    Result<DeviceHeap> memory = DeviceHeap::create(gpus.rank(r).device, self.at.bytes, gpus.devices());
    if (!memory.ok()) return memory.error();
    self.memory = std::move(*memory);
  }
  return Ok{};
}

Status CudaOperatorImpl::reach_peers(VirtualGpus& gpus, const Status& taken) {
  if (!config_.share) return taken;
  const Topology& topo = plan().topo();
  const Rank& self = rank(first_rank_);
  const Result<int> file = taken.ok() ? self.memory.export_fd() : Result<int>(taken.error());
  const OwnedFile own(file.ok() ? *file : -1);
  const Status ready = file.ok() ? Status(Ok{}) : Status(file.error());
  Result<std::vector<SharedFile>> files = config_.share(ready, own.fd(), self.memory.bytes());
  if (!files.ok()) return files.error();
  for (std::int32_t g = 0; g < topo.gpus; ++g) {
    const std::int32_t r = topo.rank_of(topo.node_of(first_rank_), g);
    if (r == first_rank_) continue;
    SharedFile& file = (*files)[static_cast<std::size_t>(g)];
    Result<DeviceHeap> memory = DeviceHeap::import_from(file.file.release(), file.bytes, gpus.first().device);
    if (!memory.ok()) {
      return Error{memory.error().kind,
                   fmt::format("the memory of rank {} cannot be reached from rank {}: {}; GPUs of a node must be "
                               "connected by NVLink or one PCIe switch (nvidia-smi topo -p2p rw shows which are)",
                               r, first_rank_, memory.error().message)};
    }
    rank(r).memory = std::move(*memory);
    rank(r).at.window = self.at.window;
    rank(r).at.c_slots = self.at.c_slots;
  }
  return Ok{};
}

Status CudaOperatorImpl::fill(VirtualGpus& gpus, const std::vector<const DeviceRing*>& rings,
                              const std::vector<DeviceMailbox*>& mailboxes, double deadline_s) {
  for (std::int32_t r = 0; r < plan().topo().world(); ++r) {
    if (!gpus.has(r)) continue;
    DeviceRank& device = rank(r).device;
    device.rings = rings[static_cast<std::size_t>(r)];
    device.mailbox = mailboxes[static_cast<std::size_t>(r)];
    device.deadline_ns = static_cast<std::uint64_t>(std::min(deadline_s, 1e9) * 1e9);
    if (Status status = fill_rank(r, gpus.rank(r)); !status.ok()) return status;
  }
  return Ok{};
}

Status CudaOperatorImpl::fill_rank(std::int32_t r, const VirtualGpu& gpu) {
  const Topology& topo = plan().topo();
  Rank& self = rank(r);
  std::byte* base = self.memory.data();
  DeviceRank& device = self.device;
  device.rank = r;
  device.node = topo.node_of(r);
  device.gpu = topo.gpu_of(r);
  device.nodes = topo.nodes;
  device.gpus = topo.gpus;
  device.lanes = static_cast<std::int32_t>(self.table.lanes.size());
  device.op = number_;
  device.flag_count = plan().flag_count();
  device.completion = config_.source->completion(r);
  device.partial_fp32 = plan().spec().partial == Dtype::kFp32 ? 1 : 0;
  device.gather_pitch = plan().gather_pitch();
  for (int b = 0; b < kBufferCount; ++b) {
    const auto buffer = static_cast<Buffer>(b);
    device.buffer_begin[b] = layout_.offset(buffer, 0, 0);
    device.buffer_parity_bytes[b] = layout_.offset(buffer, 0, 1) - layout_.offset(buffer, 0, 0);
  }
  device.tasks = reinterpret_cast<const DeviceTask*>(base + self.at.tasks);
  device.records = reinterpret_cast<const DeviceRecord*>(base + self.at.records);
  device.lane_table = reinterpret_cast<const DeviceLane*>(base + self.at.lanes);
  device.heads = reinterpret_cast<DeviceHead*>(base + self.at.heads);
  if (!is_attention()) device.compute = self.table.lanes[0];  // attention has tables of its own for it
  device.begun = reinterpret_cast<std::uint32_t*>(base + self.at.begun);
  device.ctas = gpu.sms;
  device.claims = reinterpret_cast<std::uint64_t*>(base + self.at.claims);
  device.part_sums = reinterpret_cast<float*>(base + self.at.part_sums);
  device.parts_done = reinterpret_cast<std::uint32_t*>(base + self.at.parts_done);
  device.control = reinterpret_cast<DeviceControl*>(base + self.at.control);

  std::vector<DeviceMatrix> windows;
  for (std::int32_t g = 0; g < topo.gpus; ++g) {
    const Rank& peer = rank(topo.rank_of(device.node, g));
    device.heaps[g] = peer.memory.data();
    device.c_slots[g] = reinterpret_cast<DeviceMatrix*>(peer.memory.data() + peer.at.c_slots);
    if (!has_window()) continue;
    device.c_slots[g] = reinterpret_cast<DeviceMatrix*>(base + self.at.c_slots) + 2 * g;
    windows.insert(windows.end(), 2, window(topo.rank_of(device.node, g)));
  }
  DeviceControl control;
  control.epoch = config_.start_epoch;
  std::vector<std::uint32_t> flags(2 * std::size_t{plan().flag_count()}, 0);
  init_flags(*config_.source, r, config_.start_epoch, flags.data());

  DeviceGuard guard(gpu.device);
  cudaError_t status = guard.status();
  const auto upload = [&](std::int64_t at, const void* data, std::size_t bytes) {
    if (status == cudaSuccess && bytes > 0) {
      status = cudaMemcpyAsync(base + at, data, bytes, cudaMemcpyHostToDevice, gpu.stream);
    }
  };
  if (status == cudaSuccess && config_.workspace_fill && layout_.bytes() > 0) {
    status = cudaMemsetAsync(base, *config_.workspace_fill, static_cast<std::size_t>(layout_.bytes()), gpu.stream);
  }
  const auto bytes_of = [](const auto& v) { return v.size() * sizeof(v[0]); };
  upload(0, flags.data(), bytes_of(flags));
  upload(self.at.c_slots, windows.data(), bytes_of(windows));
  upload(self.at.control, &control, sizeof(control));
  upload(self.at.lanes, self.table.lanes.data(), bytes_of(self.table.lanes));
  upload(self.at.tasks, self.table.tasks.data(), bytes_of(self.table.tasks));
  upload(self.at.records, self.table.records.data(), bytes_of(self.table.records));
  if (status == cudaSuccess) status = cudaStreamSynchronize(gpu.stream);
  if (status == cudaSuccess) status = cudaEventCreateWithFlags(&self.done, cudaEventDisableTiming);
  if (status != cudaSuccess) return cuda_error(status, fmt::format("preparing the memory of rank {}", r));
  self.task_count = static_cast<std::int64_t>(self.table.tasks.size());
  self.table.tasks.clear();  // the device has them
  self.table.tasks.shrink_to_fit();
  if (!is_attention()) return make_maps(self);
  AttentionCall& call = self.attention_call;
  std::memset(static_cast<void*>(&call), 0, offsetof(AttentionCall, rank));
  const Status filled =
      fill_attention(plan(), r, self.attention, self.attention_at, base + self.at.attention, base, gpu.stream, call);
  self.task_count += plan().count(r, Role::kCompute, 0);
  call.rank = self.device;
  self.attention = {};  // the device has it
  return filled;
}

// The descriptors of what lies in the rank's own memory.
Status CudaOperatorImpl::make_maps(Rank& self) {
  const PlanSpec& spec = plan().spec();
  const std::int64_t gathered = plan().buffer_elements(Buffer::kGather);
  const Buffer packed = spec.topo.gpus > 1 ? Buffer::kPartial : Buffer::kNodePartial;
  const std::int64_t packed_rows = spec.partial == Dtype::kFp32 ? 0 : plan().buffer_elements(packed) / spec.tiling.bn;
  for (std::uint64_t parity = 0; parity < 2; ++parity) {
    if (gathered > 0) {
      Result<CUtensorMap> map =
          make_tensor_map(spec.dtype, self.memory.data() + layout_.offset(Buffer::kGather, 0, parity), spec.m, spec.k,
                          plan().gather_pitch(), self.a_box_rows());
      if (!map.ok()) return map.error();
      self.gather[parity] = *map;
    }
    if (packed_rows > 0) {
      Result<CUtensorMap> map = make_tensor_map(spec.dtype, self.memory.data() + layout_.offset(packed, 0, parity),
                                                packed_rows, spec.tiling.bn, spec.tiling.bn, 64);
      if (!map.ok()) return map.error();
      self.packed[parity] = *map;
    }
  }
  return Ok{};
}

Status CudaOperatorImpl::take_a(std::int32_t r, const Matrix& a, Launch& launch) const {
  const Rank& self = ranks_[static_cast<std::size_t>(r)];
  if (a.rows == 0 || a.cols == 0) return Ok{};
  // Moves read whole units of 16 bytes, so with a ragged K they read a copy, whose padding is there.
  const bool ragged = needs_copy(a.cols) && plan().buffer_elements(Buffer::kGather) > 0;
  Matrix used = a;
  const bool must_copy = !is_wide(a) || ragged;
  const bool can_copy = a_copy_bytes(config_, self.aligned, r) > 0;
  if (must_copy || (can_copy && self.aligned.a && off_lines(a))) {
    if (!can_copy) {
      return layout_error("A", a, r, "row-major matrices whose address and row pitch are multiples of 16 bytes");
    }
    used = {self.memory.data() + self.at.a_copy, a.rows, a.cols, copy_pitch(a.cols), 1};
    launch.copy_a = repack(a, used);
  }
  launch.call.a_matrix = device_matrix(used);
  Result<CUtensorMap> map = make_tensor_map(plan().spec().dtype, used.data, used.rows, used.cols,
                                            launch.call.a_matrix.row_stride, self.a_box_rows());
  if (!map.ok()) return map.error();
  launch.call.a = *map;
  return Ok{};
}

Status CudaOperatorImpl::take_b(std::int32_t r, const Matrix& b, Launch& launch) const {
  const Rank& self = ranks_[static_cast<std::size_t>(r)];
  const PlanSpec& spec = plan().spec();
  const bool can_copy = b_copy_bytes(config_, self.aligned, r) > 0;
  bool k_major = false;
  Matrix used = b;
  if (b.rows > 0 && b.cols > 0) {
    if (!is_wide(b) && is_wide(transposed(b))) {
      k_major = true;
      used = transposed(b);
    } else if (!is_wide(b) || (can_copy && self.aligned.b && off_lines(b))) {
      if (!can_copy) {
        return layout_error("B", b, r,
                            "row-major or transposed matrices whose address and pitch are multiples of 16 bytes");
      }
      used = {self.memory.data() + self.at.b_copy, b.rows, b.cols, copy_pitch(b.cols), 1};
      launch.copy_b = repack(b, used);
    }
    Result<CUtensorMap> map = make_tensor_map(spec.dtype, used.data, used.rows, used.cols,
                                              device_matrix(used).row_stride, k_major ? spec.tiling.bn : kBlockK);
    if (!map.ok()) return map.error();
    launch.call.b = *map;
  }
  launch.kernel = find_kernel({spec.tiling.bm, spec.tiling.bn}, spec.dtype, k_major);
  MK_CHECK(launch.kernel.kernel != nullptr);
  return Ok{};
}

DeviceMatrix CudaOperatorImpl::window(std::int32_t r) const {
  const Rank& of = ranks_[static_cast<std::size_t>(r)];
  return {of.memory.data() + of.at.window, rounded(plan().spec().n), 1, 1};
}

Status CudaOperatorImpl::take_c(std::int32_t r, const Matrix& asked, Launch& launch) const {
  launch.deliver_c = has_window();
  const DeviceMatrix used = has_window() ? window(r) : device_matrix(asked);
  const Matrix c{used.data, asked.rows, asked.cols, used.row_stride, used.col_stride};
  launch.call.c_matrix = used;
  if (c.rows == 0 || c.cols == 0 || launch.call.c_matrix.wide == 0) return Ok{};
  Result<CUtensorMap> map =
      make_tensor_map(plan().spec().dtype, c.data, c.rows, c.cols, launch.call.c_matrix.row_stride, 64);
  if (!map.ok()) return map.error();
  launch.call.c = *map;
  return Ok{};
}

Result<CudaOperatorImpl::Launch> CudaOperatorImpl::prepare(std::int32_t r, const Arguments& arguments,
                                                           std::uint32_t parts) {
  if (const auto* attention = std::get_if<AttentionArguments>(&arguments)) {
    return prepare_attention(r, *attention, parts);
  }
  return prepare_gemm(r, std::get<GemmArguments>(arguments), parts);
}

Result<CudaOperatorImpl::Launch> CudaOperatorImpl::prepare_attention(std::int32_t r,
                                                                     const AttentionArguments& arguments,
                                                                     std::uint32_t parts) {
  if (parts != kAllParts) return bad_argument("parts are asked for: a call of ring_attention is launched as a whole");
  Launch launch;
  launch.attention_call = rank(r).attention_call;
  const PlanSpec& spec = plan().spec();
  launch.attention_kernel = find_attention_kernel(padded_dim(spec.attention.dim), spec.dtype);
  MK_CHECK(launch.attention_kernel.kernel != nullptr);
  if (Status status = take_tensors(plan(), r, arguments, launch.attention_call); !status.ok()) return status.error();
  return launch;
}

Result<CudaOperatorImpl::Launch> CudaOperatorImpl::prepare_gemm(std::int32_t r, const GemmArguments& arguments,
                                                                std::uint32_t parts) {
  Rank& self = rank(r);
  Launch launch;
  std::memset(static_cast<void*>(&launch.call.a), 0, sizeof(CUtensorMap));
  launch.call.rank = self.device;
  // Tiles without elements multiply nothing: a matrix without elements has no description for TMA.
  const bool empty = plan().spec().m == 0 || arguments.b.cols == 0;
  launch.call.k = empty ? 0 : plan().gemm_k(r);
  launch.call.a_bytes = self.a_box_rows() * kBlockK * 2;
  launch.call.compute_ctas = partition_.compute;
  launch.call.parts = parts;
  for (int parity = 0; parity < 2; ++parity) {
    launch.call.gather[parity] = self.gather[parity];
    launch.call.packed[parity] = self.packed[parity];
  }
  if (Status status = take_a(r, arguments.a, launch); !status.ok()) return status.error();
  if (Status status = take_b(r, arguments.b, launch); !status.ok()) return status.error();
  if (Status status = take_c(r, arguments.c, launch); !status.ok()) return status.error();
  return launch;
}

}  // namespace mkernel
