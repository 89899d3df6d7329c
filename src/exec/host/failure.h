// The first failure of a world. Once set it stays: the world is of no use any more.
#pragma once
#include <atomic>
#include <mutex>
#include <utility>

#include "mkernel/result.h"

namespace mkernel {

class Failure {
 public:
  // order: whoever sees true also sees the error; pairs with set(). Sequentially consistent, because it also decides
  // whether a thread may still touch the caller's matrices (HostShared::begin_act).
  bool happened() const { return happened_.load(std::memory_order_seq_cst); }

  // True when this was the first one.
  bool set(Error error) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (happened()) return false;
    error_ = std::move(error);
    happened_.store(true, std::memory_order_seq_cst);
    return true;
  }

  // What calls return that were under way.
  Error error() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return error_;
  }
  // What calls return that come later.
  Error later_error() const {
    return {ErrorKind::kAborted,
            "this world has failed before, create a new one; it had failed because: " + error().message};
  }

 private:
  std::atomic<bool> happened_{false};
  mutable std::mutex mutex_;
  Error error_;
};

}  // namespace mkernel
