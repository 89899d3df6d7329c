#include "trace/perfetto.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <numeric>
#include <string>
#include <system_error>
#include <vector>

namespace mkernel {
namespace {

// Perfetto takes a thread whose number is its process's for the main one, and drops process 0: a world has at most
// 2^16 ranks (plan/tiling.cc), so these never meet.
constexpr int kFirstProcess = 1;
constexpr int kFirstThread = 100'000;

std::string json_string(std::string_view text) {
  return nlohmann::json(text).dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

std::string track_name(int track) {
  return track >= kLinkTrack ? fmt::format("to node {}", track - kLinkTrack) : fmt::format("SM {}", track);
}

// Writes the list of events piece by piece: a timeline of millions of bars is never in memory as a whole.
class EventList {
 public:
  explicit EventList(std::ostream& out) : out_(out) {}

  void metadata(std::string_view what, int process, int thread, const std::string& arguments) {
    begin();
    fmt::format_to(std::back_inserter(line_), R"({{"ph":"M","name":"{}","pid":{},"tid":{},"args":{{{}}}}})", what,
                   process, thread, arguments);
    end();
  }

  void bar(const TraceEvent& event, int process, int thread) {
    begin();
    fmt::format_to(std::back_inserter(line_),
                   R"({{"ph":"X","name":{},"cat":"{}","pid":{},"tid":{},"ts":{:.3f},"dur":{:.3f}}})",
                   json_string(event.name), event.track >= kLinkTrack ? "network" : "task", process, thread,
                   event.begin_us, std::max(0.0, event.end_us - event.begin_us));
    end();
  }

 private:
  void begin() {
    line_.assign(first_ ? "\n" : ",\n");
    first_ = false;
  }
  void end() { out_.write(line_.data(), static_cast<std::streamsize>(line_.size())); }

  std::ostream& out_;
  std::string line_;
  bool first_ = true;
};

// Gives every event of one track a row of its own or one that is free by then. Events are sorted by begin.
class Rows {
 public:
  int place(const TraceEvent& event) {
    // Half a nanosecond: times that were added up in another order do not make two rows of one.
    const auto free =
        std::find_if(ends_.begin(), ends_.end(), [&](double end) { return end <= event.begin_us + 0.0005; });
    const auto row = static_cast<int>(free - ends_.begin());
    if (free == ends_.end()) {
      ends_.push_back(event.end_us);
    } else {
      *free = std::max(*free, event.end_us);
    }
    return row;
  }
  int count() const { return static_cast<int>(ends_.size()); }

 private:
  std::vector<double> ends_;
};

void write_process(EventList& list, int rank, const Topology& topo) {
  const int process = kFirstProcess + rank;
  const std::string name = rank < topo.world()
                               ? fmt::format("rank {} (node {} gpu {})", rank, topo.node_of(rank), topo.gpu_of(rank))
                               : fmt::format("rank {}", rank);
  list.metadata("process_name", process, 0, R"("name":)" + json_string(name));
  list.metadata("process_sort_index", process, 0, fmt::format(R"("sort_index":{})", rank));
}

void write_thread(EventList& list, int process, int thread, int track, int row) {
  const std::string name = row == 0 ? track_name(track) : fmt::format("{} ({})", track_name(track), row + 1);
  list.metadata("thread_name", process, thread, R"("name":)" + json_string(name));
  list.metadata("thread_sort_index", process, thread, fmt::format(R"("sort_index":{})", thread));
}

void write_events(std::ostream& out, std::span<const TraceEvent> events, const Topology& topo) {
  std::vector<std::size_t> order(events.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](std::size_t i, std::size_t j) {
    const TraceEvent& a = events[i];
    const TraceEvent& b = events[j];
    if (a.rank != b.rank) return a.rank < b.rank;
    return a.track != b.track ? a.track < b.track : a.begin_us < b.begin_us;
  });

  EventList list(out);
  for (int rank = 0; rank < topo.world(); ++rank) write_process(list, rank, topo);
  int next_thread = kFirstThread;
  for (std::size_t first = 0; first < order.size();) {
    const TraceEvent& head = events[order[first]];
    if (first > 0 && events[order[first - 1]].rank != head.rank) next_thread = kFirstThread;
    const int process = kFirstProcess + head.rank;
    Rows rows;
    std::size_t last = first;
    for (; last < order.size(); ++last) {
      const TraceEvent& event = events[order[last]];
      if (event.rank != head.rank || event.track != head.track) break;
      list.bar(event, process, next_thread + rows.place(event));
    }
    for (int row = 0; row < rows.count(); ++row) write_thread(list, process, next_thread + row, head.track, row);
    next_thread += rows.count();
    first = last;
  }
}

}  // namespace

Status write_trace(const std::filesystem::path& path, std::span<const TraceEvent> events, const Topology& topo,
                   std::string_view title) {
  std::filesystem::path temporary = path;
  temporary += fmt::format(".{}.tmp", getpid());
  const auto fail = [&](int error) {
    std::error_code ignored;
    std::filesystem::remove(temporary, ignored);
    return Error{ErrorKind::kIo,
                 fmt::format("the trace {} cannot be written: {}", path.string(), std::strerror(error))};
  };

  errno = 0;
  std::ofstream out(temporary, std::ios::binary | std::ios::trunc);
  if (!out) return fail(errno);
  out << R"({"displayTimeUnit":"ns","otherData":{"title":)" << json_string(title) << R"(},"traceEvents":[)";
  write_events(out, events, topo);
  out << "\n]}\n";
  out.close();
  if (!out) return fail(errno == 0 ? EIO : errno);
  std::error_code renamed;
  std::filesystem::rename(temporary, path, renamed);
  if (renamed) return fail(renamed.value());
  return Ok{};
}

}  // namespace mkernel
