"""Training that goes on after lost ranks: what lockstep.nn exports of it."""

from __future__ import annotations

import array
import copy
import gc
import hashlib
import io
import os
import random
import sys
from collections.abc import Callable, Iterator, Sequence, Sized
from datetime import timedelta
from typing import Any, NamedTuple

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Sampler

from . import _backend, _core, _objects, _world
from .errors import EngineError, Error, PeerFailed, PeerLost, TimeoutError, UsageError


class _ReplacementsWait(BaseException):
    """Leaves run_elastic's function after a complete step. Not an Exception, so that its handlers let it pass."""


class ElasticState:
    """What a training is made of, and how many steps of it are complete: what run_elastic keeps over a loss.

    parts: what training changes and a later step reads, in an order that is the same on all ranks: modules, optimizers,
    learning rate schedulers, anything else with state_dict and load_state_dict, and dicts or lists of your own
    numbers, which are changed in place. Not a DistributedDataParallel, which run_elastic's function makes anew.
    snapshot: keep a copy of all parts at each completed step, not only of the buffers of modules (running statistics)
    and of what is neither a module nor an optimizer. Needed where a step changes parameters before its last
    collective operation: several optimizers, as in a GAN. Costs a copy of the parts at each step.
    seed: seed the generators of torch, of random and of numpy from (seed, step, rank) before each step. Then two runs
    whose worlds have the same sizes at the same steps compute the same, bit for bit. None: each rank keeps its
    generators, which are set back where a step is repeated.
    """

    def __init__(self, parts: Sequence[Any], *, snapshot: bool = False, seed: int | None = None) -> None:
        if not isinstance(parts, (list, tuple)):
            raise UsageError(f"ElasticState: parts is a {type(parts).__name__}; give a list, such as [model, optimizer]")
        for place, part in enumerate(parts):
            if isinstance(part, DistributedDataParallel):
                raise UsageError(
                    f"ElasticState: part {place} is a DistributedDataParallel, which belongs to one world; give its "
                    "module, and make the DistributedDataParallel in the function of run_elastic"
                )
            if isinstance(part, (dict, list)):
                if (other := _not_data(part)) is not None:
                    raise UsageError(
                        f"ElasticState: part {place}, a {type(part).__name__}, holds a {type(other).__name__}, which would be "
                        "replaced by a copy; give modules and optimizers as parts of their own, parameters in a ParameterList"
                    )
            elif not (hasattr(part, "state_dict") and hasattr(part, "load_state_dict")):
                raise UsageError(
                    f"ElasticState: part {place} is a {type(part).__name__}; expected a module, an optimizer, another "
                    "object with state_dict and load_state_dict, or a dict or a list, which can be changed in place"
                )
            if isinstance(part, torch.nn.Module) and any(map(torch.nn.parameter.is_lazy, part.parameters())):
                raise UsageError(f"ElasticState: part {place}, a {type(part).__name__}, has lazy parameters; run it once before")
        self._parts = list(parts)
        self._snapshot = snapshot
        self._seed = seed
        self._step = 0
        self._has_state = False  # it has had the state of all ranks
        self._is_running = False  # in run_elastic
        self._is_elastic = False  # and a step may have to be repeated
        self._n_runs = 0  # calls of run_elastic in this process, with this one
        self._n_attempts = 0  # calls of its function
        self._n_optimizer_steps = 0  # since the last completed step
        self._in_optimizer: list[tuple[torch.Tensor, int]] = []  # parameters of one that steps, and their versions before
        # What a repetition of the present step begins with, beside parameters and optimizers.
        self._buffers: dict[tuple[int, str], torch.Tensor] = {}  # by the place of the module, and name
        self._groups: list[dict[str, Any]] = []  # of the optimizers, without parameters: learning rates
        kept_otherwise = () if snapshot else (torch.nn.Module, torch.optim.Optimizer)
        self._others = [part for part in self._parts if not isinstance(part, kept_otherwise)]
        self._values_of_others: list[Any] = []
        self._generators: dict[str, Any] = {}
        for optimizer in self._parts:
            if isinstance(optimizer, torch.optim.Optimizer):
                optimizer.register_step_pre_hook(self._begin_optimizer_step)
                optimizer.register_step_post_hook(self._end_optimizer_step)

    @property
    def step(self) -> int:
        """How many steps are complete: the number of the present one."""
        return self._step

    def set_step(self, step: int) -> None:
        """For a training that resumes from a file: the parts are now those of this step.

        Before run_elastic; or in its function, on all ranks, right after loading.
        """
        if step < 0:
            raise UsageError(f"set_step: {step} is negative")
        self._step = step
        if self._is_running:
            self._keep()
            self._begin_step()

    def step_done(self) -> None:
        """Ends a step, right after optimizer.step(): a rank has completed the step when it calls this.

        Lets replacements in, if any wait: then it does not return, but leaves run_elastic's function by an exception
        (no Exception, a BaseException) that run_elastic catches, so that what follows in the loop is left out.
        Collective over the world; where no launcher keeps it running, this only counts.
        """
        if not self._is_running:
            raise UsageError("step_done: is for the function of run_elastic")
        self._step += 1
        self._keep()
        if self._is_elastic:
            waits = array.array("i", [_core.replacements_wait()])
            _core.all_reduce(waits, "max")
            _core.count_step()
            if waits[0]:
                raise _ReplacementsWait
        self._begin_step()

    def scale(self, own: int) -> float:
        """The factor for the loss of a rank that computes the mean over its `own` samples: own * ranks / samples of all.

        With it, the gradients that DistributedDataParallel averages are those of the mean over all samples, also if
        ranks have different numbers of them. Collective over the world. UsageError if no rank has a sample.
        """
        count = array.array("q", [own])
        _core.all_reduce(count)
        if count[0] == 0:
            raise UsageError("scale: no rank has a sample in this step")
        return own * _core.get_world_size() / count[0]

    def _begin_optimizer_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        # It may raise after it has changed some, as LBFGS in a later call of its closure.
        self._in_optimizer = [(p, p._version) for group in optimizer.param_groups for p in group["params"]]

    def _end_optimizer_step(self, *_: Any) -> None:
        self._in_optimizer = []
        self._n_optimizer_steps += 1

    def _has_changed_parameters(self) -> bool:
        return self._n_optimizer_steps > 0 or any(p._version != version for p, version in self._in_optimizer)

    def _param_groups(self) -> Iterator[dict[str, Any]]:
        for part in self._parts:
            if isinstance(part, torch.optim.Optimizer):
                yield from part.param_groups

    def _parameters(self) -> Iterator[torch.Tensor]:
        for part in self._parts:
            if isinstance(part, torch.nn.Module):
                yield from part.parameters()
            elif isinstance(part, torch.optim.Optimizer):
                for group in part.param_groups:
                    yield from group["params"]

    @torch.no_grad()
    def _keep(self) -> None:
        """The present step begins with what is now."""
        if not self._is_elastic:
            return
        self._n_optimizer_steps = 0
        self._in_optimizer = []
        if not self._snapshot:
            kept = self._buffers
            self._buffers = {}
            for place, part in enumerate(self._parts):
                for name, buffer in part.named_buffers() if isinstance(part, torch.nn.Module) else ():
                    value = kept.get((place, name))
                    if value is not None and value.shape == buffer.shape and value.dtype == buffer.dtype:
                        value.copy_(buffer)
                    else:
                        value = buffer.clone()
                    self._buffers[place, name] = value
            self._groups = [
                {name: copy.deepcopy(value) for name, value in group.items() if name != "params"} for group in self._param_groups()
            ]
        self._values_of_others = [copy.deepcopy(_values_of(part)) for part in self._others]
        self._generators = {"torch": torch.get_rng_state(), "random": random.getstate()}
        if "numpy" in sys.modules:
            self._generators["numpy"] = sys.modules["numpy"].random.get_state()
        for device in {parameter.device for parameter in self._parameters() if parameter.is_cuda}:
            self._generators[str(device)] = torch.cuda.get_rng_state(device)

    @torch.no_grad()
    def _set_back(self) -> None:
        """Undoes the part of the present step that was computed."""
        for (place, name), value in self._buffers.items():
            owner, _, leaf = name.rpartition(".")
            module = self._parts[place].get_submodule(owner)
            buffer = module._buffers.get(leaf)  # the program may have assigned another tensor
            if buffer is not None and buffer.shape == value.shape and buffer.dtype == value.dtype:
                buffer.copy_(value)
            else:
                module._buffers[leaf] = value.clone()
        for group, own in zip(self._param_groups(), self._groups, strict=False):  # the step may have added some
            group.update(copy.deepcopy(own))
        for part, values in zip(self._others, self._values_of_others, strict=True):
            _load(part, values)
        for name, state in self._generators.items():
            if name == "torch":
                torch.set_rng_state(state)
            elif name == "random":
                random.setstate(state)
            elif name == "numpy":
                sys.modules["numpy"].random.set_state(state)
            else:
                torch.cuda.set_rng_state(state, name)

    def _begin_step(self) -> None:
        """Before the ranks compute the present step."""
        if self._seed is None:
            return
        # Neighbouring steps and ranks get seeds that have nothing in common.
        text = f"{self._seed} {self._step} {_core.get_rank()}"
        seed = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
        torch.manual_seed(seed >> 1)
        random.seed(seed)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(seed & 0xFFFFFFFF)

    def _synchronise(self) -> None:
        """Collective: gives all ranks the state of those with the newest complete step."""
        for parameter in self._parameters():
            parameter.grad = None
        self._n_attempts += 1
        mine = _Rank(
            completed=self._step if self._has_state else -1,
            step=self._step,
            has_changed=self._has_state and not self._snapshot and self._has_changed_parameters(),
            is_replacement=os.environ.get("LOCKSTEP_SEGMENT", "").endswith(":next"),
            n_runs=self._n_runs,
        )
        everyone = [_Rank(*each) for each in _objects.all_gather_object(tuple(mine))]
        newest = max(each.completed for each in everyone)
        if self._is_elastic:
            mine.check(everyone, newest)
        has_newest = self._has_state and mine.completed == newest
        if has_newest:
            self._set_back()
        if newest < 0 or any(each.completed != newest for each in everyone):
            source = [each.completed for each in everyone].index(newest)
            self._share(source, step=everyone[source].step, is_mine=has_newest)
        self._has_state = True
        self._keep()
        self._begin_step()

    def _share(self, source: int, step: int, is_mine: bool) -> None:
        """The state of source, after so many steps, to the ranks that do not have it."""
        rank = _core.get_rank()
        packed = [b""]
        if rank == source:
            file = io.BytesIO()
            torch.save([_values_of(part) for part in self._parts], file)
            packed = [file.getvalue()]
        _objects.broadcast_object_list(packed, source)
        failure = ""
        if rank != source and not is_mine:
            try:
                values = torch.load(io.BytesIO(packed[0]), map_location="cpu", weights_only=False)
                for part, own in zip(self._parts, values, strict=True):
                    _load(part, own)
                # Also if source is lost before all others have loaded it.
                self._step = step
                self._has_state = True
                self._keep()
            except Exception as error:
                failure = f"{type(error).__name__}: {error}"
        for each, text in enumerate(_objects.all_gather_object(failure)):
            if text:
                raise UsageError(f"run_elastic: rank {each} cannot take the state of rank {source}: {text}")


class _Rank(NamedTuple):
    """What a rank tells the others before they share a state."""

    completed: int  # steps of its state; -1: it has not had that of all ranks
    step: int
    has_changed: bool
    is_replacement: bool
    n_runs: int

    def check(self, everyone: list[_Rank], newest: int) -> None:
        if newest < 0 and all(each.is_replacement for each in everyone):
            raise EngineError("run_elastic: all ranks that had the state are lost; restart from a checkpoint")
        for rank, each in enumerate(everyone):
            if each.n_runs != self.n_runs:
                raise UsageError(
                    f"run_elastic: this rank is in its call #{self.n_runs} of run_elastic, and rank {rank} in call #{each.n_runs}: a "
                    "replacement begins the program anew, so a program makes one call"
                )
            if each.completed == newest and each.has_changed:
                raise UsageError(
                    f"run_elastic: rank {rank} cannot repeat step {newest}, which was not complete: an optimizer has "
                    "changed parameters already. Call step_done() right after optimizer.step(), before any other "
                    "operation of the ranks, or give ElasticState snapshot=True"
                )


def _not_data(value: Any) -> Any:
    """What a dict or list must not hold, because loading puts a copy in its place; None: nothing."""
    if isinstance(value, dict):
        return next((found for each in value.values() if (found := _not_data(each)) is not None), None)
    if isinstance(value, (list, tuple)):
        return next((found for each in value if (found := _not_data(each)) is not None), None)
    is_parameter = isinstance(value, torch.Tensor) and value.requires_grad
    return value if is_parameter or hasattr(value, "load_state_dict") else None


def _values_of(part: Any) -> Any:
    if isinstance(part, torch.nn.Module):
        state = part.state_dict()
        return state, {name: buffer for name, buffer in part.named_buffers() if name not in state}
    return part.state_dict() if hasattr(part, "state_dict") else part


@torch.no_grad()
def _load(part: Any, values: Any) -> None:
    if isinstance(part, torch.nn.Module):
        part.load_state_dict(values[0])
        for name, value in values[1].items():  # those that are not persistent
            part.get_buffer(name).copy_(value)
    elif isinstance(part, torch.optim.Optimizer):
        part.load_state_dict(values)
        # torch converts them to the parameter's type.
        places = [place for group in values["param_groups"] for place in group["params"]]
        parameters = [parameter for group in part.param_groups for parameter in group["params"]]
        for place, parameter in zip(places, parameters, strict=True):
            for name, value in values["state"].get(place, {}).items():
                if isinstance(value, torch.Tensor) and part.state[parameter][name].dtype != value.dtype:
                    part.state[parameter][name] = value.to(parameter.device, copy=True)
    elif hasattr(part, "load_state_dict"):
        part.load_state_dict(values)
        # Of a GradScaler: that gradients were unscaled in this step.
        getattr(part, "_per_optimizer_states", {}).clear()
    elif isinstance(part, dict):
        part.clear()
        part.update(values)
    else:
        part[:] = values


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


def run_elastic(state: ElasticState, train: Callable[[], Any], *, timeout: _world.Timeout = None) -> None:
    """Calls train, and calls it again whenever a rank is lost or a replacement joins, until it returns on all ranks.

        state = lockstep.nn.ElasticState([model, optimizer])
        sampler = lockstep.nn.ElasticBatchSampler(data, 64, state)

        def train():
            ddp = torch.nn.parallel.DistributedDataParallel(model)
            with lockstep.nn.SyncBatchNormScope():
                while sampler.epoch < 10:
                    for images, labels in DataLoader(data, batch_sampler=sampler):
                        loss = cross_entropy(ddp(images), labels) * state.scale(len(labels))
                        optimizer.zero_grad()
                        loss.backward()
                        optimizer.step()
                        state.step_done()

        lockstep.nn.run_elastic(state, train)

    Under `lockstep run --elastic MIN[:MAX]`. It joins the world, and makes torch.distributed's default group, over the
    backend "lockstep", anew for each call of train. Before each call all ranks have the same state: that of the ranks
    with the newest completed step goes to the others, in memory; gradients are None. A step that was not complete
    is repeated. Groups, DistributedDataParallel and scopes must be made inside train: those of an earlier call belong
    to a world that is over. Layers of convert_sync_batchnorm without a process_group may be made before.

    A loss is a PeerLost, PeerFailed or TimeoutError that leaves train. Any other exception leaves run_elastic; for
    the others this rank is then lost, when its process ends. UsageError on every rank if a step that is not complete
    has changed parameters, by an optimizer of state, and there is no snapshot; EngineError if the launcher ends the
    job, because too few ranks are left, or if all ranks that had the state are lost; the error itself if three attempts in a
    row end by one without a step, and without a rank that was lost or joined. Where nobody keeps the world running
    (another launcher, `lockstep run` without --elastic), this is an ordinary training of which a loss is the end. The
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
    global _n_runs
    _n_runs += 1
    state._n_runs = _n_runs
    state._is_running = True
    state._is_elastic = _core.is_elastic()
    excepthook = sys.excepthook
    try:
        n_without_cause = 0
        while True:
            step = state.step
            failure = _attempt(state, train)
            if failure is None:
                return
            gc.collect()  # a DistributedDataParallel that is still there would act on the gradients of the next one
            _leave_torch(str(failure), excepthook)
            regrouped = _world.regroup()
            has_cause = not failure or regrouped.lost or regrouped.joined or state.step != step
            n_without_cause = 0 if has_cause else n_without_cause + 1
            if n_without_cause == _ATTEMPTS_WITHOUT_CAUSE:
                raise failure
    finally:
        # The program may change the parts before another run_elastic.
        state._is_running = state._has_state = False


_n_runs = 0
# In a row that an error ended without a step, and without a rank that was lost or joined: such as a group of an earlier
# world raises at once in each.
_ATTEMPTS_WITHOUT_CAUSE = 3


def _attempt(state: ElasticState, train: Callable[[], Any]) -> Any:
    """None if train has returned on all ranks, else why not: an error, or "" where a replacement waits."""
    try:
        _join_torch()
        state._synchronise()
        train()
        _core.barrier()
    except _ReplacementsWait:
        return ""
    except (PeerLost, PeerFailed, TimeoutError) as error:
        if not state._is_elastic:
            raise
        return error.with_traceback(None)  # its frames hold what the function has made
    return None


class ElasticBatchSampler(Sampler[list[int]]):
    """The batches of a DataLoader(data, batch_sampler=...): which samples this rank takes, by the completed steps of state.

    A function of the step and of the ranks alone, so that any number of ranks computes the same steps: step k of an epoch
    consists of the positions k * global_batch to (k + 1) * global_batch - 1 of the epoch's order, which is that
    of torch's DistributedSampler; rank r of n takes every n-th of them, from the r-th on. Iterating begins
    with state's present step and ends with the epoch: begin a new iteration in each call of run_elastic's function.

    data: what has a length. global_batch: samples of a step, on all ranks together. shuffle: a new order in every epoch,
    from seed, the same on all ranks. drop_last: leave out the last step of an epoch if it has fewer samples.
    """

    def __init__(
        self, data: Sized, global_batch: int, state: ElasticState, *, shuffle: bool = True, seed: int = 0, drop_last: bool = False
    ) -> None:
        n_samples = len(data)
        steps = 0 if global_batch < 1 else n_samples // global_batch if drop_last else -(-n_samples // global_batch)
        if steps == 0:
            raise UsageError(
                f"ElasticBatchSampler: {n_samples} samples in batches of {global_batch}{', without the last' if drop_last else ''} "
                "make no step; global_batch is the number of samples of a step on all ranks together"
            )
        self.steps_per_epoch = steps
        self._n_samples = n_samples
        self._global_batch = global_batch
        self._state = state
        self._shuffle = shuffle
        self._seed = seed
        self._order: tuple[int, list[int]] = (-1, [])  # of an epoch

    @property
    def epoch(self) -> int:
        """Of the present step."""
        return self._state.step // self.steps_per_epoch

    def batch(self, step: int) -> list[int]:
        """The samples of this rank in a step, counted over all epochs. Empty where there are fewer samples than ranks."""
        epoch, step = divmod(step, self.steps_per_epoch)
        if self._order[0] != epoch:
            order = list(range(self._n_samples))
            if self._shuffle:
                generator = torch.Generator()
                generator.manual_seed(self._seed + epoch)
                order = torch.randperm(self._n_samples, generator=generator).tolist()
            self._order = (epoch, order)
        first = step * self._global_batch
        return self._order[1][first : first + self._global_batch][_core.get_rank() :: _core.get_world_size()]

    def __iter__(self) -> Iterator[list[int]]:
        n_last = self._n_samples - (self.steps_per_epoch - 1) * self._global_batch
        n_fewest = min(n_last, self._global_batch)
        if n_fewest < _core.get_world_size():
            raise UsageError(
                f"ElasticBatchSampler: a step of {n_fewest} samples leaves some of {_core.get_world_size()} ranks without; "
                "a DataLoader cannot make an empty batch. Give drop_last=True or another global_batch, or take the "
                "samples of each step from batch()"
            )
        return self._batches(self._state.step, (self.epoch + 1) * self.steps_per_epoch, self._state._n_attempts)

    def _batches(self, first: int, end: int, n_attempts: int) -> Iterator[list[int]]:
        if self._state._is_running:
            self._state._begin_step()  # a DataLoader has drawn a number for its workers
        for step in range(first, end):
            if self._state._n_attempts != n_attempts:
                raise UsageError("ElasticBatchSampler: begin a new iteration in each call of run_elastic's function")
            yield self.batch(step)

    def __len__(self) -> int:
        """Steps that are left in the epoch."""
        return (self.epoch + 1) * self.steps_per_epoch - self._state.step
