#include "cli/prepare.h"

#include <fmt/format.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <system_error>

#include "cli/format.h"
#include "cli/values.h"
#include "world/memory_limit.h"

namespace mkernel::cli {

namespace fs = std::filesystem;

Status check_writable_folder(std::string_view option, const fs::path& folder) {
  if (folder.empty()) return Ok{};
  const auto refuse = [&](std::string_view why) {
    return bad_argument(fmt::format("{} is {}: it must be a folder that exists and can be written, but {}", option,
                                    quote(folder.string()), why));
  };
  std::error_code error;
  const fs::file_status status = fs::status(folder, error);
  if (!fs::exists(status)) return refuse("there is none");
  if (!fs::is_directory(status)) return refuse("it is no folder");
  if (access(folder.c_str(), W_OK | X_OK) != 0) return refuse(std::strerror(errno));
  return Ok{};
}

Status check_writable_file(std::string_view option, const fs::path& file) {
  if (file.empty()) return Ok{};
  const auto refuse = [&](std::string_view why) {
    return bad_argument(fmt::format("{} is {}: it must be a file in a folder that can be written, but {}", option,
                                    quote(file.string()), why));
  };
  std::error_code error;
  const fs::file_status status = fs::status(file, error);
  if (fs::is_directory(status)) return refuse("it is a folder");
  if (fs::exists(status) && !fs::is_regular_file(status)) return refuse("it is no regular file");
  if (!file.has_filename()) return refuse("it has no name");
  const fs::path folder = file.has_parent_path() ? file.parent_path() : fs::path(".");
  if (!fs::is_directory(folder, error)) return refuse("there is no such folder");
  if (access(folder.c_str(), W_OK | X_OK) != 0) return refuse(std::strerror(errno));
  return Ok{};
}

Status check_memory(const MemoryNeed& need) {
  const double total = need.matrices + need.workspace + need.other;
  const auto available = static_cast<double>(available_memory());
  if (total <= available) return Ok{};
  return Error{ErrorKind::kOutOfMemory,
               fmt::format("{} of memory are needed (matrices {}, workspace {}, other {}) and {} are available: take "
                           "smaller sizes or fewer ranks",
                           format_bytes(total), format_bytes(need.matrices), format_bytes(need.workspace),
                           format_bytes(need.other), format_bytes(available))};
}

}  // namespace mkernel::cli
