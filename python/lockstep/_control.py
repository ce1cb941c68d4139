"""Control flow by rank; main_process_first is a function of _core."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TypeVar

from . import _core

T = TypeVar("T")


def master_only(function: Callable[..., T]) -> Callable[..., T | None]:
    """Decorator: the function runs on rank 0 of the world only, and returns None on other ranks. No rank waits."""

    @functools.wraps(function)
    def on_master(*args: object, **kwargs: object) -> T | None:
        return function(*args, **kwargs) if _core.get_rank() == 0 else None

    return on_master
