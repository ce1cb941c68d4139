"""Training that goes on after lost ranks: what lockstep.nn exports of it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple

import torch

from . import _backend, _core, _objects, _world
from ._elastic_state import ElasticState, Regroup, read_file
from .errors import EngineError, Error, PeerFailed, PeerLost, TimeoutError, UsageError


def _join_torch() -> None:
    """Makes torch.distributed's default group of lockstep's world. Collective; fails on all ranks or on none."""
    failure = None
    try:
        limit = timedelta(seconds=_core.default_group().timeout)
        torch.distributed.init_process_group("lockstep", init_method="lockstep://", timeout=limit)
    except (PeerLost, PeerFailed, TimeoutError, UsageError):
        raise
    except (Error, RuntimeError) as error:  # such as of the store, which is in rank 0
        failure = f"{type(error).__name__}: {error}"
    # PeerLost if that was because a rank has ended.
    for rank, text in enumerate(_objects.all_gather_object(failure)):
        if text is not None:
            raise EngineError(f"run_elastic: rank {rank} cannot join torch.distributed's default group: {text}")


def _leave_torch(failure: str, excepthook: Any) -> None:
    if torch.distributed.is_initialized():
        if failure:
            # Ends calls under way first, which destroying waits for.
            _backend.leave_all(failure)
        torch.distributed.destroy_process_group()
    sys.excepthook = excepthook  # each init_process_group puts one around the former


class _Rank(NamedTuple):
    """What a rank tells the others before they share a state."""

    completed: tuple[int, int]  # steps, and ends of epochs, of its state; (-1, -1): it has not had that of all ranks
    has_changed: bool  # parameters, in a step that is not complete
    is_replacement: bool
    has_file: bool
    n_runs: int
    generators: dict[str, bytes]  # digests, by name

    def check(self, everyone: list[_Rank], newest: tuple[int, int]) -> None:
        has_state = newest >= (0, 0)
        is_lost = all(each.is_replacement for each in everyone) and _core.has_earlier_steps()
        if not has_state and is_lost and not everyone[0].has_file:
            raise EngineError("run_elastic: all ranks that had the state are lost; restart from a checkpoint")
        first = next(each for each in everyone if each.completed == newest)
        for rank, each in enumerate(everyone):
            if each.n_runs != first.n_runs and (self.n_runs != first.n_runs or not has_state):
                raise UsageError(
                    f"run_elastic: this rank is in its call #{self.n_runs} of run_elastic, and rank {everyone.index(first)} in call "
                    f"#{first.n_runs}, rank {rank} in call #{each.n_runs}: a replacement begins the program anew, so a program makes "
                    "one call"
                )
            if each.n_runs != first.n_runs:
                raise Regroup  # without that rank, which raises
            if each.completed == newest and each.has_changed:
                what = f"step {newest[0]}" + (f", or the end of epoch {newest[1]}" if newest[1] > 0 else "")
                raise UsageError(
                    f"run_elastic: rank {rank} cannot repeat {what}, which was not complete: parameters of the "
                    "state have changed already. Call step_done() right after optimizer.step(), before any other "
                    "operation of the ranks, or give ElasticState snapshot=True"
                )


def _synchronise(state: ElasticState) -> None:
    """Collective: gives all ranks the state of those with the newest complete step; where none has one, that of the file."""
    state._begin_attempt()
    mine = _Rank(
        completed=state._number if state._has_state else (-1, -1),
        has_changed=state._has_state and not state._snapshot and state._watch.has_changed_parameters(),
        is_replacement=os.environ.get("LOCKSTEP_SEGMENT", "").endswith(":next"),
        has_file=state._save is not None and os.path.exists(state._save),
        n_runs=_n_runs,
        generators=state._digests(),
    )
    everyone = [_Rank(*each) for each in _objects.all_gather_object(tuple(mine))]
    newest = max(each.completed for each in everyone)
    if state._is_elastic:
        mine.check(everyone, newest)
    # A replacement takes the generators that drew the same numbers on all ranks until now, and has its own of the others.
    givers = [each.generators for each in everyone if each.completed == newest]
    state._common = {name for name, digest in givers[0].items() if all(each.get(name) == digest for each in givers)}
    has_newest = state._has_state and mine.completed == newest
    if has_newest:
        state._set_back()
    if not state._has_state or any(each.completed != newest for each in everyone):
        source = next(rank for rank, each in enumerate(everyone) if each.completed == newest)
        is_from_file = newest < (0, 0) and everyone[0].has_file
        _share(state, source, state._save if is_from_file else None, takes=not has_newest, has_state=newest >= (0, 0))
    state._has_state = True
    state._keep()
    if newest < (0, 0) and state._save is not None:
        state._agree(state._write())  # a path that cannot be written to is known now
    state._begin_step()


def _share(state: ElasticState, source: int, path: str | None, takes: bool, has_state: bool) -> None:
    """The state of source, or of the file at path that it reads, to the ranks that take it. has_state: the others have it."""
    failure, packed = "", [b""]
    if _core.get_rank() == source:
        try:
            if path is None:
                state._keep()
            packed = [state._packed() if path is None else read_file(path)]
        except Exception as error:  # a part may hold what pickle refuses
            failure = f"{type(error).__name__}: {error}"
    _objects.broadcast_object_list(packed, source)
    if packed[0] and takes and (path is not None or _core.get_rank() != source):
        try:
            state._unpack(packed[0], is_file=path is not None)
        except Exception as error:
            failure = f"{type(error).__name__}: {error}"
    failed = [(rank, text) for rank, text in enumerate(_objects.all_gather_object(failure)) if text]
    if not failed:
        return
    rank, text = (_core.get_rank(), failure) if failure else failed[0]
    if packed[0]:
        is_own, why = bool(failure), f"rank {rank} cannot take the state of {path or f'rank {source}'}: {text}"
    else:
        rank, text = failed[0]
        is_own, why = takes, f"rank {rank} cannot {'give its state' if path is None else f'read {path}'}: {text}"
    if has_state and not is_own:
        raise Regroup  # without the ranks that raise
    raise UsageError(f"run_elastic: {why}")


def run_elastic(state: ElasticState, train: Callable[[], Any], *, timeout: _world.Timeout = None) -> None:
    """Calls train, and calls it again whenever a rank is lost or a replacement joins, until it returns on all ranks.

        state = lockstep.nn.ElasticState([model, optimizer])
        sampler = lockstep.nn.ElasticBatchSampler(data, 64, state)

        def train():
            ddp = torch.nn.parallel.DistributedDataParallel(model)
            with lockstep.nn.SyncBatchNormScope():
                for epoch in state.epochs(sampler, 10):
                    for images, labels in DataLoader(data, batch_sampler=sampler):
                        loss = cross_entropy(ddp(images), labels) * state.scale(len(labels))
                        optimizer.zero_grad()
                        loss.backward()
                        optimizer.step()
                        state.step_done()
                    validate()  # once for each epoch

        lockstep.nn.run_elastic(state, train)

    Under `lockstep run --elastic MIN[:MAX]`. It joins the world, and makes torch.distributed's default group, over the
    backend "lockstep", anew for each call of train. Before each call all ranks have the same state: that of the ranks
    with the newest completed step, or end of an epoch, goes to the others, in memory; gradients are zero, or None where they
    were at that step, and before the first call. A step that was not complete is repeated. Groups,
    DistributedDataParallel and scopes must be made inside train: those of an earlier call belong
    to a world that is over. Layers of convert_sync_batchnorm without a process_group may be made before; modules,
    optimizers and schedulers must be. get_rank() is 0 on every rank before. When it has returned, no rank is
    protected any more: the end of one is no matter for the others.

    A lost rank is a PeerLost, PeerFailed or TimeoutError that leaves train. Any other exception leaves run_elastic; for
    the others this rank is then lost, when its process ends. UsageError on every rank if a step that is not complete
    has changed parameters, by an optimizer, and there is no snapshot; EngineError if the launcher ends the
    job, because too few ranks are left, or if all ranks that had the state are lost, and no file has it; the error itself if
    three attempts in a row end by one without a step, and without a rank that was lost or joined. A replacement whose parts do
    not fit the state raises UsageError and ends; the others go on. Where nobody keeps the world running
    (another launcher, `lockstep run` without --elastic), this is an ordinary training which a lost rank ends. The
    process stays in the world and in the default group. A program calls it once: a replacement begins with the first
    call, which is a UsageError beside a second one.
    timeout: of the world's operations, as for init_dist.
    """
    if torch.distributed.is_initialized():
        raise UsageError(
            "run_elastic: torch.distributed has a default group; run_elastic makes it itself, so do without "
            "init_process_group, or call destroy_process_group() before"
        )
    if _core.is_elastic() or not _core.is_distributed():
        _world.init_dist(timeout=timeout)
    if _core.is_beside_elastic():
        raise UsageError(
            "run_elastic: `lockstep run --elastic` keeps a world of the shared engine running, and this one is over "
            f"{_world.get_backend()}: leave the backend out of init_dist, or --elastic"
        )
    global _n_runs
    _n_runs += 1
    state._is_running = True
    state._is_elastic = _core.is_elastic()
    state._watch.begin()
    excepthook = sys.excepthook
    try:
        n_without_cause = 0
        while True:
            number = state._number
            failure = _attempt(state, train)
            if failure is None:
                return
            state._watch.release_ddps()
            _leave_torch(str(failure), excepthook)
            regrouped = _world.regroup()
            has_cause = not failure or regrouped.lost or regrouped.joined or state._number != number
            n_without_cause = 0 if has_cause else n_without_cause + 1
            if n_without_cause == _ATTEMPTS_WITHOUT_CAUSE:
                raise failure
    finally:
        # The program may change the parts before another run_elastic.
        state._is_running = state._has_state = False
        state._watch.end()


_n_runs = 0
# In a row that an error ended without a step, and without a rank that was lost or joined: such as a group of an earlier
# world raises at once in each.
_ATTEMPTS_WITHOUT_CAUSE = 3


def _attempt(state: ElasticState, train: Callable[[], Any]) -> Any:
    """None if train has returned on all ranks, else why not: an error, or "" where the ranks regroup by themselves."""
    try:
        _join_torch()
        _synchronise(state)
        train()
        state._finish()
        _core.finish_elastic()
    except Regroup:
        return ""
    except (PeerLost, PeerFailed, TimeoutError) as error:
        if not state._is_elastic:
            raise
        return error.with_traceback(None)  # its frames hold what the function has made
    return None
