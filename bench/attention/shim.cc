// Ring attention behind C functions, so that a Python script can time it beside PyTorch's in one process
// (attention_core.py). Built as libmkernel_attention.so by the target mkernel_attention. Not an interface for others:
// errors are sentences of the last call of the thread.
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "mkernel/mkernel.h"

namespace {

using mkernel::AttentionArguments;
using mkernel::AttentionTensor;

thread_local std::string last_error;

struct Bench {
  std::unique_ptr<mkernel::World> world;
  std::unique_ptr<mkernel::Operator> op;  // goes first
  mkernel::AttentionOptions options;
  std::vector<AttentionArguments> arguments;
};

int fail(const mkernel::Error& error) {
  last_error = error.message;
  return 1;
}

}  // namespace

extern "C" {

struct MkCase {
  std::int32_t nodes, gpus, sms;
  std::int32_t heads, kv_heads, dim;
  std::int64_t seq_q, seq_k;
  std::int32_t causal, zigzag, chunk_rows, fp16;
  double gigabytes_per_s, latency_us;  // 0: as fast as memory
};

const char* mk_error() { return last_error.c_str(); }

void* mk_create(const MkCase* c) {
  auto bench = std::make_unique<Bench>();
  mkernel::WorldOptions world;
  world.device = mkernel::Device::kCuda;
  world.nodes = c->nodes;
  world.gpus = c->gpus;
  world.sms = c->sms;
  world.link = {c->gigabytes_per_s, c->latency_us};
  world.deadline_s = 5;
  auto made = mkernel::World::create(world);
  if (!made.ok()) return fail(made.error()), nullptr;
  bench->world = std::make_unique<mkernel::World>(std::move(made).value());
  mkernel::AttentionOptions& options = bench->options;
  options.heads = c->heads;
  options.kv_heads = c->kv_heads;
  options.dim = c->dim;
  options.seq_q = c->seq_q;
  options.seq_k = c->seq_k;
  options.causal = c->causal != 0;
  options.zigzag = c->zigzag != 0;
  options.chunk_rows = c->chunk_rows;
  options.dtype = c->fp16 != 0 ? mkernel::Dtype::kFp16 : mkernel::Dtype::kBf16;
  auto op = mkernel::Operator::create(*bench->world, options);
  if (!op.ok()) return fail(op.error()), nullptr;
  bench->op = std::make_unique<mkernel::Operator>(std::move(op).value());
  bench->arguments.resize(static_cast<std::size_t>(bench->world->size()));
  return bench.release();
}

void mk_destroy(void* handle) { delete static_cast<Bench*>(handle); }

std::int64_t mk_tokens(void* handle, int rank, int keys) {
  const auto& op = *static_cast<Bench*>(handle)->op;
  return keys != 0 ? op.kv_tokens(rank) : op.q_tokens(rank);
}

// Tensors of a rank, (heads, tokens, dim) without gaps.
void mk_bind(void* handle, int rank, void* q, void* k, void* v, void* o, float* lse) {
  Bench& bench = *static_cast<Bench*>(handle);
  const mkernel::AttentionOptions& x = bench.options;
  const std::int64_t q_tokens = bench.op->q_tokens(rank);
  const std::int64_t k_tokens = bench.op->kv_tokens(rank);
  AttentionArguments& a = bench.arguments[static_cast<std::size_t>(rank)];
  a.q = AttentionTensor::by_head(q, 1, x.heads, q_tokens, x.dim);
  a.k = AttentionTensor::by_head(k, 1, x.kv_heads, k_tokens, x.dim);
  a.v = AttentionTensor::by_head(v, 1, x.kv_heads, k_tokens, x.dim);
  a.o = AttentionTensor::by_head(o, 1, x.heads, q_tokens, x.dim);
  a.lse = lse;
}

// On `stream`, which may be capturing; null: the rank's own.
int mk_launch(void* handle, int rank, void* stream) {
  Bench& bench = *static_cast<Bench*>(handle);
  const mkernel::Status status = bench.op->launch(rank, bench.arguments[static_cast<std::size_t>(rank)], stream);
  return status.ok() ? 0 : fail(status.error());
}

int mk_wait(void* handle, int rank) {
  const mkernel::Status status = static_cast<Bench*>(handle)->op->wait(rank);
  return status.ok() ? 0 : fail(status.error());
}

// All ranks, and how long they took, from the first launch to the last completion; negative: failed.
double mk_run(void* handle, std::int64_t* network_bytes) {
  Bench& bench = *static_cast<Bench*>(handle);
  const auto report = bench.op->run(bench.arguments);
  if (!report.ok()) return fail(report.error()), -1.0;
  *network_bytes = report->network_bytes;
  return report->time_us;
}

}  // extern "C"
