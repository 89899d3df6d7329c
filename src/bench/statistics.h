// From times to ratios. Cards are power limited, so only times of neighbouring blocks are ever compared.
#pragma once
#include <cstddef>
#include <span>
#include <vector>

namespace mkernel::bench {

// Of at least one value; the mean of the middle two where their number is even.
double median(std::span<const double> values);

// Ratios of several rounds in two numbers. The spread is (largest - smallest) / median.
struct Summary {
  double median = 0;
  double spread = 0;
};
Summary summarise(std::span<const double> per_round);

// How much faster we were than the baseline that ran before and after us; above 1 we are better.
double paired_ratio(double baseline_before, double ours, double baseline_after);

// The order of `count` contestants in a round >= 0, such that nobody keeps the neighbour before it, whose power moves
// the clock: within `count` rounds another one each time, or, where `count` is odd, each at most twice. (E. J.
// Williams, Experimental designs balanced for the estimation of residual effects of treatments, 1949.)
std::vector<std::size_t> balanced_order(std::size_t count, int round);

}  // namespace mkernel::bench
