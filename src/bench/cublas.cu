#include "bench/cublas.h"

#include <cublasLt.h>
#include <cublas_v2.h>
#include <dlfcn.h>

#include <array>
#include <cstdlib>
#include <utility>

#include "exec/cuda/format.h"

namespace mkernel::bench {
namespace {

// Entry points. cublas_v2.h overloads cublasGemmEx, so its type is spelled out.
struct Api {
  decltype(&cublasCreate_v2) create = nullptr;
  decltype(&cublasDestroy_v2) destroy = nullptr;
  decltype(&cublasSetStream_v2) set_stream = nullptr;
  decltype(&cublasSetWorkspace_v2) set_workspace = nullptr;
  cublasStatus_t (*gemm_ex)(cublasHandle_t, cublasOperation_t, cublasOperation_t, int, int, int, const void*,
                            const void*, cudaDataType, int, const void*, cudaDataType, int, const void*, void*,
                            cudaDataType, int, cublasComputeType_t, cublasGemmAlgo_t) = nullptr;
  decltype(&cublasGetProperty) get_property = nullptr;

  decltype(&cublasLtCreate) lt_create = nullptr;
  decltype(&cublasLtDestroy) lt_destroy = nullptr;
  decltype(&cublasLtMatmul) lt_matmul = nullptr;
  decltype(&cublasLtMatmulDescCreate) lt_desc_create = nullptr;
  decltype(&cublasLtMatmulDescDestroy) lt_desc_destroy = nullptr;
  decltype(&cublasLtMatmulDescSetAttribute) lt_desc_set = nullptr;
  decltype(&cublasLtMatrixLayoutCreate) lt_layout_create = nullptr;
  decltype(&cublasLtMatrixLayoutDestroy) lt_layout_destroy = nullptr;
  decltype(&cublasLtMatmulPreferenceCreate) lt_preference_create = nullptr;
  decltype(&cublasLtMatmulPreferenceDestroy) lt_preference_destroy = nullptr;
  decltype(&cublasLtMatmulPreferenceSetAttribute) lt_preference_set = nullptr;
  decltype(&cublasLtMatmulAlgoGetHeuristic) lt_heuristic = nullptr;
  decltype(&cublasLtMatmulAlgoConfigGetAttribute) lt_config_get = nullptr;
};

// The first of the usual names and places that can be opened, newest version first.
void* open_library(const std::string& stem) {
  std::vector<std::string> folders = {"", "/usr/local/cuda/lib64/"};
  if (const char* folder = std::getenv("MKERNEL_CUBLAS_DIR"))
    folders.insert(folders.begin(), std::string(folder) + "/");
  for (const char* suffix : {".so.13", ".so.12", ".so"}) {
    for (const std::string& folder : folders) {
      // Global, since libcublas looks for libcublasLt's symbols.
      if (void* library = dlopen((folder + stem + suffix).c_str(), RTLD_NOW | RTLD_GLOBAL)) return library;
    }
  }
  return nullptr;
}

Result<Api> load_api() {
  void* lt = open_library("libcublasLt");
  void* blas = lt == nullptr ? nullptr : open_library("libcublas");
  if (blas == nullptr) {
    return Error{ErrorKind::kUnsupported,
                 fmt::format("{} cannot be loaded: install cuBLAS, or name its folder in MKERNEL_CUBLAS_DIR",
                             lt == nullptr ? "libcublasLt" : "libcublas")};
  }
  Api api;
  const char* missing = nullptr;
  const auto load = [&](void* library, auto& function, const char* name) {
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(library, name));
    if (function == nullptr && missing == nullptr) missing = name;
  };
  load(blas, api.create, "cublasCreate_v2");
  load(blas, api.destroy, "cublasDestroy_v2");
  load(blas, api.set_stream, "cublasSetStream_v2");
  load(blas, api.set_workspace, "cublasSetWorkspace_v2");
  load(blas, api.gemm_ex, "cublasGemmEx");
  load(blas, api.get_property, "cublasGetProperty");
  load(lt, api.lt_create, "cublasLtCreate");
  load(lt, api.lt_destroy, "cublasLtDestroy");
  load(lt, api.lt_matmul, "cublasLtMatmul");
  load(lt, api.lt_desc_create, "cublasLtMatmulDescCreate");
  load(lt, api.lt_desc_destroy, "cublasLtMatmulDescDestroy");
  load(lt, api.lt_desc_set, "cublasLtMatmulDescSetAttribute");
  load(lt, api.lt_layout_create, "cublasLtMatrixLayoutCreate");
  load(lt, api.lt_layout_destroy, "cublasLtMatrixLayoutDestroy");
  load(lt, api.lt_preference_create, "cublasLtMatmulPreferenceCreate");
  load(lt, api.lt_preference_destroy, "cublasLtMatmulPreferenceDestroy");
  load(lt, api.lt_preference_set, "cublasLtMatmulPreferenceSetAttribute");
  load(lt, api.lt_heuristic, "cublasLtMatmulAlgoGetHeuristic");
  load(lt, api.lt_config_get, "cublasLtMatmulAlgoConfigGetAttribute");
  if (missing != nullptr) {
    return Error{ErrorKind::kUnsupported, fmt::format("the cuBLAS that was found has no function {}", missing)};
  }
  return api;
}

// Loaded once; libraries stay.
const Result<Api>& shared_api() {
  static const Result<Api> api = load_api();
  return api;
}

Error blas_error(cublasStatus_t status, std::string_view doing) {
  return {status == CUBLAS_STATUS_ALLOC_FAILED ? ErrorKind::kOutOfMemory : ErrorKind::kAborted,
          fmt::format("{}: cuBLAS returned status {}", doing, static_cast<int>(status))};
}

cudaDataType data_type(Dtype dtype) { return dtype == Dtype::kFp16 ? CUDA_R_16F : CUDA_R_16BF; }

// What row-major matrices are to cuBLAS, which thinks in columns: C^T (n, m) = B^T (n, k) * A^T (k, m).
struct Transposed {
  explicit Transposed(const DenseGemm& gemm)
      : op_b(gemm.b_transposed ? CUBLAS_OP_T : CUBLAS_OP_N),
        m(static_cast<int>(gemm.n)),
        n(static_cast<int>(gemm.m)),
        k(static_cast<int>(gemm.k)),
        pitch_a(static_cast<int>(gemm.k)),
        pitch_b(static_cast<int>(gemm.b_transposed ? gemm.k : gemm.n)),
        pitch_c(static_cast<int>(gemm.n)) {}
  cublasOperation_t op_b;
  int m, n, k;
  int pitch_a, pitch_b, pitch_c;
};

class LtPlanImpl final : public LtPlan {
 public:
  explicit LtPlanImpl(const Api& from) : api(from) {}
  ~LtPlanImpl() override {
    if (desc != nullptr) api.lt_desc_destroy(desc);
    for (const cublasLtMatrixLayout_t layout : {a, b, c}) {
      if (layout != nullptr) api.lt_layout_destroy(layout);
    }
  }
  LtPlanImpl(const LtPlanImpl&) = delete;
  LtPlanImpl& operator=(const LtPlanImpl&) = delete;

  int count() const override { return found; }
  std::string describe(int algorithm) const override {
    const cublasLtMatmulAlgo_t& algo = results[static_cast<std::size_t>(algorithm)].algo;
    const struct {
      const char* name;
      cublasLtMatmulAlgoConfigAttributes_t attribute;
      std::size_t bytes;
    } fields[] = {{"id", CUBLASLT_ALGO_CONFIG_ID, 4},
                  {"tile", CUBLASLT_ALGO_CONFIG_TILE_ID, 4},
                  {"stages", CUBLASLT_ALGO_CONFIG_STAGES_ID, 4},
                  {"split-k", CUBLASLT_ALGO_CONFIG_SPLITK_NUM, 4},
                  {"cluster", CUBLASLT_ALGO_CONFIG_CLUSTER_SHAPE_ID, 2}};
    std::string text;
    for (const auto& field : fields) {
      std::uint32_t value = 0;  // little-endian: two bytes fill the lower half
      std::size_t written = 0;
      if (api.lt_config_get(&algo, field.attribute, &value, field.bytes, &written) != CUBLAS_STATUS_SUCCESS) continue;
      text += fmt::format("{}{} {}", text.empty() ? "" : ", ", field.name, value);
    }
    return text;
  }

  const Api& api;
  cublasLtMatmulDesc_t desc = nullptr;
  cublasLtMatrixLayout_t a = nullptr;  // of B of the row-major product
  cublasLtMatrixLayout_t b = nullptr;  // of its A
  cublasLtMatrixLayout_t c = nullptr;
  std::array<cublasLtMatmulHeuristicResult_t, kLtAlgorithms> results{};
  int found = 0;
};

class CublasImpl final : public Cublas {
 public:
  CublasImpl(const Api& api, cudaStream_t stream, void* workspace)
      : api_(api), stream_(stream), workspace_(workspace) {}
  ~CublasImpl() override {
    if (lt_ != nullptr) api_.lt_destroy(lt_);
    if (handle_ != nullptr) api_.destroy(handle_);
  }

  Status start() {
    cublasStatus_t status = api_.create(&handle_);
    // The stream first: setting it puts back cuBLAS' own workspace.
    if (status == CUBLAS_STATUS_SUCCESS) status = api_.set_stream(handle_, stream_);
    if (status == CUBLAS_STATUS_SUCCESS) status = api_.set_workspace(handle_, workspace_, kCublasWorkspaceBytes);
    if (status == CUBLAS_STATUS_SUCCESS) status = api_.lt_create(&lt_);
    if (status != CUBLAS_STATUS_SUCCESS) return blas_error(status, "creating a cuBLAS handle");
    return Ok{};
  }

  Status gemm(const DenseGemm& gemm, const DenseOperands& operands) override {
    const Transposed t(gemm);
    const cudaDataType type = data_type(gemm.dtype);
    const float one = 1;
    const float zero = 0;
    const cublasStatus_t status =
        api_.gemm_ex(handle_, t.op_b, CUBLAS_OP_N, t.m, t.n, t.k, &one, operands.b, type, t.pitch_b, operands.a, type,
                     t.pitch_a, &zero, operands.c, type, t.pitch_c, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT);
    if (status != CUBLAS_STATUS_SUCCESS) {
      return blas_error(status, fmt::format("cublasGemmEx of {} x {} x {}", gemm.m, gemm.n, gemm.k));
    }
    return Ok{};
  }

  Result<std::unique_ptr<LtPlan>> plan_lt(const DenseGemm& gemm) override {
    const Transposed t(gemm);
    const cudaDataType type = data_type(gemm.dtype);
    auto plan = std::make_unique<LtPlanImpl>(api_);
    cublasLtMatmulPreference_t preference = nullptr;
    const std::size_t workspace = kCublasWorkspaceBytes;
    const bool b_n = t.op_b == CUBLAS_OP_N;
    cublasStatus_t status = api_.lt_desc_create(&plan->desc, CUBLAS_COMPUTE_32F, CUDA_R_32F);
    const auto also = [&](auto&& step) {
      if (status == CUBLAS_STATUS_SUCCESS) status = step();
    };
    also([&] { return api_.lt_desc_set(plan->desc, CUBLASLT_MATMUL_DESC_TRANSA, &t.op_b, sizeof(t.op_b)); });
    also([&] {
      return api_.lt_layout_create(&plan->a, type, static_cast<std::uint64_t>(b_n ? t.m : t.k),
                                   static_cast<std::uint64_t>(b_n ? t.k : t.m), t.pitch_b);
    });
    also([&] {
      return api_.lt_layout_create(&plan->b, type, static_cast<std::uint64_t>(t.k), static_cast<std::uint64_t>(t.n),
                                   t.pitch_a);
    });
    also([&] {
      return api_.lt_layout_create(&plan->c, type, static_cast<std::uint64_t>(t.m), static_cast<std::uint64_t>(t.n),
                                   t.pitch_c);
    });
    also([&] { return api_.lt_preference_create(&preference); });
    also([&] {
      return api_.lt_preference_set(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &workspace,
                                    sizeof(workspace));
    });
    if (status == CUBLAS_STATUS_SUCCESS) {
      // Fails where it knows no algorithm at all, which is no error of ours.
      const cublasStatus_t got = api_.lt_heuristic(lt_, plan->desc, plan->a, plan->b, plan->c, plan->c, preference,
                                                   kLtAlgorithms, plan->results.data(), &plan->found);
      if (got != CUBLAS_STATUS_SUCCESS) plan->found = 0;
    }
    if (preference != nullptr) api_.lt_preference_destroy(preference);
    if (status != CUBLAS_STATUS_SUCCESS) return blas_error(status, "describing a product to cublasLt");
    return std::unique_ptr<LtPlan>(std::move(plan));
  }

  Status gemm_lt(const LtPlan& base, int algorithm, const DenseOperands& operands) override {
    const auto& plan = static_cast<const LtPlanImpl&>(base);
    const float one = 1;
    const float zero = 0;
    const cublasStatus_t status = api_.lt_matmul(
        lt_, plan.desc, &one, operands.b, plan.a, operands.a, plan.b, &zero, operands.c, plan.c, operands.c, plan.c,
        &plan.results[static_cast<std::size_t>(algorithm)].algo, workspace_, kCublasWorkspaceBytes, stream_);
    if (status != CUBLAS_STATUS_SUCCESS)
      return blas_error(status, fmt::format("cublasLtMatmul, algorithm {}", algorithm));
    return Ok{};
  }

  std::string version() const override {
    int parts[3] = {};
    const libraryPropertyType names[3] = {MAJOR_VERSION, MINOR_VERSION, PATCH_LEVEL};
    for (int i = 0; i < 3; ++i) (void)api_.get_property(names[i], &parts[i]);
    return fmt::format("{}.{}.{}", parts[0], parts[1], parts[2]);
  }

 private:
  const Api& api_;
  const cudaStream_t stream_;
  void* const workspace_;
  cublasHandle_t handle_ = nullptr;
  cublasLtHandle_t lt_ = nullptr;
};

}  // namespace

Result<std::unique_ptr<Cublas>> Cublas::create(cudaStream_t stream, void* workspace) {
  const Result<Api>& api = shared_api();
  if (!api.ok()) return api.error();
  auto made = std::make_unique<CublasImpl>(*api, stream, workspace);
  if (Status status = made->start(); !status.ok()) return status.error();
  return std::unique_ptr<Cublas>(std::move(made));
}

}  // namespace mkernel::bench
