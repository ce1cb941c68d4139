"""Makes torch.distributed know the backend "lockstep". torch itself imports this, at the end of `import torch`.

Apart from the package lockstep, which is imported when a process group is made.
"""

from __future__ import annotations

import functools
import inspect
import os
from typing import Any


def register() -> None:
    """The entry point of the group torch.backends. An exception here would break `import torch`."""
    try:
        import torch.distributed as dist

        if dist.is_available():
            dist.Backend.register_backend("lockstep", _create, extended_api=True, devices=["cpu"])
            _patch_init_process_group(dist)
    except Exception as error:  # a torch that has moved on
        import warnings

        warnings.warn(f"lockstep cannot register its backend with this torch: {error!r}", stacklevel=2)


def _create(options: Any, pg_options: Any) -> Any:
    from lockstep._backend import create

    return create(options, pg_options)


def _patch_init_process_group(dist: Any) -> None:
    """torch finds its ranks by the variables of torchrun; without them ours asks srun's and mpirun's, or is alone."""
    original = dist.init_process_group
    signature = inspect.signature(original)

    @functools.wraps(original)
    def init_process_group(*args: Any, **options: Any) -> None:
        given = signature.bind(*args, **options).arguments
        has_rendezvous = {"init_method", "store", "rank", "world_size"} & given.keys() or "RANK" in os.environ
        if "lockstep" in str(given.get("backend")) and not has_rendezvous:
            from lockstep._backend import rendezvous

            options.update(rendezvous())
        return original(*args, **options)

    dist.init_process_group = dist.distributed_c10d.init_process_group = init_process_group
