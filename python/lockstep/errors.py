"""The errors of lockstep. Each names the operation, the rank, the caller's file and line, and the cause."""

import builtins

__all__ = ["EngineError", "Error", "MismatchError", "PeerFailed", "PeerLost", "TimeoutError", "UsageError"]


class Error(RuntimeError):
    """Base of all errors. After any but UsageError the group is dead: later calls raise the same.

    A UsageError's call counts: if all ranks refused as many calls, the group stays usable; if not, the others
    and this rank's next call raise MismatchError. So do not catch it and call again on one rank alone.
    """

    text: str = ""  #: the message without the context in front
    operation: str = ""  #: "all_reduce", "init_dist", ...
    group: str = ""  #: "world", "world/0", ...; empty outside a group
    rank: int = -1  #: this rank in that group; -1 outside a group
    sequence: int = 0  #: number of the call in that group, from 1; 0: several calls
    filename: str = ""  #: the caller's file
    lineno: int = 0  #: the caller's line


class UsageError(Error):
    """A bug in the caller, detected before any data is transferred. The group stays usable if all ranks have it."""


class MismatchError(Error):
    """Ranks disagree on the operation, type, count, root or reduction; names who called what, where."""


class TimeoutError(Error, builtins.TimeoutError):
    """A peer did not arrive within the timeout; names it. Also the builtin of this name."""


class PeerLost(Error):
    """A peer died or left; names it."""


class PeerFailed(Error):
    """A peer left because of an exception, and this carries its text."""


class EngineError(Error):
    """A system call or an engine's own library (MPI) failed, or an engine is not available."""


class _UsageTypeError(UsageError, TypeError):
    """A UsageError about the type of an argument."""


class _UsageValueError(UsageError, ValueError):
    """A UsageError about the value of an argument."""


class _UsageAssertionError(UsageError, AssertionError):
    """A UsageError where mmengine.dist and sync_batchnorm assert."""
