import array

import lockstep

lockstep.init_dist()
rank, n_ranks = lockstep.get_dist_info()

values = array.array("d", [rank + 1.0] * 3)  # or a numpy array, or a torch tensor
lockstep.all_reduce(values)

print(f"rank {rank} of {n_ranks}: the sum is {values[0]:g}")
