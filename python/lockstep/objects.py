"""Collectives over objects of any type that pickle takes.

Pickles execute code: the ranks of one job trust each other, and so do these functions. If the ranks differ
in function, src, dst or length, every rank raises MismatchError, and the group stays usable.
"""

from __future__ import annotations

import os
import pickle
from typing import Any, Optional, Union

from . import _core
from ._core import Group
from .world import Timeout

_loads = pickle.loads


def _dumps(value: object) -> bytes:
    return pickle.dumps(value, pickle.HIGHEST_PROTOCOL)


def all_gather_object(value: Any, group: Optional[Group] = None, timeout: Timeout = None) -> list[Any]:
    """Every rank's object, by rank, on every rank."""
    return _core.all_gather_object(_dumps(value), _loads, group, timeout)


def gather_object(value: Any, dst: int = 0, group: Optional[Group] = None, timeout: Timeout = None) -> Optional[list[Any]]:
    """Every rank's object, by rank, on dst; None elsewhere."""
    return _core.gather_object(_dumps(value), _loads, dst, group, timeout)


def broadcast_object_list(values: list[Any], src: int = 0, group: Optional[Group] = None, timeout: Timeout = None) -> None:
    """values <- src's values, in place. The lists have the same length on all ranks."""
    pickled = _dumps(values) if _core.get_rank(group) == src else b""
    received = _core.broadcast_objects(pickled, len(values), _loads, src, group, timeout)
    if received is not None:
        values[:] = received


def collect_results(
    part: list[Any],
    size: int,
    tmpdir: Union[str, os.PathLike[str], None] = None,
    group: Optional[Group] = None,
    timeout: Timeout = None,
) -> Optional[list[Any]]:
    """The ranks' parts interleaved, on rank 0: item 0 of rank 0, of rank 1, ..., item 1 of rank 0, ...

    Parts may differ in length. The list is cut to size, which is the same on all ranks. None on other ranks.
    tmpdir: an existing directory that all ranks share; the items then pass through files in it, which are
    removed. If an item of another rank cannot be pickled, rank 0 raises PeerFailed with its text, and the
    group stays usable.
    """
    folder = None if tmpdir is None else os.fspath(tmpdir)
    return _core.collect_results(list(part), size, _dumps, _loads, folder, group, timeout)
