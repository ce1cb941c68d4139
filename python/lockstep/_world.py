"""Joining and leaving the world; rank, size and backend."""

from __future__ import annotations

import atexit
import contextlib
import datetime
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import NamedTuple

from . import _core
from ._core import Group
from .errors import PeerFailed

Timeout = float | datetime.timedelta | None


class DistInfo(NamedTuple):
    """A rank, and the number of ranks of its group."""

    rank: int
    world_size: int


def init_dist(launcher: str = "infer", backend: str = "auto", timeout: Timeout = None) -> None:
    """Joins the world that a launcher started, or a world of one rank if there is no launcher. Collective.

    launcher: infer (from the environment), none, lockstep, pytorch, slurm or mpi.
    backend: auto, solo, shared, ucx, mpi or hierarchical.
    timeout: limit of one operation, by default LOCKSTEP_TIMEOUT, or else 5 minutes.
    If an uncaught exception ends this rank, the calls of the others raise PeerFailed with its text.
    """
    with _default_sigint_handling():
        _core.init_dist(launcher, backend, timeout)
    if joined := _core.joined():
        os.environ["LOCKSTEP_JOINED"] = joined  # for programs that get a copy of it
    leave_at_exit(_core.destroy_dist)


def destroy_dist(failure: str = "") -> None:
    """Leaves the world. Does nothing if not initialised. Peers that make further calls get PeerLost.

    failure: why this rank cannot go on; peers then get PeerFailed with it, also those that wait.
    """
    _core.destroy_dist(failure)
    os.environ.pop("LOCKSTEP_JOINED", None)


class LostRank(NamedTuple):
    """A rank that a world has lost."""

    rank: int  #: in its generation
    generation: int  #: the world in which it was a rank; 0: the first
    why: str  #: "was killed by signal 9 (SIGKILL)"


class Regrouped(NamedTuple):
    """What this rank is in the next generation of its world."""

    rank: int
    size: int
    generation: int
    lost: list[LostRank]  #: since the generation in which this rank was last
    joined: list[int]  #: ranks that are new


def regroup(timeout: Timeout = None) -> Regrouped:
    """Joins the next generation of a world that `lockstep run --elastic` keeps running. Collective over the living.

    With the ranks that are left, in their order, and the replacements that have started by then. Call it after
    PeerLost, PeerFailed or TimeoutError on any group; or on all ranks at the same place of the program, to let
    replacements in (has_waiting_replacements()). default_group() is the new world then, and every group of the former
    ones is dead: a call raises PeerLost. A process group of torch.distributed is destroyed before and made anew
    (lockstep.nn.run_elastic does it).
    timeout: by default the world's; counts from the first rank that calls it. One that has not come by then is
    killed, and lost. If fewer ranks are left than MIN of --elastic, it waits for replacements.
    UsageError if not elastic. EngineError if the launcher ends the job, because too few ranks are left.
    No other thread of the rank may be in a call or in backward.
    """
    with _default_sigint_handling():
        rank, size, generation, lost, joined = _core.regroup(timeout)
    return Regrouped(rank, size, generation, [LostRank(*each) for each in lost], joined)


def has_waiting_replacements() -> bool:
    """Whether a replacement waits for the ranks to call regroup(). The ranks may see different answers: reduce
    them (op "max") before acting on one. False if not elastic.
    """
    return _core.has_waiting_replacements()


def count_step() -> None:
    """The former name of step_done()."""
    _warn_of_former_name("count_step", "step_done")
    _core.step_done()


def replacements_wait() -> bool:
    """The former name of has_waiting_replacements()."""
    _warn_of_former_name("replacements_wait", "has_waiting_replacements")
    return has_waiting_replacements()


def _warn_of_former_name(former: str, present: str) -> None:
    warnings.warn(f"lockstep.{former} is called lockstep.{present}", DeprecationWarning, stacklevel=3)


class _Hooks:
    """Notifies the peers of an uncaught exception, and leaves the world before the interpreter exits."""

    def __init__(self) -> None:
        self.leavers: list[Callable[[str], None]] = []
        self.process = 0

    def install(self, leave: Callable[[str], None]) -> None:
        util = sys.modules.get("multiprocessing.util")
        if util is not None and self.process != os.getpid():  # its processes exit without running atexit
            self.process = os.getpid()
            util.Finalize(None, self.leave_at_exit, exitpriority=0)
        if not self.leavers:
            self.former = sys.excepthook
            sys.excepthook = self.on_exception
            atexit.register(self.leave_at_exit)
        if leave not in self.leavers:
            self.leavers.append(leave)

    def leave_at_exit(self) -> None:
        _core.keep_daemons_in_calls()
        self.leave("")

    def leave(self, failure: str) -> None:
        for each in reversed(self.leavers):
            each(failure)

    def on_exception(self, kind: type[BaseException], value: BaseException, traceback: TracebackType | None) -> None:
        try:
            text = str(value).encode("utf-8", "replace").decode()
        except Exception:
            text = ""
        try:
            self.leave(f"{kind.__name__}: {text}" if text else kind.__name__)
        finally:
            if isinstance(value, PeerFailed) and value.__context__ is None:
                # The rank that failed shows where; this line says which, and where this rank was.
                print(f"{kind.__module__}.{kind.__qualname__}: {text}", file=sys.stderr)
            else:
                self.former(kind, value, traceback)


_hooks = _Hooks()


def leave_at_exit(leave: Callable[[str], None]) -> None:
    """leave(failure) is called when the interpreter ends, with the text of the exception that ends it or ""."""
    _hooks.install(leave)


@contextlib.contextmanager
def _default_sigint_handling() -> Iterator[None]:
    """Ctrl-C while init_dist waits for the other ranks ends the process: there is no call to end yet."""
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def infer_launcher() -> str:
    """What started this process, from its environment: none, lockstep, pytorch, slurm or mpi."""
    return _core.infer_launcher()


def get_rank(group: Group | None = None) -> int:
    """This rank in the group; 0 if not distributed."""
    return _core.get_rank(group)


def get_world_size(group: Group | None = None) -> int:
    """The number of ranks in the group; 1 if not distributed."""
    return _core.get_world_size(group)


def get_dist_info(group: Group | None = None) -> DistInfo:
    """(rank, world_size)"""
    return DistInfo(_core.get_rank(group), _core.get_world_size(group))


def get_local_rank() -> int:
    """This rank among the world's ranks on this host."""
    return _core.local_group().rank


def get_local_size() -> int:
    """The number of the world's ranks on this host."""
    return _core.local_group().size


def get_backend(group: Group | None = None) -> str | None:
    """shared, mpi, ...; None if not distributed."""
    return _core.get_backend(group)


def is_main_process(group: Group | None = None) -> bool:
    """Whether this is rank 0 of the group."""
    return _core.get_rank(group) == 0
