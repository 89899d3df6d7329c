// What commands look at before they start anything: files that will be written, memory that will be needed.
#pragma once
#include <filesystem>
#include <string_view>

#include "mkernel/result.h"

namespace mkernel::cli {

// Refuses a file (or a folder that files go into) that could not be written. Empty paths are fine.
Status check_writable_file(std::string_view option, const std::filesystem::path& file);
Status check_writable_folder(std::string_view option, const std::filesystem::path& folder);

// Refuses what needs more memory than there is: `matrices`, `workspace` and `other` in bytes.
struct MemoryNeed {
  double matrices = 0;
  double workspace = 0;
  double other = 0;
};
Status check_memory(const MemoryNeed& need);

}  // namespace mkernel::cli
