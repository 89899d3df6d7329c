// What `run` and `sim` say about a run, for people and as JSON.
#pragma once
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "exec/attention_gradients.h"
#include "mkernel/mkernel.h"
#include "plan/spec.h"

namespace mkernel::cli {

// Times of repeated runs, in microseconds.
class Times {
 public:
  void add(double us) { us_.push_back(us); }
  bool empty() const { return us_.empty(); }
  double median() const;
  double min() const;
  double max() const;
  // "812.3 ms (median of 5, 803.1 ms to 830.2 ms)".
  std::string text() const;
  nlohmann::ordered_json json(const PlanSpec& spec) const;

 private:
  std::vector<double> us_;
};

// Operations of the whole product: 2 M N K. Of attention: 4 seq_q seq_k dim for each batch and head, 10 of its
// backward, half for causal masks (windows and packed sequences count as if they were not there).
double flops(const PlanSpec& spec);

// "12.00 MiB per GPU, lower bound 12.00 MiB".
std::string network_text(const PlanSpec& spec, std::int64_t bytes, std::int64_t bound);
nlohmann::ordered_json network_json(const PlanSpec& spec, std::int64_t bytes, std::int64_t bound);

// Members "operator" to "tiling".
nlohmann::ordered_json spec_json(const PlanSpec& spec);
nlohmann::ordered_json partition_json(const Partition& partition);

// "max relative error 1.2e-03, bound 4.1e-03; worst element at 0.52 of its bound; 64 of 4096 rows".
std::string check_text(const PlanSpec& spec, const CheckReport& check);
nlohmann::ordered_json check_json(const CheckReport& check);
// The same of three gradients.
std::string check_text(const PlanSpec& spec, const GradientReport& check);
nlohmann::ordered_json check_json(const GradientReport& check);

}  // namespace mkernel::cli
