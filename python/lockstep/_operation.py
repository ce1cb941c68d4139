"""The decorator of public functions that communicate and are written in Python."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from . import _core

F = TypeVar("F", bound=Callable[..., Any])


def operation(function: F) -> F:
    """Counts a call whose arguments do not match the function's parameters as a refused call."""
    parameters = inspect.signature(function).parameters
    place = list(parameters).index("group")
    if parameters["group"].kind is inspect.Parameter.KEYWORD_ONLY:
        place = len(parameters)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except TypeError as error:
            if error.__traceback__ is None or error.__traceback__.tb_next is not None:  # raised inside function
                raise
            text = str(error)
        _core.refuse_arguments(function.__name__, text, kwargs.get("group", args[place] if place < len(args) else None))

    return call  # type: ignore[return-value]
