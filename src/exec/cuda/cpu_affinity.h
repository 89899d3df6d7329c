// Keeps threads that talk to a GPU on the CPU cores next to it.
#pragma once
#include <string>
#include <string_view>
#include <vector>

namespace mkernel {

// "0-3,8" as sysfs writes it; nothing when it is not of this form.
std::vector<int> parse_cpu_list(std::string_view text);

// Confines this thread to those of its cores that are next to the PCI device `bus_id` ("0000:1b:00.0"). Does nothing
// where the system does not say which these are, or where this thread may use none of them.
void stay_near_pci_device(std::string bus_id);

// Cores that this thread may use, at least 1.
int usable_cores();

}  // namespace mkernel
