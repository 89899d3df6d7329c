#include "net/verbs/settings.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cstring>
#include <iterator>
#include <tuple>

#include "net/address_bytes.h"

namespace mkernel {
namespace {

using Environment = std::function<const char*(const char*)>;

struct Variable {
  std::string name;
  std::string text;  // empty: not set
};

Variable find_variable(const Environment& environment, const std::string& name) {
  for (const char* prefix : {"MKERNEL_IB_", "NCCL_IB_"}) {
    const char* text = environment((prefix + name).c_str());
    if (text != nullptr && *text != '\0') return {prefix + name, text};
  }
  return {};
}

Status read_number(const Environment& environment, const std::string& name, int low, int high, int& number) {
  const Variable variable = find_variable(environment, name);
  if (variable.text.empty()) return Ok{};
  const char* end = variable.text.data() + variable.text.size();
  int value = 0;
  const auto parsed = std::from_chars(variable.text.data(), end, value);
  if (parsed.ec != std::errc() || parsed.ptr != end || value < low || value > high) {
    return bad_argument(fmt::format("the environment variable {} is '{}': it must be a number from {} to {}",
                                    variable.name, variable.text, low, high));
  }
  number = value;
  return Ok{};
}

std::string list_of(const std::vector<Nic>& nics) {
  std::string text;
  for (const Nic& nic : nics) text += (text.empty() ? "" : ", ") + nic.name() + (nic.active ? "" : " (not active)");
  return text.empty() ? "none" : text;
}

}  // namespace

Result<VerbsSettings> verbs_settings_from(const Environment& environment) {
  VerbsSettings settings;
  const Variable cards = find_variable(environment, "HCA");
  Result<NicFilter> filter = NicFilter::parse(cards.text);
  if (!filter.ok()) {
    return bad_argument(fmt::format("the environment variable {}: {}", cards.name, filter.error().message));
  }
  settings.nics = std::move(filter).value();
  // -1 is NCCL's own word for "choose".
  if (Status status = read_number(environment, "GID_INDEX", -1, 255, settings.gid_index); !status.ok()) {
    return status.error();
  }
  if (Status status = read_number(environment, "TC", 0, 255, settings.traffic_class); !status.ok()) {
    return status.error();
  }
  if (Status status = read_number(environment, "SL", 0, 15, settings.service_level); !status.ok()) {
    return status.error();
  }
  if (Status status = read_number(environment, "QPS_PER_CONNECTION", 1, 128, settings.lanes); !status.ok()) {
    return status.error();
  }
  if (Status status = read_number(environment, "TIMEOUT", 1, 31, settings.timeout); !status.ok()) {
    return status.error();
  }
  if (Status status = read_number(environment, "RETRY_CNT", 0, 7, settings.retry_count); !status.ok()) {
    return status.error();
  }
  if (Status status = read_number(environment, "RAILS", 1, kMaxRails, settings.rails); !status.ok()) {
    return status.error();
  }
  return settings;
}

std::string why_not_used(const VerbsSettings& settings, const Nic& nic) {
  if (!nic.active) return "its link is down";
  if (!settings.nics.accepts(nic)) return "MKERNEL_IB_HCA or NCCL_IB_HCA leaves it out";
  return "";
}

std::vector<Nic> rails_of(const VerbsSettings& settings, const std::vector<Nic>& usable,
                          const std::vector<int>& assigned) {
  std::vector<Nic> rails;
  for (const int index : assigned) {
    const Nic& nic = usable[static_cast<std::size_t>(index)];
    if (static_cast<int>(rails.size()) == settings.rails) break;
    if (rails.empty() || nic.ethernet == rails.front().ethernet) rails.push_back(nic);
  }
  std::sort(rails.begin(), rails.end(), [](const Nic& a, const Nic& b) {
    // mlx5_9 before mlx5_10.
    return std::tuple(a.device.size(), a.device, a.port) < std::tuple(b.device.size(), b.device, b.port);
  });
  return rails;
}

Result<std::vector<Nic>> choose_nics(const VerbsSettings& settings, const std::string& sysfs,
                                     const std::vector<GpuPlace>& gpus, int gpu) {
  const std::vector<Nic> all = find_nics(sysfs);
  std::vector<Nic> usable;
  std::copy_if(all.begin(), all.end(), std::back_inserter(usable),
               [&](const Nic& nic) { return why_not_used(settings, nic).empty(); });
  if (usable.empty()) {
    return Error{ErrorKind::kUnsupported,
                 all.empty() ? "this machine has no RDMA device (/sys/class/infiniband is empty)"
                             : fmt::format("no RDMA port is active and named by MKERNEL_IB_HCA or NCCL_IB_HCA; there "
                                           "are {}",
                                           list_of(all))};
  }
  const std::vector<std::vector<int>> assigned = assign_nics(gpus, usable);
  return rails_of(settings, usable, assigned.at(static_cast<std::size_t>(gpu)));
}

}  // namespace mkernel
