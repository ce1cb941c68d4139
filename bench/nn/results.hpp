#pragma once

#include <fmt/format.h>

#include <cstdio>
#include <stdexcept>
#include <string>

namespace lockstep::bench {

/// What a program measured, for other programs: {"rows": [{"name": ..., "ratio": ...}]}.
class Results {
 public:
  /// `name`: without quotes or backslashes.
  void add(const std::string& name, double ratio) {
    rows_ += fmt::format("{}\n  {{\"name\": \"{}\", \"ratio\": {:.4g}}}", rows_.empty() ? "" : ",",
                         name, ratio);
  }

  void write(const std::string& path) const {
    std::FILE* const file = std::fopen(path.c_str(), "w");
    if (file == nullptr) throw std::runtime_error(path + ": cannot be opened for writing");
    fmt::print(file, "{{\"rows\": [{}\n]}}\n", rows_);
    if (std::fclose(file) != 0) throw std::runtime_error(path + ": cannot be written");
  }

 private:
  std::string rows_;
};

/// The path behind `--json`, taken out of the arguments; empty where there is none.
inline std::string take_json_path(int& argc, char** argv) {
  std::string path;
  int n_kept = 0;
  for (int i = 0; i < argc; ++i) {
    if (std::string(argv[i]) == "--json") {
      if (++i == argc) throw std::runtime_error("--json: expected the path of a file behind it");
      path = argv[i];
    } else {
      argv[n_kept++] = argv[i];
    }
  }
  argc = n_kept;
  return path;
}

}  // namespace lockstep::bench
