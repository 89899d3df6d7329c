// What another rank says of its queue pairs: connected to, or refused with a sentence that names the rank. Over the
// device of fake_verbs.h, which refuses what devices refuse.
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "base/check.h"
#include "net/verbs/address_bytes.h"
#include "net/verbs/fake_verbs.h"
#include "net/verbs/verbs_endpoint.h"

namespace mkernel {
namespace {

std::unique_ptr<ProcessEndpoint> make(std::int32_t rank) {
  VerbsOptions options;
  options.nic = fake_nic();
  options.gid_index = 0;
  options.library = &fake_verbs();
  options.send_depth = options.receive_depth = 16;
  return create_verbs_endpoint(rank, 3, options).value();
}

}  // namespace
}  // namespace mkernel

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace mkernel;
  // Made once: a connection may be made again over the fake device.
  static const std::unique_ptr<ProcessEndpoint> one = make(0);
  static const std::string good = make(1)->address();
  // The first byte: as it is, or what follows is laid over a good address from a place on.
  std::string address(reinterpret_cast<const char*>(data), size);
  if (size >= 2 && (data[0] & 1) != 0) {
    const std::size_t at = data[1] % good.size();
    const std::string over = address.substr(2);
    address = good;
    address.replace(at, over.size(), over);
  }
  const Status status = one->connect(1, address);
  if (status.ok()) {
    // Nobody is connected to who has not said the right magic, and a queue pair for us.
    MK_CHECK(address.size() >= good.size() - 2 * 12 && address.substr(0, 4) == good.substr(0, 4));
  } else {
    MK_CHECK(status.error().message.find("rank 1") != std::string::npos);
  }
  return 0;
}
