// The one place that knows which compiler is at work.
#pragma once

#if defined(__CUDACC__)
#define MK_HD __host__ __device__
#else
#define MK_HD
#endif
