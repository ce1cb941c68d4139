#pragma once

#include <chrono>
#include <cstdint>
#include <lockstep/group.hpp>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "cli/bench/meter.hpp"

namespace lockstep::bench {

std::string_view name_of(Operation operation);
std::string_view name_of(Mode mode);

struct Plan {
  int n_ranks = 2;
  std::vector<Operation> operations;
  std::vector<std::uint64_t> sizes;  ///< bytes, counted as in nccl-tests
  DType type = DType::f32;
  Mode mode = Mode::warm;
  bool in_shared_memory = false;
  int n_blocks = 5;  ///< of each size
  std::chrono::milliseconds block_time{25};
  std::vector<int> cores;  ///< rank r runs on cores[r % size]; empty: anywhere
};

/// One size: medians over its blocks.
struct Row {
  Operation operation;
  std::uint64_t n_bytes;
  bool of_threads;
  double p50_us;
  double p99_us;
  double algorithm_gb_s;
  double bus_gb_s;  ///< as defined by nccl-tests: of the bytes on the wire
};

/// Measures every size of every operation, from the times of all ranks. Collective, with the same
/// result on every rank.
std::vector<Row> measure(const Group& group, const Plan& plan, bool of_threads);

/// Measures the best thresholds of the shared engine for these ranks on this machine: joins and
/// leaves the world with one setting after the other. Collective, about a minute. Returns a value
/// of LOCKSTEP_TUNE, with its name.
std::string tuned(const Plan& plan);

std::string table_of(const Plan& plan, const std::vector<Row>& rows);
nlohmann::json json_of(const Plan& plan, const std::vector<Row>& rows);

}  // namespace lockstep::bench
