#pragma once

#include <fstream>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>

namespace lockstep::bench {

/// Machine-readable results of a program: {"rows": [{"name": ..., "ratio": ...}]}.
class Results {
 public:
  void add(const std::string& name, double ratio) {
    rows_.push_back({{"name", name}, {"ratio", ratio}});
  }

  void write(const std::string& path) const {
    nlohmann::json whole;
    whole["rows"] = rows_;
    std::ofstream file(path);
    file << whole.dump(1) << '\n';
    if (!file.flush()) throw std::runtime_error(path + ": cannot be written");
  }

 private:
  nlohmann::json rows_ = nlohmann::json::array();
};

/// The path after `--json`, removed from the arguments; empty if absent.
inline std::string take_json_path(int& argc, char** argv) {
  std::string path;
  int n_kept = 0;
  for (int i = 0; i < argc; ++i) {
    if (std::string(argv[i]) == "--json") {
      if (++i == argc) throw std::runtime_error("--json: expected the path of a file");
      path = argv[i];
    } else {
      argv[n_kept++] = argv[i];
    }
  }
  argc = n_kept;
  return path;
}

}  // namespace lockstep::bench
