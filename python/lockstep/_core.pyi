import datetime
import os
from collections.abc import Callable
from typing import Any, NoReturn, Protocol, TypeVar

from typing_extensions import Buffer

_T = TypeVar("_T")
_Timeout = float | datetime.timedelta | None

__version__: str
_binary_interface: str

class _Tensor(Protocol):
    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any: ...

_Data = Buffer | _Tensor

class Group:
    """A group of communicating ranks; default_group() is the world.

    One call at a time per group: a second thread needs a duplicate().
    """

    @property
    def rank(self) -> int:
        """This rank, from 0."""
    @property
    def size(self) -> int:
        """The number of ranks."""
    @property
    def name(self) -> str:
        """world, world/0.1, ...: for errors."""
    @property
    def backend(self) -> str:
        """shared, mpi, ..."""
    @property
    def timeout(self) -> float:
        """Limit of one operation in seconds, if the call gives none."""
    def split(self, color: int, key: int = -1) -> Group:
        """A new group of the ranks that gave the same color (0 or more), ordered by key, then by rank. Collective."""
    def duplicate(self) -> Group:
        """The same ranks over a separate channel, for a second thread. Collective."""
    def abandon(self, reason: str) -> None:
        """This rank cannot go on: calls of all ranks raise PeerFailed with this reason."""

def init_dist(launcher: str, backend: str, timeout: _Timeout) -> None: ...
def destroy_dist(failure: str) -> None: ...
def joined() -> str:
    """LOCKSTEP_JOINED; empty if it is not set."""

def keep_daemons_in_calls() -> None: ...
def regroup(timeout: _Timeout) -> tuple[int, int, int, list[tuple[int, int, str]], list[int]]: ...
def step_done() -> None:
    """Tells the launcher that this rank has completed a step: call it after each.

    If three generations in a row end by a lost rank or an error before a step was completed, the job ends; and the delay
    before a replacement, doubled each time, begins anew. Does nothing if not elastic.
    """

def finish_elastic() -> None:
    """Tells the launcher that this rank has done its part, which all ranks have completed: for run_elastic, after
    its last barrier. The launcher no longer waits for this rank when others are lost. Does nothing if not elastic.
    """

def has_earlier_steps() -> bool:
    """Whether an earlier generation of the world has completed a step: where no rank has its result, it is lost."""

def replace_file(path: str, data: bytes) -> None:
    """Replaces a file atomically, and waits for the disk; on several elastic hosts not one that a later generation has written."""

def read_file(path: str) -> bytes:
    """What replace_file has written."""

def is_beside_elastic() -> bool:
    """Whether `lockstep run --elastic` has started this rank, and its world is over another backend, which the
    launcher does not keep running.
    """

def is_elastic() -> bool:
    """Whether `lockstep run --elastic` has started this rank, and it has joined the world: then regroup() goes on after a lost rank."""

def has_waiting_replacements() -> bool:
    """Whether a replacement waits for the ranks to call regroup(). The ranks may see different answers: reduce
    them (op "max") before acting on one. False if not elastic.
    """

def infer_launcher() -> str: ...
def is_distributed() -> bool:
    """Whether this process is a rank: between init_dist and destroy_dist, if a launcher started it."""

def default_group() -> Group:
    """The world; a group of one rank if not distributed."""

def local_group() -> Group:
    """The world's ranks on this host."""

def get_backend(group: Group | None = None) -> str | None: ...
def get_rank(group: Group | None = None) -> int: ...
def get_world_size(group: Group | None = None) -> int: ...
def refuse_arguments(operation: str, text: str, group: Any) -> NoReturn: ...
def main_process_first(function: Callable[[], _T], group: Group | None = None, timeout: _Timeout = None) -> _T:
    """Rank 0 runs function; then the other ranks run it, concurrently. Returns its result. Collective.

    For work that the others can reuse: a download, a cache. timeout: how long the others wait for rank 0,
    by default forever (they notice its death). If function raises on rank 0, the others raise PeerFailed
    with its text and do not run it; the group stays usable. Collectives inside raise UsageError.
    """

def barrier(group: Group | None = None, timeout: _Timeout = None) -> None:
    """Returns when every rank has called it."""

def all_reduce(data: _Data, op: str = "sum", group: Group | None = None, timeout: _Timeout = None) -> None:
    """data <- reduction of every rank's data, in place, with the same bits on all ranks.

    op: sum, product, min, max, band, bor, bxor or mean; mean of integers truncates toward zero.
    The same count, type and op on all ranks.
    """

def broadcast(data: _Data, src: int = 0, group: Group | None = None, timeout: _Timeout = None) -> None:
    """data <- src's data, in place."""

def sync_random_seed(group: Group | None = None, timeout: _Timeout = None) -> int:
    """A random seed of 31 bits, rank 0's, the same on all ranks. No generator is changed."""

def all_gather(
    data: _Data, shape: tuple[int, ...], make_flat: Callable[[int], Any], group: Group | None, timeout: _Timeout
) -> tuple[Any, list[tuple[int, ...]]]: ...
def gather(
    data: _Data, shape: tuple[int, ...], dst: int, make_flat: Callable[[int], Any], group: Group | None, timeout: _Timeout
) -> tuple[Any, list[tuple[int, ...]]] | None: ...

class Operation:
    def __init__(self, name: str, group: Group | None) -> None: ...
    def __enter__(self) -> Operation: ...
    def __exit__(self, type: Any, exception: Any, traceback: Any) -> None: ...

def all_gather_object(
    data: Any, dumps: Callable[[Any], bytes], loads: Callable[[Any], Any], group: Group | None, timeout: _Timeout
) -> list[Any]: ...
def gather_object(
    data: Any, dumps: Callable[[Any], bytes], loads: Callable[[Any], Any], dst: int, group: Group | None, timeout: _Timeout
) -> list[Any] | None: ...
def broadcast_objects(
    data: Any, dumps: Callable[[Any], bytes], loads: Callable[[Any], Any], src: int, group: Group | None, timeout: _Timeout
) -> list[Any] | None: ...
def collect_results(
    results: list[Any],
    size: int,
    dumps: Callable[[Any], bytes],
    loads: Callable[[Any], Any],
    check: Callable[[], None],
    tmpdir: str | os.PathLike[str] | None,
    group: Group | None,
    timeout: _Timeout,
) -> list[Any] | None: ...
def all_reduce_dict(
    data: dict[str, Any], convert_numbers: Callable[[Any], dict[str, Any]], op: str, group: Group | None, timeout: _Timeout
) -> dict[str, Any]: ...
