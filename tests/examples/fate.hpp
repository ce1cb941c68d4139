#pragma once

#include <fcntl.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <unistd.h>

#include <fmt/format.h>
#include <torch/types.h>
#include <algorithm>
#include <atomic>
#include <bit>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <lockstep/lockstep.hpp>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

/// How the programs that train under `lockstep run --elastic` end some of their processes.
namespace fate {

/// Which of the launcher's places this process has.
inline int place() { return std::getenv("RANK") != nullptr ? std::atoi(std::getenv("RANK")) : 0; }
inline bool is_replacement() {
  const char* const segment = std::getenv("LOCKSTEP_SEGMENT");
  return segment != nullptr && std::string(segment).ends_with(":next");
}

/// What the processes of the job share about their ends: a file.
struct Ends {
  std::atomic<int> n_done, n_training, step;
};

/// Ends this process at a random time of every n_steps steps, as one of those that train.
class Fate {
 public:
  /// seed: the times are drawn from it and the process's number; 0: unlike in every run.
  Fate(const std::string& file, int n_kills, int n_steps, unsigned seed = 0)
      : n_kills_(n_kills), n_steps_(n_steps) {
    random_.seed(seed == 0 ? std::random_device()() : seed ^ static_cast<unsigned>(::getpid()));
    fd_ = ::open(file.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (fd_ < 0 || ::ftruncate(fd_, 4096) != 0) throw std::runtime_error("cannot open " + file);
    ends_ = static_cast<Ends*>(::mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd_, 0));
    std::thread([this] { run(); }).detach();
  }
  /// At the begin of each step.
  void train(int step) {
    if (throws_) throw std::runtime_error("a rank that cannot go on");
    if (!is_training_.exchange(true)) ++ends_->n_training;
    int before = ends_->step;
    while (before < step && !ends_->step.compare_exchange_weak(before, step)) continue;
    // Until the end that is due has taken place.
    if (n_due() > ends_->n_done) std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  int n_done() const { return ends_->n_done; }

 private:
  int n_due() const { return std::min(ends_->step / n_steps_, n_kills_); }

  void run() {
    while (true) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1 + random_() % 60));
      ::flock(fd_, LOCK_EX);
      // Two others go on.
      if (n_due() > ends_->n_done && (ends_->n_training >= 3 || !is_training_)) {
        ++ends_->n_done;
        if (is_training_) --ends_->n_training;
        end_as(random_() % 4);
      }
      ::flock(fd_, LOCK_UN);
    }
  }

  void end_as(unsigned how) {
    if (how == 0) std::_Exit(3);
    if (how == 1 && is_training_) {
      throws_ = true;
      ::flock(fd_, LOCK_UN);
      while (true) ::pause();
    }
    ::kill(::getpid(), SIGKILL);
  }

  const int n_kills_, n_steps_;
  std::mt19937 random_;
  int fd_ = -1;
  Ends* ends_ = nullptr;
  std::atomic<bool> is_training_{false}, throws_{false};
};

/// The values of some tensors.
inline std::vector<double> values_of(const std::vector<torch::Tensor>& tensors) {
  std::vector<double> values;
  for (const torch::Tensor& tensor : tensors) {
    const auto flat = tensor.detach().to(torch::kDouble).contiguous().view(-1);
    values.insert(values.end(), flat.data_ptr<double>(), flat.data_ptr<double>() + flat.numel());
  }
  return values;
}

/// Every rank says what its values are, and rank 0 writes them to a file.
inline void report(const std::vector<double>& values, std::int64_t n_steps,
                   const std::string& file) {
  std::uint64_t bits = 0;
  for (const double value : values) {
    bits = bits * 0x9e3779b97f4a7c15ULL + std::bit_cast<std::uint64_t>(value);
  }
  fmt::print("rank {} of {}: {} steps, parameters {:016x}\n", lockstep::get_rank(),
             lockstep::get_world_size(), n_steps, bits);
  std::fflush(stdout);
  if (!lockstep::is_main_process()) return;
  std::ofstream(file, std::ios::binary)
      .write(reinterpret_cast<const char*>(values.data()),
             static_cast<std::streamsize>(values.size() * sizeof(double)));
}

}  // namespace fate
