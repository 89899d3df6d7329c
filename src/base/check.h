// Assertions that are on in every build. They guard against our own bugs, never against a user's mistake.
#pragma once
#include <cstdio>
#include <cstdlib>

namespace mkernel {

// Prints the place and the values, then aborts.
[[noreturn]] inline void check_failed(const char* file, int line, const char* what, long long a, long long b) {
  std::fprintf(stderr, "mkernel bug: %s:%d: %s (values %lld, %lld)\n", file, line, what, a, b);
  std::abort();
}

}  // namespace mkernel

#define MK_CHECK(cond) ((cond) ? void(0) : ::mkernel::check_failed(__FILE__, __LINE__, #cond, 0, 0))
// Compares two integers and prints both when the comparison does not hold.
#define MK_CHECK_OP(a, op, b)                                                                             \
  (((a)op(b)) ? void(0)                                                                                   \
              : ::mkernel::check_failed(__FILE__, __LINE__, #a " " #op " " #b, static_cast<long long>(a), \
                                        static_cast<long long>(b)))
