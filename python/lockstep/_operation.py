"""What the public functions that communicate have in common, if their first lines are Python's."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from . import _core

F = TypeVar("F", bound=Callable[..., Any])


def operation(function: F) -> F:
    """A call whose arguments do not fit the parameters of function counts as a refused call."""
    parameters = inspect.signature(function).parameters
    place = list(parameters).index("group")
    if parameters["group"].kind is inspect.Parameter.KEYWORD_ONLY:
        place = len(parameters)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except TypeError as error:
            if error.__traceback__ is None or error.__traceback__.tb_next is not None:  # of a line of function
                raise
            text = str(error)
        _core.refuse_arguments(function.__name__, text, kwargs.get("group", args[place] if place < len(args) else None))

    return call  # type: ignore[return-value]
