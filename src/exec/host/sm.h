// A thread that stands for one SM of one rank: takes ready tasks from the lanes of the call that is under way.
#pragma once
#include <cstdint>

#include "exec/host/host_network.h"
#include "exec/host/host_shared.h"

namespace mkernel {

class Sm {
 public:
  Sm(HostShared& shared, std::int32_t rank, int index)
      : shared_(shared), stream_(*shared.streams[rank]), rank_(rank), index_(index) {}

  // Until shared.stop is set.
  void run();

 private:
  const PlanSource& source() const { return call_.op->source(); }
  bool follow_stream();
  bool work();
  bool role_open(Role role) const;
  bool is_ready(Role role, std::int32_t lane) const;
  bool anything_ready() const;
  bool take_from(Role role, std::int32_t lane);
  bool waits_met(const Task& task) const;
  void act(Role role, std::int32_t lane, std::int64_t index, const Task& task);
  void signal(const Task& task, Nanos now);
  bool serve_sends();
  bool send_from(std::int32_t lane);
  bool push(std::int32_t lane, std::int64_t index, const Task& task);
  void finish(Role role, const Task& task, Nanos now);
  void pass_gate();
  bool end_call();
  void note(FlightState state, Role role, std::int32_t lane, std::int64_t index, const Task& task, Nanos now);

  HostShared& shared_;
  Stream& stream_;
  std::int32_t rank_;
  int index_;
  Call call_;
  std::uint32_t turn_ = 0;  // where the search for a ready lane begins, so that no lane is always last
};

}  // namespace mkernel
