"""The backend "lockstep" of torch.distributed."""

from __future__ import annotations

from typing import Any

from . import _extension, world


def create(options: Any, pg_options: Any) -> Any:
    """A c10d backend for the process group that `options` describes. Collective."""
    extension = _extension.load()
    ranks = list(options.global_ranks_in_group)  # empty: all, in the default group
    backend = extension.make_backend(
        store=options.store,
        rank=options.group_rank,
        size=options.group_size,
        name=f"process group {options.group_id}" if ranks else "world",
        timeout=options.timeout,
        global_ranks=ranks,
        messages=_gloo(options) if options.group_size > 1 else None,
    )
    world.leave_at_exit(extension.leave_all)
    return backend


def _gloo(options: Any) -> Any:
    """Sends and receives; connects two ranks when they first do."""
    from torch.distributed import PrefixStore, ProcessGroupGloo

    gloo = ProcessGroupGloo._Options()
    gloo._devices = [ProcessGroupGloo.create_device(hostname="127.0.0.1", lazy_init=True)]
    gloo._timeout = options.timeout
    return ProcessGroupGloo(PrefixStore("lockstep_messages", options.store), options.group_rank, options.group_size, gloo)
