/* A rank that adds up, over two groups and a shared buffer, until it is killed or a peer is. */
#include <lockstep/lockstep.h>
#include <stdio.h>

int main(void) {
  lockstep_group* world = NULL;
  lockstep_group* second = NULL;
  lockstep_buffer* buffer = NULL;
  if (lockstep_init(NULL, NULL, 60000, LOCKSTEP_HERE) != LOCKSTEP_OK ||
      lockstep_world(&world, LOCKSTEP_HERE) != LOCKSTEP_OK ||
      lockstep_group_duplicate(world, &second, LOCKSTEP_HERE) != LOCKSTEP_OK ||
      lockstep_buffer_allocate(world, 1 << 20, &buffer, LOCKSTEP_HERE) != LOCKSTEP_OK) {
    return 2;
  }
  printf("joined\n");
  fflush(stdout);
  for (;;) {
    int value = 1;
    if (lockstep_all_reduce(second, &value, 1, LOCKSTEP_I32, LOCKSTEP_SUM, LOCKSTEP_GROUP_TIMEOUT,
                            LOCKSTEP_HERE) != LOCKSTEP_OK ||
        lockstep_all_reduce(world, lockstep_buffer_data(buffer), 1 << 18, LOCKSTEP_I32,
                            LOCKSTEP_MAX, LOCKSTEP_GROUP_TIMEOUT, LOCKSTEP_HERE) != LOCKSTEP_OK) {
      return lockstep_error_status() == LOCKSTEP_PEER_LOST ? 1 : 3;
    }
  }
}
