#include <cstdio>
#include <lockstep/lockstep.hpp>

int main() {
  lockstep::init_dist();
  const int n = lockstep::all_reduce_value(1);
  if (lockstep::is_main_process()) std::printf("%d ranks\n", n);
  return n == lockstep::get_world_size() ? 0 : 1;
}
