// Fuzzes rings and proxy: a script of bytes pushes, holds back, steps, fails, completes, kills and drops, and a model
// says what may be posted: exactly the records that were pushed, once, in the order of their ring.
#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <vector>

#include "net/proxy.h"

namespace mkernel {
namespace {

constexpr std::uint32_t kOperators = 2;
constexpr int kPeers = 2;

PlanSpec fuzz_spec() {
  PlanSpec spec;
  spec.op = Op::kGemmReduceScatter;
  spec.topo = {kPeers + 1, 1};
  spec.m = 96;
  spec.n = 128;
  spec.k = 16;
  spec.tiling = {16, 32, 2, 2, 16, 1};
  return spec;
}

// The bytes of the script; zeros after its end.
class Script {
 public:
  Script(const std::uint8_t* data, std::size_t size) : at_(data), end_(data + size) {}
  bool done() const { return at_ == end_; }
  std::uint32_t byte() { return done() ? 0 : *at_++; }
  std::uint32_t word() { return byte() | byte() << 8 | byte() << 16 | byte() << 24; }

 private:
  const std::uint8_t* at_;
  const std::uint8_t* end_;
};

// What the model expects of a pushed record.
struct Expected {
  Record record;
  std::uint64_t epoch = 0;
  bool good = true;
};

// A network that does what the script says and holds every post against the model.
class ScriptedEndpoint : public Endpoint {
 public:
  explicit ScriptedEndpoint(const Plan& plan) : plan_(plan), layout_(plan) {}

  PostStatus post(const Put& put, Nanos) override {
    const int peer = put.dst_rank - 1;
    MK_CHECK(peer >= 0 && peer < kPeers);
    MK_CHECK(!silent);
    MK_CHECK(!lost[peer]);
    if (again[peer]) return PostStatus::kAgain;
    MK_CHECK(!pushed[peer].empty());
    const Expected& want = pushed[peer].front();
    MK_CHECK(want.good);
    const Task task = plan_.task(0, Role::kSend, peer, want.record.task / kPeers);
    MK_CHECK_OP(put.src_rank, ==, 0);
    MK_CHECK_OP(put.dst_rank, ==, task.peer);
    MK_CHECK_OP(put.op, ==, want.record.op);
    MK_CHECK_OP(put.epoch, ==, want.epoch);
    MK_CHECK_OP(put.bytes, ==, task.length * 2);
    MK_CHECK_OP(put.src_offset, ==, layout_.offset(task.src, task.src_offset, want.epoch));
    MK_CHECK_OP(put.dst_offset, ==, layout_.offset(task.dst, task.dst_offset, want.epoch));
    MK_CHECK_OP(put.flag, ==, layout_.flag_index(task.signals[0].flag, want.epoch));
    MK_CHECK_OP(put.value, ==, static_cast<std::uint32_t>(want.epoch / 2 + want.epoch % 2));
    if (fatal[peer]) {
      lost[peer] = true;
      return PostStatus::kFatal;
    }
    pushed[peer].pop_front();
    in_flight.push_back(put);
    ++posted[peer];
    last_epoch[put.op] = std::max(last_epoch[put.op], put.epoch);
    return PostStatus::kPosted;
  }

  int poll(Nanos, std::span<TransportEvent> out) override {
    std::size_t count = 0;
    for (; count < out.size() && !events.empty(); ++count) {
      out[count] = events.front();
      events.pop_front();
      if (out[count].kind == EventKind::kFailed) lost[out[count].peer - 1] = true;
    }
    return static_cast<int>(count);
  }
  Nanos next_event() const override { return events.empty() ? kNever : 0; }
  int arrivals_per_put() const override { return pieces; }

  void complete(std::size_t which) {
    const Put put = in_flight[which];
    in_flight.erase(in_flight.begin() + static_cast<std::ptrdiff_t>(which));
    const EventKind kind = fatal[put.dst_rank - 1] ? EventKind::kFailed : EventKind::kSent;
    events.push_back({kind, put.dst_rank, put.id, put.op, put.epoch, put.flag});
  }

  int pieces = 0;
  bool silent = false;                              // after drop(): nothing may be posted
  std::array<bool, kPeers> again{};                 // posts fail for the moment
  std::array<bool, kPeers> fatal{};                 // the peer is dead
  std::array<bool, kPeers> lost{};                  // and the proxy has been told
  std::array<std::deque<Expected>, kPeers> pushed;  // in order of reservation, not yet posted
  std::array<std::int64_t, kPeers> posted{};
  std::array<std::uint64_t, kOperators> last_epoch{};  // the highest one posted
  std::vector<Put> in_flight;
  std::deque<TransportEvent> events;

 private:
  const Plan& plan_;
  HeapLayout layout_;
};

// Counts arrivals as the model does, and expects the stamp exactly when the last one comes.
class StampModel : public Landing {
 public:
  void land(const Put&, std::int64_t, std::int64_t) override {}
  void stamp(std::int32_t rank, std::uint32_t op, std::int64_t flag, std::uint32_t value) override {
    MK_CHECK_OP(rank, ==, 0);
    const auto at = due.find({op, flag});
    MK_CHECK(at != due.end());
    MK_CHECK_OP(at->second, ==, value);
    due.erase(at);
  }
  std::map<std::pair<std::uint32_t, std::int64_t>, std::uint32_t> due;  // stamps that the next step must write
};

class Run {
 public:
  Run(const PlanSource& source, Script& script) : source_(source), script_(script), endpoint_(source.plan()) {
    ProxyConfig config;
    config.topo = source.plan().topo();
    config.rings.push_back(nullptr);
    for (int peer = 0; peer < kPeers; ++peer) {
      const std::uint32_t shape = script.byte();
      depth_[peer] = 1u << shape % 4;
      constexpr std::uint32_t kStarts[] = {0, 1, 0xfffffffd, 0xffffffff, 0x7ffffffe, 255, 254};
      const std::uint32_t which = shape / 4 % 8;
      rings_[peer] = std::make_unique<CommandRing>(depth_[peer], which < 7 ? kStarts[which] : script.word());
      config.rings.push_back(rings_[peer].get());
    }
    const std::uint32_t limits = script.byte();
    config.queue_depth = queue_depth_ = 1 + static_cast<int>(limits % 4);
    config.window = 1 + static_cast<int>(limits / 4 % 4);
    config.batch = 1 + static_cast<int>(limits / 16 % 4);
    config.hinted = limits / 64 % 2 != 0;
    endpoint_.pieces = static_cast<int>(script.byte() % 4);
    config.endpoint = &endpoint_;
    config.landing = &stamps_;
    config.max_post_failures_ns = 0;
    const std::uint64_t start = script.word();
    proxy_ = std::make_unique<Proxy>(config);
    for (std::uint32_t op = 0; op < kOperators; ++op) {
      epoch_[op] = endpoint_.last_epoch[op] = 256 + start;
      proxy_->add_operator(op, &source, HeapLayout(source.plan()), epoch_[op]);
    }
  }

  void run() {
    while (!script_.done()) {
      act();
      check();
    }
    finish();
  }

 private:
  struct Reserved {
    int peer = 0;
    std::uint32_t position = 0;
    Record record;
  };

  void act() {
    const std::uint32_t code = script_.byte();
    const int peer = static_cast<int>(code / 16 % kPeers);
    const std::uint32_t op = code / 32 % kOperators;
    switch (code % 16) {
      case 0:
      case 1:
      case 2: return push(peer, op, true);
      case 3: return push(peer, op, false);
      case 4: return publish_one(script_.byte());
      case 5: return advance_epoch(op, code / 64);
      case 6:
      case 7: return step(1'000);
      case 8: return step(static_cast<Nanos>(script_.byte()) * 100'000);
      case 9: endpoint_.again[peer] = !endpoint_.again[peer]; return;
      case 10:
      case 11:
        if (!endpoint_.in_flight.empty()) endpoint_.complete(script_.byte() % endpoint_.in_flight.size());
        return;
      case 12:
      case 13: return arrive(op, script_.byte());
      case 14: return push_bad(peer);
      case 15:
        if (code / 64 == 0) endpoint_.fatal[peer] = true;
        if (code / 64 == 1) drop();
        return;
    }
  }

  void push(int peer, std::uint32_t op, bool publish_now) {
    Record record{op, static_cast<std::uint32_t>(epoch_[op] & 0xff), 0, 0, 0};
    const auto chunks = static_cast<std::uint32_t>(source_.count(0, Role::kSend, peer));
    record.task = static_cast<std::uint32_t>(send_id(source_.plan(), {peer, next_task_[peer]++ % chunks}));
    reserve(peer, {record, epoch_[op], true}, publish_now);
  }

  void push_bad(int peer) {
    const std::uint32_t bits = script_.word();
    const Record record{kOperators + bits % (kMaxOperators - kOperators), bits >> 8, bits >> 4, bits, 0};
    reserve(peer, {decode(encode(record)), 0, false}, true);
  }

  void reserve(int peer, const Expected& expected, bool publish_now) {
    const auto position = try_reserve(rings_[peer]->view());
    // Not yet posted: in the ring or in the queue. A ring is full only if that many are missing.
    const std::size_t waiting = endpoint_.pushed[peer].size();
    if (!position) {
      MK_CHECK(endpoint_.silent || waiting >= depth_[peer]);
      return;
    }
    if (!endpoint_.silent && !endpoint_.lost[peer] && !bad_[peer]) {
      MK_CHECK_OP(waiting, <, depth_[peer] + static_cast<std::size_t>(queue_depth_));
    }
    endpoint_.pushed[peer].push_back(expected);
    bad_[peer] |= !expected.good;
    reserved_.push_back({peer, *position, expected.record});
    if (publish_now) publish_one(static_cast<std::uint32_t>(reserved_.size() - 1));
  }

  void publish_one(std::uint32_t which) {
    if (reserved_.empty()) return;
    const auto at = reserved_.begin() + static_cast<std::ptrdiff_t>(which % reserved_.size());
    publish(rings_[at->peer]->view(), at->position, at->record);
    proxy_->ring_filled(at->peer + 1);
    reserved_.erase(at);
  }

  // At most 100 epochs lie between records that are under way and the last one taken: eight bits tell no more apart.
  void advance_epoch(std::uint32_t op, std::uint32_t by) {
    std::uint64_t oldest = endpoint_.last_epoch[op];
    for (const auto& pushed : endpoint_.pushed) {
      for (const Expected& e : pushed) {
        if (e.good && e.record.op == op) oldest = std::min(oldest, e.epoch);
      }
    }
    if (epoch_[op] + by - oldest <= 100) epoch_[op] += by;
  }

  void arrive(std::uint32_t op, std::uint32_t which) {
    if (endpoint_.pieces == 0) return;
    const std::int64_t flag = which % (2 * source_.plan().flag_count());
    // The epoch of a flag's parity stays the same until its put is whole.
    auto& [count, epoch] = arrivals_[{op, flag}];
    if (count == 0) ++epoch;
    endpoint_.events.push_back({EventKind::kArrived, 1, 0, op, epoch, flag});
    if (++count == endpoint_.pieces) {
      step(0);  // the stamp of the last put must be written before the next one begins
      MK_CHECK(endpoint_.events.empty());
      MK_CHECK(stamps_.due.empty());
      count = 0;
    }
  }

  void step(Nanos after) {
    now_ += after;
    for (const auto& [key, state] : arrivals_) {
      if (state.first == endpoint_.pieces && endpoint_.pieces > 0) stamps_.due[key] = use_of_epoch(state.second);
    }
    proxy_->step(now_);
    MK_CHECK(stamps_.due.empty());
    // Nothing left to do: then all that was pushed has been posted, where it could be.
    if (proxy_->next_event() != kNever || !reserved_.empty() || !endpoint_.in_flight.empty()) return;
    for (int peer = 0; peer < kPeers; ++peer) {
      MK_CHECK(endpoint_.pushed[peer].empty() || endpoint_.silent || endpoint_.lost[peer] || bad_[peer]);
    }
  }

  void drop() {
    endpoint_.silent = true;
    proxy_->drop();
  }

  void check() const {
    const ProxyStats& stats = proxy_->stats();
    MK_CHECK_OP(stats.posts, ==, endpoint_.posted[0] + endpoint_.posted[1]);
    const bool reason = bad_[0] || bad_[1] || endpoint_.lost[0] || endpoint_.lost[1];
    MK_CHECK(!proxy_->failure() || reason);
    if (!proxy_->failure()) return;
    const ProxyFailure& failure = *proxy_->failure();
    MK_CHECK(failure.peer >= 1 && failure.peer <= kPeers);
    const int peer = failure.peer - 1;
    MK_CHECK(failure.own_bug ? bad_[peer] : endpoint_.lost[peer]);
    MK_CHECK(!failure.message().empty());
  }

  // When nothing fails any more, everything ends: all good records are posted and completed.
  void finish() {
    while (!reserved_.empty()) publish_one(0);
    endpoint_.again = {};
    const std::size_t left = endpoint_.pushed[0].size() + endpoint_.pushed[1].size() + endpoint_.in_flight.size();
    for (std::size_t i = 0; i < 4 * left + 20; ++i) {
      step(1'000'000);
      while (!endpoint_.in_flight.empty()) endpoint_.complete(0);
    }
    check();
    bool all_well = true;
    for (int peer = 0; peer < kPeers; ++peer) {
      const bool well = !bad_[peer] && !endpoint_.lost[peer];
      all_well &= well;
      if (well && !endpoint_.silent) MK_CHECK(endpoint_.pushed[peer].empty());
    }
    MK_CHECK(endpoint_.events.empty());
    if (all_well || endpoint_.silent) {
      MK_CHECK(proxy_->idle());
      MK_CHECK_OP(proxy_->next_event(), ==, kNever);
    }
    MK_CHECK_OP(proxy_->stats().sent + proxy_->stats().failed, ==, proxy_->stats().posts);
  }

  const PlanSource& source_;
  Script& script_;
  ScriptedEndpoint endpoint_;
  StampModel stamps_;
  std::array<std::unique_ptr<CommandRing>, kPeers> rings_;
  std::unique_ptr<Proxy> proxy_;
  std::array<std::uint32_t, kPeers> depth_{};
  int queue_depth_ = 1;
  std::array<std::int64_t, kPeers> next_task_{};
  std::array<bool, kPeers> bad_{};  // a record that nobody should write has been pushed
  std::array<std::uint64_t, kOperators> epoch_{};
  std::vector<Reserved> reserved_;
  std::map<std::pair<std::uint32_t, std::int64_t>, std::pair<int, std::uint64_t>> arrivals_;  // count, epoch
  Nanos now_ = 0;
};

}  // namespace
}  // namespace mkernel

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size > 4'096) return 0;
  static const mkernel::PlanSource source{mkernel::Plan(mkernel::fuzz_spec())};
  mkernel::Script script(data, size);
  mkernel::Run(source, script).run();
  return 0;
}
