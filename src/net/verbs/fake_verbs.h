// For tests: an RDMA device inside the process, behind the same table of functions as libibverbs.
//
// It is stricter than devices are: it aborts when a queue overflows, when two threads post to one queue pair, and when
// a write leaves its region. Queue pairs take turns at random, each in its own order, and nothing moves but while
// somebody polls. Faults are injected by number.
#pragma once
#include <infiniband/verbs.h>

#include <cstdint>
#include <functional>

#include "net/verbs/library.h"
#include "net/verbs/nic_choice.h"

namespace mkernel {

struct FakeVerbsFaults {
  // The errno of an ibv_post_send, by its number from 1; 0: none. It takes no request, or as many as `accepted` says.
  std::function<int(std::int64_t call, int& accepted)> post;
  // The status of a write, by its number from 1.
  std::function<ibv_wc_status(std::int64_t write)> write;
  // The errno of making something: "pd", "cq", "srq", "qp", "mr", "dmabuf", "init", "rtr", "rts"; 0: none.
  std::function<int(const char* what)> create;
};

// The table. Its devices live until the last context of theirs is closed.
const VerbsLibrary& fake_verbs();
Nic fake_nic();
// Replaces all faults and counts from 1 again.
void set_fake_faults(const FakeVerbsFaults& faults);
// Objects that have been made and not destroyed.
std::int64_t fake_objects();
// Doorbells and writes since the last set_fake_faults().
struct FakeVerbsCounts {
  std::int64_t doorbells = 0;
  std::int64_t writes = 0;
  std::int64_t completions = 0;  // of writes
};
FakeVerbsCounts fake_counts();

}  // namespace mkernel
