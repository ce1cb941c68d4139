"""Collectives over objects of any type that pickle takes.

Pickles execute code: the ranks of one job trust each other, and so do these functions. If the ranks differ
in function, src, dst or length, every rank raises MismatchError, and the group stays usable.
An object that cannot be pickled raises on its rank, the other ranks raise PeerFailed with its text in the same
call, and the group stays usable.
"""

from __future__ import annotations

import os
import pickle
from typing import Any

from . import _core
from ._core import Group
from ._operation import operation
from ._world import Timeout
from .errors import UsageError

_loads = pickle.loads


def _dumps(value: object) -> bytes:
    return pickle.dumps(value, pickle.HIGHEST_PROTOCOL)


@operation
def all_gather_object(data: Any, group: Group | None = None, timeout: Timeout = None) -> list[Any]:
    """Every rank's object, by rank, on every rank."""
    return _core.all_gather_object(data, _dumps, _loads, group, timeout)


@operation
def gather_object(data: Any, dst: int = 0, group: Group | None = None, timeout: Timeout = None) -> list[Any] | None:
    """Every rank's object, by rank, on dst; None elsewhere."""
    return _core.gather_object(data, _dumps, _loads, dst, group, timeout)


@operation
def broadcast_object_list(data: list[Any], src: int = 0, group: Group | None = None, timeout: Timeout = None) -> None:
    """data <- src's data, in place. The lists have the same length on all ranks."""
    received = _core.broadcast_objects(data, _dumps, _loads, src, group, timeout)
    if received is not None:
        data[:] = received


@operation
def collect_results(
    results: list[Any],
    size: int,
    device: str = "cpu",
    *,
    tmpdir: str | os.PathLike[str] | None = None,
    group: Group | None = None,
    timeout: Timeout = None,
) -> list[Any] | None:
    """The ranks' results interleaved, on rank 0: item 0 of rank 0, of rank 1, ..., item 1 of rank 0, ...

    Their lengths may differ. The list is cut to size, which is the same on all ranks. None on other ranks.
    device: for compatibility with mmengine; must be "cpu".
    tmpdir: an existing directory that all ranks share; the items then pass through files in it, which are
    removed. If an item of another rank cannot be pickled, rank 0 raises PeerFailed with its text, and the
    group stays usable.
    """

    def check() -> None:
        if device != "cpu":
            raise UsageError(f"collect_results: device is {device!r}; objects are sent from CPU memory: use 'cpu'")

    return _core.collect_results(results, size, _dumps, _loads, check, tmpdir, group, timeout)
