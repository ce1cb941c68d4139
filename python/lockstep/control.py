"""Control flow by rank."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Optional, TypeVar

from . import _core
from ._core import Group
from .world import Timeout

T = TypeVar("T")


def master_only(function: Callable[..., T]) -> Callable[..., Optional[T]]:
    """Decorator: the function runs on rank 0 of the world only, and returns None on other ranks. No rank waits."""

    @functools.wraps(function)
    def on_master(*args: object, **kwargs: object) -> Optional[T]:
        return function(*args, **kwargs) if _core.get_rank() == 0 else None

    return on_master


def main_process_first(function: Callable[[], T], group: Optional[Group] = None, timeout: Timeout = None) -> T:
    """Rank 0 runs function; then the other ranks run it, concurrently. Returns its result. Collective.

    For work that the others can reuse: a download, a cache. timeout: how long the others wait for rank 0,
    by default forever (they notice its death). If function raises on rank 0, the others raise PeerFailed
    with its text and do not run it; the group stays usable. Collectives inside raise UsageError.
    """
    return _core.run_first(function, group, timeout)
