// failures kill|throw|mismatch|late: what the other ranks get if rank 1 does that.
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <exception>
#include <stdexcept>
#include <string_view>
#include <vector>

#include <lockstep/lockstep.hpp>

void work(std::string_view mistake) {
  std::vector<float> values(1000, 1);
  lockstep::all_reduce(values);
  if (lockstep::get_rank() == 1) {
    if (mistake == "kill") std::raise(SIGKILL);  // as the kernel does if memory runs out
    if (mistake == "throw") throw std::runtime_error("image 17 is damaged");
    if (mistake == "mismatch") lockstep::barrier();
    while (mistake == "late") pause();
  }
  lockstep::all_reduce(values);
}

// [main]
int main(int argc, char** argv) {
  try {
    lockstep::init_dist();
    work(argc > 1 ? argv[1] : "");
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    lockstep::destroy_dist(error.what());  // the other ranks get this text
    return 1;
  }
}
// [main]
