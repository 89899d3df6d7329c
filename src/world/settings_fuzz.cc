// All text that a launcher, a user or a scheduler puts into the environment, and addresses: taken, or refused with one
// printable sentence. Lines are "NAME=value"; what has no name is read as an address.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <sstream>
#include <string>

#include "base/check.h"
#include "net/verbs/nic_choice.h"
#include "net/verbs/settings.h"
#include "world/interfaces.h"
#include "world/launch.h"
#include "world/socket.h"

namespace mkernel {
namespace {

void expect_sentence(const Error& error) {
  MK_CHECK_OP(error.kind == ErrorKind::kBadArgument || error.kind == ErrorKind::kIo, ==, true);
  MK_CHECK(!error.message.empty());
}

}  // namespace
}  // namespace mkernel

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace mkernel;
  std::map<std::string, std::string> variables;
  std::istringstream text(std::string(reinterpret_cast<const char*>(data), size));
  for (std::string line; std::getline(text, line);) {
    const std::size_t equals = line.find('=');
    if (equals != std::string::npos) variables[line.substr(0, equals)] = line.substr(equals + 1);
    const auto point = meeting_point(line, "job");
    if (point.ok()) {
      MK_CHECK(line.empty() || !point->ports.empty());
    } else {
      expect_sentence(point.error());
    }
    MK_CHECK(first_slurm_host(line).size() <= line.size());
    const auto filter = NicFilter::parse(line);
    if (filter.ok()) {
      static_cast<void>(filter->accepts({}));
    } else {
      expect_sentence(filter.error());
    }
    const std::string found = find_interface(line, {{"eth0", "10.0.0.1", false}, {"lo", "127.0.0.1", true}});
    MK_CHECK(found.empty() || found == "10.0.0.1" || found == "127.0.0.1");
  }
  const auto environment = [&](const char* name) -> const char* {
    const auto at = variables.find(name);
    return at != variables.end() ? at->second.c_str() : nullptr;
  };
  const auto processes = processes_from(environment);
  if (processes.ok()) {
    MK_CHECK(processes->size >= 1 && processes->rank < processes->size);
  } else {
    expect_sentence(processes.error());
  }
  const auto settings = verbs_settings_from(environment);
  if (settings.ok()) {
    MK_CHECK(settings->lanes >= 1 && settings->lanes <= 255);
  } else {
    expect_sentence(settings.error());
  }
  return 0;
}
