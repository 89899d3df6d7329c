// A whole Bootstrap against a peer that says anything: as rank 0 that has let it in, and as rank 1 that has been let in
// by it. The first byte says which, the others are what the peer sends. Whatever it is, creation, exchange and leaving
// end within their deadlines, with everybody's texts or with an error.
#include <unistd.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <thread>

#include "base/check.h"
#include "world/bootstrap.h"
#include "world/packet.h"
#include "world/socket.h"

namespace mkernel {
namespace {

using Clock = std::chrono::steady_clock;
constexpr double kStartS = 0.05;
constexpr double kExchangeS = 0.02;
// The longest of all waits: start, exchange (2 s more on rank 1), farewell; and a machine that is busy.
constexpr auto kEnd = std::chrono::seconds(9);

std::string job_of_process() { return "bootstrap_fuzz " + std::to_string(getpid()); }

void send_all(const Socket& socket, std::string bytes) {
  for (int i = 0; i < 100 && !bytes.empty() && write_some(socket, bytes); ++i) {
  }
}

void use(std::int32_t rank, const std::string& job) {
  BootstrapOptions options;
  options.rank = rank;
  options.size = 2;
  options.job = job;
  options.start_s = kStartS;
  Result<std::unique_ptr<Bootstrap>> made = Bootstrap::create(options);
  if (!made.ok()) {
    MK_CHECK(!made.error().message.empty());
    return;
  }
  const auto texts = (*made)->exchange("say", "text", kExchangeS);
  if (texts.ok()) {
    MK_CHECK_OP(texts->size(), ==, 2u);
  } else {
    MK_CHECK(!texts.error().message.empty());
  }
}

void against_rank_0(const std::string& job, bool introduced, std::string_view bytes) {
  std::thread rank_0([&] { use(0, job); });
  const MeetingPoint point = meeting_point("", job).value();
  const std::string hello =
      encode_frame(FrameType::kHello, PacketWriter().text(job).number(1).number(1).number(2).bytes());
  for (const Clock::time_point end = Clock::now() + std::chrono::milliseconds(40); Clock::now() < end;) {
    const Socket socket = connect_to(point, 0, 5);
    if (!socket.open()) continue;
    send_all(socket, (introduced ? hello : "") + std::string(bytes));
    break;
  }
  rank_0.join();
}

void against_rank_1(const std::string& job, bool welcomed, std::string_view bytes) {
  const Result<Socket> listener = listen_at(meeting_point("", job).value());
  MK_CHECK(listener.ok());
  std::thread rank_1([&] { use(1, job); });
  Socket socket;
  for (const Clock::time_point end = Clock::now() + std::chrono::seconds(2); !socket.open() && Clock::now() < end;) {
    socket = accept_from(*listener);
  }
  if (socket.open()) {
    const std::string begin = encode_frame(FrameType::kAccepted) + encode_frame(FrameType::kWelcome);
    send_all(socket, (welcomed ? begin : "") + std::string(bytes));
    socket.close();
  }
  rank_1.join();
}

}  // namespace
}  // namespace mkernel

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace mkernel;
  if (size < 1) return 0;
  const std::string_view bytes(reinterpret_cast<const char*>(data) + 1, size - 1);
  const std::string job = job_of_process();
  const Clock::time_point begin = Clock::now();
  const bool known = (data[0] & 2) != 0;
  if ((data[0] & 1) != 0) {
    against_rank_0(job, known, bytes);
  } else {
    against_rank_1(job, known, bytes);
  }
  MK_CHECK(Clock::now() - begin < kEnd);
  return 0;
}
