// Runs a fuzz target over files and over all files in folders, without libFuzzer: the kept corpus as a plain test.
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size);

namespace {

namespace fs = std::filesystem;

// All regular files that the arguments name; false when an argument names neither a file nor a folder.
bool collect_inputs(int argc, char** argv, std::vector<fs::path>& inputs) {
  for (int i = 1; i < argc; ++i) {
    const fs::path path = argv[i];
    if (fs::is_regular_file(path)) {
      inputs.push_back(path);
    } else if (fs::is_directory(path)) {
      for (const fs::directory_entry& entry : fs::recursive_directory_iterator(path)) {
        if (entry.is_regular_file()) inputs.push_back(entry.path());
      }
    } else {
      std::fprintf(stderr, "%s is neither a file nor a folder\n", path.c_str());
      return false;
    }
  }
  return true;
}

bool replay(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  const std::string bytes((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  if (!file.good() && !file.eof()) {
    std::fprintf(stderr, "%s cannot be read\n", path.c_str());
    return false;
  }
  // A copy of the exact size lets AddressSanitizer see a read of one byte too many.
  const std::vector<std::uint8_t> data(bytes.begin(), bytes.end());
  LLVMFuzzerTestOneInput(data.data(), data.size());
  return true;
}

}  // namespace

int main(int argc, char** argv) {
  std::vector<fs::path> inputs;
  if (!collect_inputs(argc, argv, inputs)) return 2;
  if (inputs.empty()) {
    std::fprintf(stderr, "no inputs: name corpus files or folders that hold some\n");
    return 2;
  }
  for (const fs::path& path : inputs) {
    // Named before it runs, so that a crash tells which input it was.
    std::printf("%s\n", path.c_str());
    std::fflush(stdout);
    if (!replay(path)) return 1;
  }
  std::printf("%zu inputs replayed\n", inputs.size());
  return 0;
}
