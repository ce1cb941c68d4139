#include "base/membarrier.hpp"

#include <linux/membarrier.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace lockstep::base {
namespace {

bool membarrier(int command) noexcept {
  return ::syscall(SYS_membarrier, command, /*flags=*/0, /*cpu=*/0) == 0;
}

}  // namespace

bool register_for_fences() noexcept { return membarrier(MEMBARRIER_CMD_REGISTER_GLOBAL_EXPEDITED); }

void fence_registered() noexcept { membarrier(MEMBARRIER_CMD_GLOBAL_EXPEDITED); }

}  // namespace lockstep::base
