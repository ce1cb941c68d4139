// The mean of the samples of three workers that have different numbers of samples.

#include <cstdio>
#include <lockstep/sync_master.hpp>
#include <numeric>
#include <thread>
#include <vector>

struct Share {
  double sum;
  int count;
};

// Runs on the master's thread when all messages have arrived; the master's message is the first.
std::vector<lockstep::ReplyTo<double>> mean_of_all(std::span<lockstep::MessageFrom<Share>> shares) {
  Share total{0, 0};
  for (const auto& [id, share] : shares) {
    total.sum += share.sum;
    total.count += share.count;
  }
  std::vector<lockstep::ReplyTo<double>> replies;
  for (const auto& [id, share] : shares) replies.push_back({id, total.sum / total.count});
  return replies;
}

Share share_of(const std::vector<double>& samples) {
  return {std::accumulate(samples.begin(), samples.end(), 0.0), static_cast<int>(samples.size())};
}

int main() {
  lockstep::SyncMaster<Share, double> master(mean_of_all);
  // Register all slaves before the first of them runs. A pipe belongs to the thread that uses it.
  auto work = [](lockstep::SlavePipe<Share, double> pipe, const std::vector<double>& samples) {
    const double mean = pipe.run_slave(share_of(samples));
    std::printf("worker %d: the mean of all samples is %g\n", pipe.id(), mean);
  };
  auto first = master.register_slave(1);
  auto second = master.register_slave(2);
  std::jthread worker_1(work, std::move(first), std::vector<double>{1, 2, 3});
  std::jthread worker_2(work, std::move(second), std::vector<double>{10});
  const double mean = master.run_master(share_of({4, 5}));
  std::printf("master: the mean of all samples is %g\n", mean);
  return mean == 25.0 / 6 ? 0 : 1;
}
