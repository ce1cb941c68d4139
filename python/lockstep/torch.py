"""torch.distributed under every launcher: `import lockstep.torch` registers the backend "lockstep".

`import torch` does so too, unless TORCH_DEVICE_BACKEND_AUTOLOAD=0.
"""

import os
import socket

from lockstep_dist import NOT_INSTALLED

from . import _backend, _objects, _world

__all__ = ["set_environment"]

try:
    from lockstep_torch import register
except ImportError:
    raise ImportError(NOT_INSTALLED) from None
register()


def set_environment() -> None:
    """Sets the variables that torchrun sets, for init_process_group and frameworks, under srun, mpirun and alone.

    RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT, from lockstep's world, which this joins if
    the program has not. Does nothing if RANK is set, as by torchrun and `lockstep run`. Collective.
    """
    if "RANK" in os.environ:
        return
    host = _backend.join_world()
    rank, size = _world.get_dist_info()
    address = [("", 0)]
    if rank == 0:
        with socket.socket() as free:
            free.bind(("", 0))
            address = [(host, free.getsockname()[1])]
    _objects.broadcast_object_list(address)
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(size),
        LOCAL_RANK=str(_world.get_local_rank()),
        LOCAL_WORLD_SIZE=str(_world.get_local_size()),
        MASTER_ADDR=address[0][0],
        MASTER_PORT=str(address[0][1]),
    )
