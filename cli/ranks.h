// The processes that a launcher has started for one run, each with one rank; most often there is only this one.
#pragma once
#include <cstdint>
#include <string>

#include "exec/reference.h"
#include "mkernel/mkernel.h"

namespace mkernel::cli {

class Ranks {
 public:
  Ranks() = default;
  explicit Ranks(const Processes& processes) : processes_(processes) {}

  bool several() const { return processes_.rank >= 0; }
  const Processes& processes() const { return processes_; }
  // The one that speaks for all.
  bool leads() const { return processes_.rank <= 0; }
  // This process's rank; -1 when it runs all.
  std::int32_t own() const { return processes_.rank; }

  // Below: all processes call it; with one process it returns at once.

  // An error of any rank becomes everybody's.
  Status confirm(World& world, const std::string& what, const Status& status) const;
  // gemm_all_reduce: all ranks have the same bits.
  Status same_bits(World& world, std::uint64_t digest) const;
  // The worst of all ranks' reports; their rows added up when `rows_divided`.
  Result<CheckReport> worst(World& world, const CheckReport& own, bool rows_divided) const;

 private:
  Processes processes_;
};

}  // namespace mkernel::cli
