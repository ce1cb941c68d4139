"""torchft over lockstep: the process group that a torchft Manager makes anew for each quorum."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed import ProcessGroup
from torchft.process_group import ProcessGroupWrapper

from . import _backend

__all__ = ["ProcessGroupLockstep"]


class ProcessGroupLockstep(ProcessGroupWrapper):
    """In place of ProcessGroupGloo: Manager(pg=ProcessGroupLockstep(timeout), ...).

    Each quorum has a group of its own. A replica that is lost ends the calls of the others with PeerLost, which the Manager
    reports; the group stays dead, and the next quorum has another. timeout: a timedelta, of a call and of a quorum's start.
    """

    def getBackendName(self) -> str:
        return "torchft-lockstep"

    def _create_pg(self, store: Any, rank: int, world_size: int) -> ProcessGroup:
        group = ProcessGroup(store, rank, world_size)
        backend = _backend.make(store, rank, world_size, self._timeout, "torchft quorum")
        group._set_default_backend(ProcessGroup.BackendType.CUSTOM)
        group._register_backend(torch.device("cpu"), ProcessGroup.BackendType.CUSTOM, backend)
        return group
