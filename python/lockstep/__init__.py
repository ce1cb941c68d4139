"""Collectives over numpy arrays, tensors and objects, that move together or say who stopped.

    import numpy, lockstep
    lockstep.init_dist()                       # alone, without a launcher: rank 0 of 1
    x = numpy.full(3, lockstep.get_rank() + 1.0)
    lockstep.all_reduce(x)                     # the sum over all ranks, in place

`lockstep run -n 4 -- python program.py` starts four ranks on this machine; torchrun, srun and mpirun do too.
Functions that communicate take `group` (default: the world) and `timeout` (seconds or a
datetime.timedelta; default: the group's). Their errors are those of lockstep.errors.
"""

import importlib
from typing import TYPE_CHECKING

from . import errors
from ._collectives import all_gather, all_reduce_dict, gather
from ._control import master_only
from ._core import (
    Group,
    all_reduce,
    barrier,
    broadcast,
    default_group,
    is_distributed,
    is_elastic,
    local_group,
    main_process_first,
    step_done,
    sync_random_seed,
)
from ._core import __version__ as __version__
from ._objects import all_gather_object, broadcast_object_list, collect_results, gather_object
from ._tensors import all_reduce_params, cast_data_device, get_comm_device, get_data_device
from ._world import (
    DistInfo,
    LostRank,
    Regrouped,
    count_step,
    destroy_dist,
    get_backend,
    get_dist_info,
    get_local_rank,
    get_local_size,
    get_rank,
    get_world_size,
    has_waiting_replacements,
    infer_launcher,
    init_dist,
    is_main_process,
    regroup,
    replacements_wait,
)
from .errors import EngineError, Error, MismatchError, PeerFailed, PeerLost, UsageError
from .errors import TimeoutError as TimeoutError

__all__ = [
    "DistInfo",
    "EngineError",
    "Error",
    "Group",
    "LostRank",
    "MismatchError",
    "PeerFailed",
    "PeerLost",
    "Regrouped",
    "UsageError",
    "all_gather",
    "all_gather_object",
    "all_reduce",
    "all_reduce_dict",
    "all_reduce_params",
    "barrier",
    "broadcast",
    "broadcast_object_list",
    "cast_data_device",
    "collect_results",
    "count_step",
    "default_group",
    "destroy_dist",
    "errors",
    "gather",
    "gather_object",
    "get_backend",
    "get_comm_device",
    "get_data_device",
    "get_dist_info",
    "get_local_rank",
    "get_local_size",
    "get_rank",
    "get_world_size",
    "has_waiting_replacements",
    "infer_launcher",
    "init_dist",
    "is_distributed",
    "is_elastic",
    "is_main_process",
    "local_group",
    "main_process_first",
    "master_only",
    "regroup",
    "replacements_wait",
    "step_done",
    "sync_random_seed",
]


if TYPE_CHECKING:
    from . import mmengine as mmengine
    from . import nn as nn
    from . import sync_batchnorm as sync_batchnorm
    from . import torch as torch
else:

    def __getattr__(name):
        """The modules that import torch, at their first use."""
        if name in ("mmengine", "nn", "sync_batchnorm", "torch"):
            try:
                return importlib.import_module(f"lockstep.{name}")
            except ImportError as error:  # hasattr and getattr with a default take no other
                raise AttributeError(f"lockstep.{name}: {error}") from error
        if name in ("all_to_all", "recv", "reduce", "reduce_scatter", "scatter", "send"):
            raise AttributeError(f"lockstep has no {name} in Python: call that of torch.distributed, with backend 'lockstep'")
        raise AttributeError(f"module 'lockstep' has no attribute {name!r}")
