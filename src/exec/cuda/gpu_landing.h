// What arrives in the heaps of GPU operators: hands copies and stamps of the in-process network to the wire.
//
// In a network with order a put's copy starts when it is posted, and hides under the time that the link model lets pass
// until the stamp is due. In one without order every piece is copied when it is due.
#pragma once
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "exec/cuda/wire.h"
#include "net/record.h"
#include "net/transport.h"

namespace mkernel {

class GpuLanding final : public Landing {
 public:
  GpuLanding(Wire* wire, bool unordered) : wire_(wire), unordered_(unordered) {}

  // One thread at a time for these two. No put of the operator is under way.
  void add_operator(std::uint32_t number, std::uint32_t flag_count, std::vector<std::byte*> heaps);
  void remove_operator(std::uint32_t number);
  std::int64_t operator_bytes(std::uint32_t number) const;

  // A put has been posted; by its source's thread, before its stamp can be due.
  void posted(const Put& put);
  void land(const Put& put, std::int64_t begin, std::int64_t bytes) override;
  void stamp(std::int32_t rank, std::uint32_t op, std::int64_t flag, std::uint32_t value) override;

  // From now on everything that is still to arrive is forgotten.
  void drop() { dropped_.store(true, std::memory_order_relaxed); }  // order: none, see GpuNetwork::settle()

 private:
  struct Operator {
    std::vector<std::byte*> heaps;  // by rank; each begins with its flags
    std::size_t flags = 0;          // per rank, both parities
    // What the next stamp of a flag waits for, by rank and flag: every flag that is stamped has a single source. A mark
    // is written by the source's thread, and read by the one that stamps: in networks with order the same, else one
    // that has polled an arrival which was raised after.
    std::unique_ptr<std::atomic<std::uint64_t>[]> marks;
    std::atomic<std::int64_t> bytes{0};

    std::atomic<std::uint64_t>& mark(std::int32_t rank, std::int64_t flag) const {
      return marks[static_cast<std::size_t>(rank) * flags + static_cast<std::size_t>(flag)];
    }
  };

  // Null for operators that are not there any more: after a failure puts of theirs may still be under way.
  Operator* find(std::uint32_t number) const;
  void copy(Operator& op, const Put& put, std::int64_t begin, std::int64_t bytes);

  Wire* wire_;
  bool unordered_;
  std::atomic<bool> dropped_{false};
  std::array<std::atomic<Operator*>, kMaxOperators> operators_ = {};  // what threads see of the next
  std::array<std::unique_ptr<Operator>, kMaxOperators> owned_;
};

}  // namespace mkernel
