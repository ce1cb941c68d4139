"""The backend "lockstep" of torch.distributed."""

from __future__ import annotations

from typing import Any

from . import _extension, world


def create(options: Any, pg_options: Any) -> Any:
    """A c10d backend for the process group that `options` describes. Collective."""
    extension = _extension.load()
    ranks = list(options.global_ranks_in_group)  # empty: all, in the default group
    meeting = extension.meet(
        store=options.store,
        rank=options.group_rank,
        size=options.group_size,
        name=f"process group {options.group_id}" if ranks else "world",
        timeout=options.timeout,
    )
    is_alone, is_near = options.group_size == 1, meeting.is_on_one_host
    backend = extension.make_backend(
        meeting=meeting,
        global_ranks=ranks,
        messages=None if is_alone else _gloo(options, "lockstep_messages", is_near),
        between=None if is_near else _group_over(_gloo(options, "lockstep_between", is_near), options),
    )
    world.leave_at_exit(extension.leave_all)
    return backend


def _gloo(options: Any, prefix: str, is_near: bool) -> Any:
    from torch.distributed import PrefixStore, ProcessGroupGloo

    store, rank, size = PrefixStore(prefix, options.store), options.group_rank, options.group_size
    if not is_near:
        return ProcessGroupGloo(store, rank, size, timeout=options.timeout)
    # Connects two ranks when they first need it.
    gloo = ProcessGroupGloo._Options()
    gloo._devices = [ProcessGroupGloo.create_device(hostname="127.0.0.1", lazy_init=True)]
    gloo._timeout = options.timeout
    return ProcessGroupGloo(store, rank, size, gloo)


def _group_over(gloo: Any, options: Any) -> Any:
    import torch
    from torch.distributed import ProcessGroup

    group = ProcessGroup(options.store, options.group_rank, options.group_size)
    group._register_backend(torch.device("cpu"), ProcessGroup.BackendType.GLOO, gloo)
    group._set_default_backend(ProcessGroup.BackendType.GLOO)
    return group
