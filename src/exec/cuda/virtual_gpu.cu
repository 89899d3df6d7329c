#include "exec/cuda/virtual_gpu.h"

#include <algorithm>
#include <cstdlib>
#include <mutex>
#include <optional>
#include <string>

#include "base/check.h"
#include "exec/cuda/driver.h"
#include "exec/cuda/format.h"

namespace mkernel {
namespace {

// Green contexts on compute capability 9.0 have at least 8 SMs and a multiple of 8 (CUDA driver API, "Green Contexts").
constexpr int kSmGranularity = 8;

// A GPU in use, and which of its SMs go where.
struct Device {
  int index = 0;
  CUdevice handle = 0;
  int sms = 0;  // all of them
  std::int32_t first_rank = 0;
  std::int32_t ranks = 0;
};

// Must come before the first CUDA call of the process. What the user has set stays as it is.
void set_environment() {
  // A kernel that is first used while a persistent kernel spins would be loaded then, and loading waits for the device:
  // with both waiting for each other nothing moves any more.
  setenv("CUDA_MODULE_LOADING", "EAGER", 0);
  // Streams share hardware queues beyond this number, and a kernel stuck behind a spinning one in its queue never
  // starts. 32 is the maximum; a world of 8 ranks has about 24 streams.
  setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 0);
}

Result<std::vector<Device>> find_devices(const VirtualGpuOptions& options) {
  int count = 0;
  const cudaError_t status = cudaGetDeviceCount(&count);
  if (status != cudaSuccess || count == 0) {
    (void)cudaGetLastError();
    return Error{ErrorKind::kUnsupported,
                 fmt::format("this machine has no CUDA GPU that can be used ({})",
                             status == cudaSuccess ? "none is visible" : cudaGetErrorString(status))};
  }
  std::vector<Device> devices;
  if (options.own_rank >= 0) {
    devices.push_back({options.local_index % count, 0, 0, options.own_rank, 1});
  } else {
    // Neighbouring ranks, which are GPUs of one node, go to the same device.
    const Split split{options.topo.world(), std::min(options.topo.world(), count)};
    for (int i = 0; i < split.parts; ++i) {
      devices.push_back({i, 0, 0, static_cast<std::int32_t>(split.begin(i)), static_cast<std::int32_t>(split.size(i))});
    }
  }
  for (Device& device : devices) {
    const int i = device.index;
    int major = 0;
    int minor = 0;
    for (const auto& [value, attribute] :
         {std::pair(&major, cudaDevAttrComputeCapabilityMajor), std::pair(&minor, cudaDevAttrComputeCapabilityMinor),
          std::pair(&device.sms, cudaDevAttrMultiProcessorCount)}) {
      const cudaError_t got = cudaDeviceGetAttribute(value, attribute, i);
      if (got != cudaSuccess) return cuda_error(got, fmt::format("reading the attributes of GPU {}", i));
    }
    if (major != 9 || minor != 0) {
      return Error{ErrorKind::kUnsupported,
                   fmt::format("GPU {} has compute capability {}.{}, but the kernels are built for 9.0 (Hopper)", i,
                               major, minor)};
    }
  }
  return devices;
}

// SMs of a GPU: one group per rank, and what is left.
struct Division {
  std::vector<CUdevResource> groups;
  CUdevResource rest{};
};

// Only calculates. The processing clusters of a GPU differ in size, so there may be fewer groups than a division says.
Result<Division> divide(const DriverApi& api, const Device& device, int sms) {
  CUdevResource all{};
  CUresult got = api.device_get_dev_resource(device.handle, &all, CU_DEV_RESOURCE_TYPE_SM);
  if (got != CUDA_SUCCESS) return driver_error(got, fmt::format("asking for the SMs of GPU {}", device.index));
  Division division;
  division.groups.resize(static_cast<std::size_t>(device.ranks));
  auto count = static_cast<unsigned int>(device.ranks);
  got = api.dev_sm_resource_split_by_count(division.groups.data(), &count, &all, &division.rest, 0,
                                           static_cast<unsigned int>(sms));
  if (got != CUDA_SUCCESS) {
    return driver_error(got, fmt::format("dividing GPU {} into {} groups of {} SMs", device.index, device.ranks, sms));
  }
  if (count != static_cast<unsigned int>(device.ranks) ||
      division.groups[0].sm.smCount != static_cast<unsigned int>(sms)) {
    return Error{ErrorKind::kUnsupported,
                 fmt::format("GPU {} was to be divided into {} groups of {} SMs, but the driver makes {} of {}",
                             device.index, device.ranks, sms, count, division.groups[0].sm.smCount)};
  }
  return division;
}

// How many SMs each rank gets, where GPUs are divided.
Result<int> choose_sms(const DriverApi& api, const std::vector<Device>& devices, const VirtualGpuOptions& options) {
  const auto smallest =
      *std::min_element(devices.begin(), devices.end(), [](const Device& a, const Device& b) { return a.sms < b.sms; });
  const std::int32_t ranks = devices.front().ranks;  // the first device has the most
  const int spare = ranks > 1 ? options.spare_sms : 0;
  const int most = (smallest.sms - spare) / ranks / kSmGranularity * kSmGranularity;
  const auto fits = [&](int sms) {
    return std::all_of(devices.begin(), devices.end(), [&](const Device& d) { return divide(api, d, sms).ok(); });
  };
  if (options.sms == 0) {
    for (int sms = most; sms >= kSmGranularity; sms -= kSmGranularity) {
      if (fits(sms)) return sms;
    }
    return bad_argument(
        fmt::format("{} ranks on one GPU are too many: GPU {} has {} SMs, {} of them are to stay free, and a rank "
                    "needs at least {}",
                    ranks, smallest.index, smallest.sms, spare, kSmGranularity));
  }
  if (options.sms % kSmGranularity != 0 || options.sms > most || !fits(options.sms)) {
    return bad_argument(
        fmt::format("{} SMs per rank are not possible: GPU {} has {} SMs, {} of them are to stay free, and {} rank(s) "
                    "on it can have "
                    "a multiple of {} up to {} each",
                    options.sms, smallest.index, smallest.sms, spare, ranks, kSmGranularity, std::max(most, 0)));
  }
  return options.sms;
}

// The green contexts of a divided GPU.
struct GreenContexts {
  int device = 0;
  int sms = 0;  // of each group
  std::vector<CUgreenCtx> groups;
  CUgreenCtx rest = nullptr;  // null: no SM is left over
  int rest_sms = 0;
};

// Contexts that no world uses at the moment. They are never destroyed, since the driver keeps 4 MiB of the GPU's memory
// for every one that is (580.159.04), but used again.
class IdleGreenContexts {
 public:
  static IdleGreenContexts& instance() {
    static IdleGreenContexts idle;
    return idle;
  }
  std::optional<GreenContexts> take(int device, std::size_t groups, int sms) {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (auto it = idle_.begin(); it != idle_.end(); ++it) {
      if (it->device != device || it->groups.size() != groups || it->sms != sms) continue;
      GreenContexts found = std::move(*it);
      idle_.erase(it);
      return found;
    }
    return std::nullopt;
  }
  void give_back(GreenContexts contexts) {
    const std::lock_guard<std::mutex> lock(mutex_);
    idle_.push_back(std::move(contexts));
  }

 private:
  std::mutex mutex_;
  std::vector<GreenContexts> idle_;
};

class VirtualGpusImpl final : public VirtualGpus {
 public:
  explicit VirtualGpusImpl(std::int32_t first_rank) : first_rank_(first_rank) {}
  ~VirtualGpusImpl() override;

  Status add_whole(const Device& device);
  Status add_divided(const DriverApi& api, const Device& device, int sms);

  bool has(std::int32_t rank) const override {
    return rank >= first_rank_ && rank < first_rank_ + static_cast<std::int32_t>(ranks_.size());
  }
  const VirtualGpu& rank(std::int32_t rank) const override { return at(rank).gpu; }
  const VirtualGpu& first() const override { return ranks_.front().gpu; }
  Result<cudaStream_t> new_stream(std::int32_t rank, bool high_priority) override;
  cudaStream_t spare_stream(int device) const override;
  int spare_sms(int device) const override;
  const std::vector<int>& devices() const override { return devices_; }

 private:
  struct Rank {
    VirtualGpu gpu;
    CUgreenCtx green = nullptr;  // null: the whole GPU
  };
  struct Spare {
    int device = 0;
    int sms = 0;
    cudaStream_t stream = nullptr;
  };
  struct Owned {
    int device = 0;
    cudaStream_t stream = nullptr;
  };
  const Rank& at(std::int32_t rank) const {
    MK_CHECK(has(rank));
    return ranks_[static_cast<std::size_t>(rank - first_rank_)];
  }
  static Result<CUgreenCtx> make_green(const DriverApi& api, const Device& device, CUdevResource& sms);
  static Result<GreenContexts> make_contexts(const DriverApi& api, const Device& device, int sms);
  Result<cudaStream_t> make_stream(int device, CUgreenCtx green, bool high_priority);

  const std::int32_t first_rank_;
  std::vector<Rank> ranks_;
  std::vector<Spare> spares_;
  std::vector<int> devices_;
  std::mutex mutex_;  // guards streams_, which new_stream() extends
  std::vector<Owned> streams_;
  std::vector<GreenContexts> contexts_;
};

VirtualGpusImpl::~VirtualGpusImpl() {
  for (const Owned& owned : streams_) {
    const DeviceGuard guard(owned.device);
    (void)cudaStreamDestroy(owned.stream);
  }
  for (GreenContexts& contexts : contexts_) IdleGreenContexts::instance().give_back(std::move(contexts));
}

Result<CUgreenCtx> VirtualGpusImpl::make_green(const DriverApi& api, const Device& device, CUdevResource& sms) {
  CUdevResourceDesc description = nullptr;
  CUresult got = api.dev_resource_generate_desc(&description, &sms, 1);
  CUgreenCtx green = nullptr;
  if (got == CUDA_SUCCESS) got = api.green_ctx_create(&green, description, device.handle, CU_GREEN_CTX_DEFAULT_STREAM);
  if (got != CUDA_SUCCESS) {
    return driver_error(got, fmt::format("creating a green context of {} SMs on GPU {}", sms.sm.smCount, device.index));
  }
  return green;
}

Result<GreenContexts> VirtualGpusImpl::make_contexts(const DriverApi& api, const Device& device, int sms) {
  Result<Division> division = divide(api, device, sms);
  if (!division) return division.error();
  GreenContexts contexts{device.index, sms, {}, nullptr, 0};
  for (CUdevResource& group : division->groups) {
    const Result<CUgreenCtx> green = make_green(api, device, group);
    if (!green) return green.error();
    contexts.groups.push_back(*green);
  }
  CUdevResource& rest = division->rest;
  if (rest.type == CU_DEV_RESOURCE_TYPE_SM && rest.sm.smCount > 0) {
    const Result<CUgreenCtx> green = make_green(api, device, rest);
    if (!green) return green.error();
    contexts.rest = *green;
    contexts.rest_sms = static_cast<int>(rest.sm.smCount);
  }
  return contexts;
}

Result<cudaStream_t> VirtualGpusImpl::make_stream(int device, CUgreenCtx green, bool high_priority) {
  const DeviceGuard guard(device);
  const std::string doing = fmt::format("creating a stream on GPU {}", device);
  int least = 0;
  int greatest = 0;
  cudaError_t status = guard.status();
  if (status == cudaSuccess) status = cudaDeviceGetStreamPriorityRange(&least, &greatest);
  if (status != cudaSuccess) return cuda_error(status, doing);
  const int priority = high_priority ? greatest : 0;
  cudaStream_t stream = nullptr;
  if (green != nullptr) {
    const auto api = driver_api();
    if (!api) return api.error();
    CUstream raw = nullptr;
    const CUresult got = (*api)->green_ctx_stream_create(&raw, green, CU_STREAM_NON_BLOCKING, priority);
    if (got != CUDA_SUCCESS) return driver_error(got, doing);
    stream = raw;
  } else {
    status = cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, priority);
    if (status != cudaSuccess) return cuda_error(status, doing);
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  streams_.push_back({device, stream});
  return stream;
}

Status VirtualGpusImpl::add_whole(const Device& device) {
  const Result<cudaStream_t> stream = make_stream(device.index, nullptr, false);
  if (!stream) return stream.error();
  ranks_.push_back({{device.index, device.sms, false, *stream}, nullptr});
  devices_.push_back(device.index);
  return Ok{};
}

Status VirtualGpusImpl::add_divided(const DriverApi& api, const Device& device, int sms) {
  std::optional<GreenContexts> idle =
      IdleGreenContexts::instance().take(device.index, static_cast<std::size_t>(device.ranks), sms);
  if (!idle) {
    Result<GreenContexts> made = make_contexts(api, device, sms);
    if (!made) return made.error();
    idle = std::move(*made);
  }
  contexts_.push_back(std::move(*idle));
  const GreenContexts& contexts = contexts_.back();
  for (const CUgreenCtx green : contexts.groups) {
    const Result<cudaStream_t> stream = make_stream(device.index, green, false);
    if (!stream) return stream.error();
    ranks_.push_back({{device.index, sms, true, *stream}, green});
  }
  if (contexts.rest != nullptr) {
    const Result<cudaStream_t> stream = make_stream(device.index, contexts.rest, false);
    if (!stream) return stream.error();
    spares_.push_back({device.index, contexts.rest_sms, *stream});
  }
  devices_.push_back(device.index);
  return Ok{};
}

Result<cudaStream_t> VirtualGpusImpl::new_stream(std::int32_t rank, bool high_priority) {
  const Rank& of = at(rank);
  return make_stream(of.gpu.device, of.green, high_priority);
}

cudaStream_t VirtualGpusImpl::spare_stream(int device) const {
  for (const Spare& spare : spares_) {
    if (spare.device == device) return spare.stream;
  }
  return nullptr;
}

int VirtualGpusImpl::spare_sms(int device) const {
  for (const Spare& spare : spares_) {
    if (spare.device == device) return spare.sms;
  }
  return 0;
}

}  // namespace

Result<std::unique_ptr<VirtualGpus>> VirtualGpus::create(const VirtualGpuOptions& options) {
  if (options.topo.nodes < 1 || options.topo.gpus < 1) return bad_argument("a world has at least one node and one GPU");
  if (options.sms < 0 || options.spare_sms < 0) return bad_argument("numbers of SMs cannot be negative");
  set_environment();
  Result<std::vector<Device>> devices = find_devices(options);
  if (!devices) return devices.error();
  const Result<const DriverApi*> api = driver_api();
  if (!api) return api.error();
  for (Device& device : *devices) {
    const std::string doing = fmt::format("starting to use GPU {}", device.index);
    const DeviceGuard guard(device.index);  // creates the primary context, which green contexts share
    if (guard.status() != cudaSuccess) return cuda_error(guard.status(), doing);
    const CUresult got = (*api)->device_get(&device.handle, device.index);
    if (got != CUDA_SUCCESS) return driver_error(got, doing);
  }

  auto gpus = std::make_unique<VirtualGpusImpl>(devices->front().first_rank);
  const bool alone = devices->front().ranks == 1;
  const bool whole = alone && std::all_of(devices->begin(), devices->end(),
                                          [&](const Device& d) { return options.sms == 0 || options.sms == d.sms; });
  int sms = 0;
  if (!whole) {
    if (!(*api)->has_green_contexts()) {
      return Error{ErrorKind::kUnsupported,
                   "the CUDA driver has no green contexts, which divide a GPU among ranks: driver 555 (CUDA 12.5) or "
                   "newer is needed, or a GPU for every rank"};
    }
    const Result<int> chosen = choose_sms(**api, *devices, options);
    if (!chosen) return chosen.error();
    sms = *chosen;
  }
  for (const Device& device : *devices) {
    const Status added = whole ? gpus->add_whole(device) : gpus->add_divided(**api, device, sms);
    if (!added) return added.error();
  }
  return std::unique_ptr<VirtualGpus>(std::move(gpus));
}

}  // namespace mkernel
