// One measured comparison, as it stands in bench/results/*.json.
#pragma once
#include <filesystem>
#include <nlohmann/json.hpp>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "bench/machine.h"
#include "mkernel/result.h"

namespace mkernel::bench {

// Where and from what a row comes.
struct Origin {
  Machine machine;
  std::string commit;   // "unknown" when nobody said
  std::string command;  // that repeats the measurement
  std::string date;     // UTC, "2026-12-01T13:00:00Z"
};

struct Row {
  std::string suite;
  std::string op;
  std::string topology;  // "2x4"
  std::string shape;     // "4096x4096x2048": m x n x k, global
  double ours = 0;
  double baseline = 0;
  std::string unit = "us";
  std::string baseline_name;
  double ratio = 0;  // above 1 we are better; of paired rounds, so not exactly baseline / ours
  std::optional<double> floor;
  double spread = 0;  // of the ratio: (largest - smallest) / median over the rounds
  nlohmann::ordered_json detail = nlohmann::ordered_json::object();
};

// "2x4" and "4096x4096x2048".
std::string topology_text(int nodes, int gpus);
std::string shape_text(std::int64_t m, std::int64_t n, std::int64_t k);

// In the order that readers of the files are used to; `detail` comes last. Times are rounded to nanoseconds.
nlohmann::ordered_json to_json(const Row& row, const Origin& origin);

// Adds rows to the array in a file, which is made when it is not there and replaced as a whole. Errors: kIo.
Status append_rows(const std::filesystem::path& file, std::span<const nlohmann::ordered_json> rows);

// The present moment as in Origin::date.
std::string utc_now();

}  // namespace mkernel::bench
