#include "bench/row.h"

#include <fmt/format.h>

#include <chrono>
#include <cmath>
#include <ctime>
#include <fstream>
#include <sstream>

namespace mkernel::bench {
namespace {

// The nearest double to a decimal of few digits, so that files are short: 12.346, not 12.345678.
double digits(double value, int decimals) {
  const double scale = std::pow(10.0, decimals);
  return std::isfinite(value) ? std::round(value * scale) / scale : value;
}

}  // namespace

std::string topology_text(int nodes, int gpus) { return fmt::format("{}x{}", nodes, gpus); }

std::string shape_text(std::int64_t m, std::int64_t n, std::int64_t k) { return fmt::format("{}x{}x{}", m, n, k); }

nlohmann::ordered_json to_json(const Row& row, const Origin& origin) {
  nlohmann::ordered_json json = {{"suite", row.suite},
                                 {"op", row.op},
                                 {"topology", row.topology},
                                 {"shape", row.shape},
                                 {"ours", digits(row.ours, 3)},
                                 {"baseline", digits(row.baseline, 3)},
                                 {"unit", row.unit},
                                 {"baseline_name", row.baseline_name},
                                 {"ratio", digits(row.ratio, 4)},
                                 {"floor", nullptr},
                                 {"spread", digits(row.spread, 4)},
                                 {"gpu", origin.machine.gpu},
                                 {"driver", origin.machine.driver},
                                 {"cuda", origin.machine.cuda},
                                 {"commit", origin.commit},
                                 {"command", origin.command},
                                 {"date", origin.date},
                                 {"detail", row.detail}};
  if (row.floor) json["floor"] = digits(*row.floor, 3);
  return json;
}

Status append_rows(const std::filesystem::path& file, std::span<const nlohmann::ordered_json> rows) {
  nlohmann::ordered_json all = nlohmann::ordered_json::array();
  if (std::filesystem::exists(file)) {
    std::ifstream in(file);
    all = nlohmann::ordered_json::parse(in, nullptr, false);
    if (!all.is_array()) {
      return Error{ErrorKind::kIo, fmt::format("{} is there, but holds no JSON array of rows", file.string())};
    }
  }
  for (const nlohmann::ordered_json& row : rows) all.push_back(row);
  // One row per line: differences between two runs are then readable.
  std::ostringstream text;
  text << "[\n";
  for (std::size_t i = 0; i < all.size(); ++i) {
    text << all[i].dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace)
         << (i + 1 < all.size() ? ",\n" : "\n");
  }
  text << "]\n";
  const std::filesystem::path half = file.string() + ".part";
  std::ofstream out(half, std::ios::trunc);
  out << text.str();
  out.close();
  std::error_code error;
  if (out) std::filesystem::rename(half, file, error);
  if (!out || error) return Error{ErrorKind::kIo, fmt::format("{} cannot be written", file.string())};
  return Ok{};
}

std::string utc_now() {
  const std::time_t now = std::chrono::system_clock::to_time_t(std::chrono::system_clock::now());
  std::tm parts{};
  gmtime_r(&now, &parts);
  char text[32];
  const std::size_t length = std::strftime(text, sizeof(text), "%Y-%m-%dT%H:%M:%SZ", &parts);
  return std::string(text, length);
}

}  // namespace mkernel::bench
