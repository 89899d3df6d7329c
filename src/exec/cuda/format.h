// fmt for .cu files. fmt 9 takes nvcc for a compiler without constexpr and then contradicts itself, as the host
// compiler behind nvcc does have consteval; other versions of fmt do not look at this macro, or set the same.
#pragma once
#if defined(__CUDACC__) && !defined(FMT_USE_CONSTEXPR)
#define FMT_USE_CONSTEXPR 1
#endif
#include <fmt/format.h>
