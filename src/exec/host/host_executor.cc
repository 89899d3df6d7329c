#include "exec/host/host_executor.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <new>
#include <system_error>
#include <utility>

#include "base/check.h"
#include "exec/host/sm.h"
#include "plan/print.h"

namespace mkernel {
namespace {

// `seconds` of 30 years or more are for ever, and would overflow.
Nanos to_nanos(double seconds) { return static_cast<Nanos>(std::min(seconds, 1e9) * 1e9); }

int core_count() { return static_cast<int>(std::max(1u, std::thread::hardware_concurrency())); }

// A proxy needs little of a core, and the SMs need the rest.
int network_threads(const HostExecutorOptions& options) {
  if (options.own_rank >= 0) return 1;
  if (options.network_threads > 0) return std::min(options.network_threads, options.topo.world());
  return std::min(options.topo.world(), std::max(1, core_count() / 4));
}

}  // namespace

void HostShared::fail(Error error) {
  if (!failure.set(std::move(error))) return;
  if (on_failure) on_failure(failure.error());
  FlightEntry entry;
  entry.time_ns = steady_now();
  entry.state = FlightState::kFailed;
  for (const auto& stream : streams) {
    stream->recorder.note(entry);
    stream->bell.ring_all();
    stream->wake_waiters();
  }
  if (network != nullptr) network->wake();
}

Result<std::unique_ptr<HostExecutor>> HostExecutor::create(const HostExecutorOptions& options) {
  std::unique_ptr<HostExecutor> executor;
  try {
    executor.reset(new HostExecutor(options));
    executor->start_threads();
  } catch (const std::bad_alloc&) {
    return Error{ErrorKind::kOutOfMemory, fmt::format("there is no memory for the rings of {} ranks: take fewer ranks "
                                                      "or a smaller ring_depth than {}",
                                                      options.topo.world(), options.ring_depth)};
  } catch (const std::system_error& error) {
    return Error{
        ErrorKind::kOutOfMemory,
        fmt::format("the system gives no more than {} of the {} threads that {} ranks x {} SMs need ({}): take "
                    "fewer SMs or ranks",
                    executor->sms_.size(), options.topo.world() * options.sms, options.topo.world(), options.sms,
                    error.what())};
  }
  return executor;
}

HostExecutor::HostExecutor(const HostExecutorOptions& options)
    : options_(options), start_ns_(steady_now()), log_(options.own_rank < 0 ? options.topo.world() : 1) {
  shared_.topo = options.topo;
  shared_.own_rank = options.own_rank;
  shared_.on_failure = options.on_failure;
  shared_.sms = options.sms;
  shared_.cores_shared = options.topo.world() * options.sms > core_count();
  shared_.deadline_ns = to_nanos(options.deadline_s);
  shared_.warn_ns = to_nanos(options.warn_s);
  shared_.on_warning = options.on_warning;
  for (std::int32_t rank = 0; rank < options.topo.world(); ++rank) {
    shared_.streams.push_back(std::make_unique<Stream>(rank, options.sms));
  }
  if (options.topo.nodes > 1) {
    network_ = std::make_unique<HostNetwork>(shared_, options.link, options.endpoint, options.ring_depth,
                                             network_threads(options));
    shared_.network = network_.get();
  }
}

void HostExecutor::start_threads() {
  if (network_) network_->start();
  sms_.reserve(static_cast<std::size_t>(options_.topo.world()) * options_.sms);
  if (options_.node_bells != nullptr) {
    Stream& own = *shared_.streams[options_.own_rank];
    node_bells_ = std::make_unique<NodeBells>(options_.node_bells, options_.topo.gpu_of(options_.own_rank), [&own] {
      own.progress_ns.store(steady_now(), std::memory_order_relaxed);
      own.bell.ring_all();
    });
    shared_.node_bells = node_bells_.get();
  }
  for (std::int32_t rank = 0; rank < options_.topo.world(); ++rank) {
    for (int index = 0; runs(rank) && index < options_.sms; ++index) {
      sms_.emplace_back([this, rank, index] { Sm(shared_, rank, index).run(); });
    }
  }
}

HostExecutor::~HostExecutor() {
  for (const auto& op : operators_) MK_CHECK(op == nullptr);
  shared_.stop.store(true);
  for (const auto& stream : shared_.streams) stream->bell.ring_all();
  for (std::thread& sm : sms_) sm.join();
  if (network_) network_->join();
}

std::uint32_t HostExecutor::next_operator() {
  std::lock_guard<std::mutex> lock(launch_mutex_);
  return static_cast<std::uint32_t>(operators_.size());
}

Result<HostOperator*> HostExecutor::add_operator(const HostOperatorConfig& config) {
  std::lock_guard<std::mutex> lock(launch_mutex_);
  if (shared_.failure.happened()) return shared_.failure.later_error();
  if (operators_.size() == kMaxOperatorsPerWorld) {
    return bad_argument(fmt::format(
        "this world has made {} operators, and no world can make more: create another world", kMaxOperatorsPerWorld));
  }
  try {
    operators_.push_back(std::make_unique<HostOperator>(static_cast<std::uint32_t>(operators_.size()), config));
  } catch (const std::bad_alloc&) {
    return Error{ErrorKind::kOutOfMemory,
                 fmt::format("the system gives no {} bytes for the workspace of {} ranks",
                             HeapLayout(config.source->plan()).bytes() * options_.topo.world(), options_.topo.world())};
  }
  HostOperator* op = operators_.back().get();
  if (network_) network_->add_operator(*op, config.source);
  const PlanSpec& spec = op->plan().spec();
  names_.push_back(fmt::format("operator {} ({} {})", op->number(), op_name(spec.op), shape_text(spec)));
  return op;
}

void HostExecutor::remove_operator(HostOperator* op) {
  bool equal = true;
  std::string name;
  {
    std::lock_guard<std::mutex> lock(launch_mutex_);
    name = names_[op->number()];
    for (std::int32_t rank = 1; options_.own_rank < 0 && rank < options_.topo.world(); ++rank) {
      equal = equal && op->progress(rank).launches == op->progress(0).launches;
    }
  }
  if (!equal) {
    fail({ErrorKind::kAborted, name + " was destroyed when some ranks had launched more of its calls than others"});
  }
  for (const auto& stream : shared_.streams) stream->wait(*op, [this] { return shared_.failure.happened(); });
  for (const auto& stream : shared_.streams) {
    stream->bell.ring_all();
    stream->wait_released(*op);
  }
  wait_still();
  if (network_) network_->remove_operator(*op);
  std::lock_guard<std::mutex> lock(launch_mutex_);
  operators_[op->number()].reset();
}

void HostExecutor::wait_still() {
  if (network_ && shared_.failure.happened()) network_->wait_still();
}

std::string HostExecutor::flight_record(std::int32_t rank) {
  std::vector<std::string> names;
  {
    std::lock_guard<std::mutex> lock(launch_mutex_);
    names = names_;
  }
  return shared_.streams[rank]->recorder.text(start_ns_, names);
}

Status HostExecutor::check_room(std::int32_t rank) const {
  if (shared_.streams[rank]->full()) {
    return bad_argument(
        fmt::format("rank {} has {} launches that are not complete, and no more are accepted: call "
                    "wait() first",
                    rank, Stream::kCapacity));
  }
  if (log_.too_far_ahead(log_rank(rank))) {
    return bad_argument(fmt::format("rank {} is {} launches ahead of rank {}, and no more are accepted", rank,
                                    LaunchLog::kCapacity, log_.slowest_rank()));
  }
  return Ok{};
}

Status HostExecutor::launch(HostOperator* op, std::int32_t rank, const Arguments& arguments) {
  std::lock_guard<std::mutex> lock(launch_mutex_);
  if (shared_.failure.happened()) return shared_.failure.later_error();
  if (Status room = check_room(rank); !room.ok()) return room;
  return launch_locked(op, rank, arguments, nullptr);
}

Status HostExecutor::launch_all(HostOperator* op, std::span<const Arguments> arguments, std::shared_ptr<RunLog> log) {
  std::lock_guard<std::mutex> lock(launch_mutex_);
  if (shared_.failure.happened()) return shared_.failure.later_error();
  if (options_.own_rank >= 0) {
    if (Status room = check_room(options_.own_rank); !room.ok()) return room;
    return launch_locked(op, options_.own_rank, arguments[0], log);
  }
  for (std::int32_t rank = 0; rank < options_.topo.world(); ++rank) {
    if (Status room = check_room(rank); !room.ok()) return room;
  }
  for (std::int32_t rank = 0; rank < options_.topo.world(); ++rank) {
    if (Status status = launch_locked(op, rank, arguments[rank], log); !status.ok()) return status;
  }
  return Ok{};
}

Status HostExecutor::launch_locked(HostOperator* op, std::int32_t rank, const Arguments& arguments,
                                   std::shared_ptr<RunLog> log) {
  if (const auto other = log_.note(log_rank(rank), op->number())) {
    const Error error = bad_argument(fmt::format(
        "launch {} of rank {} is {}, but rank {} made its launch {} with {}: all ranks must launch the same operators "
        "in "
        "the same order",
        log_.count(rank) + 1, rank, names_[op->number()], other->rank, log_.count(rank) + 1, names_[other->op]));
    fail(error);  // the other rank's call can never end
    return error;
  }
  Call call;
  call.op = op;
  call.arguments = arguments;
  call.log = std::move(log);
  MK_CHECK(shared_.streams[rank]->launch(std::move(call)));
  return Ok{};
}

std::uint64_t HostExecutor::last_turn(HostOperator* op) {
  std::lock_guard<std::mutex> lock(launch_mutex_);
  return op->progress(options_.own_rank).launches - 1;
}

void HostExecutor::await_first_phase(HostOperator* op) {
  const std::uint64_t turn = last_turn(op);
  // Asked now and then: what is compared with this takes milliseconds.
  while (!op->gate_reached(turn) && !shared_.failure.happened()) {
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
}

void HostExecutor::open_gate(HostOperator* op) {
  if (op->open_gate(last_turn(op), options_.topo.world() - 1)) shared_.wake_all();
}

Status HostExecutor::wait(HostOperator* op, std::int32_t rank) {
  Stream& stream = *shared_.streams[rank];
  const auto failed = [this] { return shared_.failure.happened(); };
  if (!stream.wait(*op, failed) || failed()) {
    // Only tiles that were under way when the world failed are left, so this ends soon.
    while (!shared_.quiet()) std::this_thread::sleep_for(std::chrono::microseconds(100));
    const bool first = !op->progress(rank).failure_told.exchange(true);
    return first ? shared_.failure.error() : shared_.failure.later_error();
  }
  return Ok{};
}

}  // namespace mkernel
