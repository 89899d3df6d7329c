// What a launcher (mpirun, torchrun, srun) tells its processes in their environment.
#pragma once
#include <functional>
#include <string>

#include "mkernel/mkernel.h"

namespace mkernel {

// The value of an environment variable; null when it is not set.
using Environment = std::function<const char*(const char* name)>;

// processes_from_environment() on any environment.
Result<Processes> processes_from(const Environment& environment);

// The first host of a SLURM node list such as "gpu[07-09,12],login1".
std::string first_slurm_host(const std::string& list);

}  // namespace mkernel
