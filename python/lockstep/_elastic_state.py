"""What run_elastic keeps when a rank is lost."""

from __future__ import annotations

import array
import contextlib
import ctypes
import hashlib
import io
import itertools
import os
import random
import sys
from _random import Random as _Random
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.nn.parallel import DistributedDataParallel

from . import _core, _elastic_parts
from ._elastic_watch import Watch
from .errors import EngineError, UsageError

if TYPE_CHECKING:
    from ._elastic_sampler import ElasticBatchSampler


class Regroup(BaseException):
    """Leaves run_elastic's function, and goes on in the next generation. Not an Exception, so that its handlers let it pass."""


class ElasticState:
    """What a training is made of, and how many steps of it are complete: what run_elastic keeps when a rank is lost.

    parts: what training changes and a later step reads, in an order that is the same on all ranks: modules, optimizers,
    learning rate schedulers, anything else with state_dict and load_state_dict, and dicts or lists of your own
    numbers, which are changed in place. Not a DistributedDataParallel, which run_elastic's function makes anew.
    snapshot: keep a copy of all parts at each completed step, also of parameters and of the state of optimizers.
    Needed where a step changes parameters before its last collective operation: several optimizers, as in a GAN.
    seed: seed the generators of torch, of random and of numpy from (seed, step, rank) before each step. Then two runs
    whose worlds have the same sizes at the same steps compute the same, bit for bit, if no workers of a DataLoader draw
    numbers. None: each rank keeps its generators, which are set back where a step is repeated.
    by_hand: parameters of the modules, or modules, that the program changes itself, without an optimizer. A parameter
    that is neither in an optimizer of parts nor here must get no gradient.
    save: a file to which rank 0 writes the state, atomically, when run_elastic begins, every save_every steps (0: at each
    end of an epoch of epochs()), and when the training is complete. Where no rank has a state, run_elastic begins with that of the file,
    if there is one: the same command resumes.
    """

    def __init__(
        self,
        parts: Sequence[Any],
        *,
        snapshot: bool = False,
        seed: int | None = None,
        by_hand: Sequence[torch.Tensor | torch.nn.Module] = (),
        save: str | os.PathLike[str] | None = None,
        save_every: int = 0,
    ) -> None:
        _check_parts(parts)
        if save_every < 0 or (save_every and save is None):
            raise UsageError(f"ElasticState: save_every={save_every}; it is a number of steps, 1 or more, and needs save")
        self._parts = [_elastic_parts.kept_part(part, snapshot) for part in parts]
        tensors = (each.parameters() if isinstance(each, torch.nn.Module) else [each] for each in by_hand)
        self._watch = Watch(self._parts, set(itertools.chain.from_iterable(tensors)))
        self._snapshot = snapshot
        self._seed = seed
        self._save = None if save is None else os.fspath(save)
        self._save_every = save_every
        self._step = 0
        self._epoch_ends: int | None = 0  # None: epochs() will know
        self._epoch_steps = 0  # of the samplers that were used; 0: none was; -1: they differ
        self._is_resumed = False  # and none has been used since
        self._has_state = False  # it has had the state of all ranks
        self._is_running = False  # in run_elastic
        self._is_elastic = False  # and a step may have to be repeated
        self._n_attempts = 0  # calls of its function
        self._n_micro = 0  # batches of the present step that are done
        self._generators: dict[str, Any] = {}  # as a repetition begins
        self._common: set[str] = set()  # generators that have drawn the same numbers on all ranks
        # Of the samplers of this state.
        self._accumulating: ElasticBatchSampler | None = None  # that with micro_batches
        self._in_epochs: ElasticBatchSampler | None = None
        self._iterations: dict[int, Any] = {}  # the newest of each

    @property
    def step(self) -> int:
        """How many steps are complete: the number of the present one."""
        return self._step

    @property
    def epoch_ends(self) -> int:
        """How many epochs of epochs() are complete, with what stands at their ends."""
        return self._epoch_ends or 0

    @property
    def _number(self) -> tuple[int, int]:
        """The newest state has the largest."""
        return self._step, self.epoch_ends

    def set_step(self, step: int, epoch_ends: int | None = None) -> None:
        """For a training that resumes from a file of its own: the parts are now those of this step.

        epoch_ends: how many epochs are complete; None: epochs() takes all that the steps fill.
        Before run_elastic; or in its function, on all ranks, right after loading.
        """
        if step < 0 or (epoch_ends is not None and epoch_ends < 0):
            raise UsageError(f"set_step: {step if step < 0 else epoch_ends} is negative")
        self._step, self._epoch_ends = step, epoch_ends
        self._epoch_steps = 0
        self._iterations.clear()
        if self._is_running:
            self._keep()
            self._begin_step()

    def step_done(self) -> None:
        """Ends a step, right after optimizer.step(): a rank has completed the step when it calls this.

        One step is one optimizer step: for gradient accumulation give ElasticBatchSampler micro_batches. Lets
        replacements in, if any wait: then it does not return, but leaves run_elastic's function by an exception
        (no Exception, a BaseException) that run_elastic catches, so that what follows in the loop is left out: what is
        done at an epoch's end belongs behind the loop over batches of epochs(). Collective over the world; where no launcher
        keeps it running, this only counts. UsageError if an optimizer or a hand that is not of the state changes its
        parameters, if gradients are left over that no optimizer has used, or if the number of micro batches is wrong.
        """
        if not self._is_running:
            raise UsageError("step_done: is for the function of run_elastic")
        if self._accumulating is not None and self._n_micro != self._accumulating.micro_batches:
            raise UsageError(
                f"step_done: {self._n_micro} of the {self._accumulating.micro_batches} micro batches of step {self._step} are done; "
                "compute each in `with state.micro_batch(ddp) as last:`, and call step_done() after the last"
            )
        self._watch.check_optimizers("step_done")
        self._watch.check_gradients()
        self._step += 1
        self._complete(self._save_every > 0 and self._step % self._save_every == 0)

    def epochs(self, sampler: ElasticBatchSampler, n_epochs: int) -> Iterator[int]:
        """The epochs that are left of n_epochs, in run_elastic's function.

            for epoch in state.epochs(sampler, 10):
                for images, labels in DataLoader(data, batch_sampler=sampler):
                    ...
                    state.step_done()
                validate()  # the end of the epoch

        What stands behind the loop over batches is done once in each epoch, or again if a rank was lost during it: as a step is
        repeated. An epoch of which only the end is left comes with no batches. UsageError if the loop over batches is left
        before the steps of its epoch are complete.
        """
        if not self._is_running:
            raise UsageError("epochs: is for the function of run_elastic")
        n_steps, n_attempts = sampler.steps_per_epoch, self._n_attempts
        self._use(sampler)
        if self._epoch_ends is None:
            self._epoch_ends = self._step // n_steps
        try:
            while (epoch := self.epoch_ends) < n_epochs:
                if not epoch * n_steps <= self._step <= (epoch + 1) * n_steps:
                    raise UsageError(
                        f"epochs: {self._step} steps and {epoch} ends of epochs of {n_steps} steps do not fit; take every step in it"
                    )
                self._in_epochs = sampler
                yield epoch
                if self._n_attempts != n_attempts:
                    raise UsageError("epochs: begin it in each call of run_elastic's function")
                n_done = self._step - epoch * n_steps
                if n_done != n_steps:
                    raise UsageError(
                        f"epochs: the loop over batches of epoch {epoch} was left after {n_done} of its {n_steps} steps; call step_done() "
                        "for each batch, and end no epoch by break"
                    )
                self._watch.check_optimizers("epochs")
                self._epoch_ends = epoch + 1
                self._iterations.clear()
                self._complete(self._save_every == 0)
        finally:
            if self._n_attempts == n_attempts:
                self._in_epochs = None

    @contextlib.contextmanager
    def micro_batch(self, *modules: DistributedDataParallel) -> Iterator[bool]:
        """Around forward and backward of one of the batches of a step, of an ElasticBatchSampler with micro_batches.

            with state.micro_batch(ddp) as last:
                (cross_entropy(ddp(images), labels) * state.scale(len(labels))).backward()
            if last:
                optimizer.step()
                optimizer.zero_grad()
                state.step_done()

        The gradients are summed over the ranks in the last one: the others are under no_sync() of the modules.
        """
        if self._accumulating is None:
            raise UsageError("micro_batch: no ElasticBatchSampler of this state has micro_batches")
        n = self._accumulating.micro_batches
        if self._n_micro == n:
            raise UsageError(f"micro_batch: the {n} of step {self._step} are done; call step_done() after the last")
        last = self._n_micro == n - 1
        with contextlib.ExitStack() as stack:
            if not last:
                for module in modules:
                    stack.enter_context(module.no_sync())
            yield last
        self._n_micro += 1

    def scale(self, own: int, of: int | None = None) -> float:
        """The factor for the loss of a rank that computes the mean over its `own` samples: own * ranks / samples of all.

        With it, the gradients that DistributedDataParallel averages are those of the mean over all samples of the step, also
        if ranks have different numbers of them.
        of: the samples of all ranks. By default those of the step, of an ElasticBatchSampler with micro_batches; without
        one, their sum: then the call is collective over the world. UsageError if no rank has a sample.
        """
        if of is None and self._accumulating is not None:
            of = self._accumulating.n_samples(self._step)
        if of is None:
            count = array.array("q", [own])
            _core.all_reduce(count)
            of = count[0]
        if of == 0:
            raise UsageError("scale: no rank has a sample in this step")
        return own * _core.get_world_size() / of

    # --- what completes a step, or the end of an epoch

    def _complete(self, is_saved: bool) -> None:
        is_saved = is_saved and self._save is not None
        if self._is_elastic or is_saved:
            self._keep()
            waits = self._compare_ranks()
            if is_saved:
                self._agree(self._write())
            _core.step_done()
            if waits:
                raise Regroup
        else:
            self._forget_step()
            self._watch.keep_parameters()
        self._begin_step()

    def _finish(self) -> None:
        """When the function has returned."""
        for iteration in self._iterations.values():
            iteration.check(self._step)
        _core.barrier()
        if self._save is not None:
            self._keep()
            self._compare_ranks()
            self._agree(self._write())

    def _compare_ranks(self) -> bool:
        """Collective: whether a replacement waits. Generators that have drawn other numbers on some rank are no longer
        common: at each step, because the ranks that a lost one leaves, one perhaps, can no longer tell."""
        digests = self._digests()
        drawn = [int.from_bytes(_hash(digests[name])[:7], "little") if name in digests else 0 for name in _NAMES]
        most = array.array("q", [_core.has_waiting_replacements(), *drawn, *(~each for each in drawn)])
        _core.all_reduce(most, "max")
        waits, greatest, least = most[0], most[1 : 1 + len(_NAMES)], most[1 + len(_NAMES) :]
        self._common -= {name for i, name in enumerate(_NAMES) if greatest[i] != ~least[i]}
        return waits != 0

    def _agree(self, failure: Exception | None) -> None:
        """Collective: raises on all ranks if one could not write the state."""
        word = array.array("i", [failure is not None])
        _core.all_reduce(word, "max")
        if failure is not None:
            raise failure
        if word[0] != 0:
            raise EngineError(f"run_elastic: rank 0 cannot write the state to {self._save}")

    def _begin_step(self) -> None:
        """Before the ranks compute the present step."""
        if self._seed is None:
            return
        # Neighbouring steps and ranks get seeds that have nothing in common.
        text = f"{self._seed} {self._step} {self.epoch_ends} {_core.get_rank()}"
        seed = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
        torch.manual_seed(seed >> 1)
        random.seed(seed)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(seed & 0xFFFFFFFF)

    def _use(self, sampler: ElasticBatchSampler) -> None:
        n_steps = sampler.steps_per_epoch
        if self._is_resumed and self._epoch_steps > 0 and self._epoch_steps != n_steps:
            raise UsageError(
                f"ElasticBatchSampler: the state that this training has resumed from counts its {self._step} steps in epochs of "
                f"{self._epoch_steps}, and this sampler's have {n_steps}: some samples would be left out, or taken twice. Give it the same "
                "data, global_batch and drop_last; or say by set_step where to go on"
            )
        self._is_resumed = False
        self._epoch_steps = n_steps if self._epoch_steps in (0, n_steps) else -1

    def _accumulate_for(self, sampler: ElasticBatchSampler) -> None:
        if self._accumulating is not None and self._accumulating.micro_batches != sampler.micro_batches:
            raise UsageError("ElasticBatchSampler: another sampler of this state has another number of micro_batches")
        self._accumulating = sampler

    # --- what a repetition begins with

    @torch.no_grad()
    def _keep(self) -> None:
        """The present step begins with what is now."""
        self._watch.look()
        self._forget_step()
        for part in self._parts:
            part.keep()
        self._watch.look_at_parameters()
        if self._seed is None:
            self._generators = _generators(self._generators)

    @torch.no_grad()
    def _set_back(self) -> None:
        """Undoes the part of the present step that was computed."""
        self._forget_step()
        for part in self._parts:
            part.set_back()
        _set_generators(self._generators)

    def _forget_step(self) -> None:
        self._watch.forget_step()
        self._n_micro = 0

    # --- the state of another rank, or of a file

    def _begin_attempt(self) -> None:
        self._n_attempts += 1
        self._iterations.clear()
        self._in_epochs = None
        if not self._has_state:
            for part in self._parts:
                if isinstance(part, _elastic_parts.Module):
                    part.module.zero_grad()  # none, the same on all ranks

    def _digests(self) -> dict[str, bytes]:
        """Of the generators as the present step begins, or of those that the program has made."""
        if self._seed is not None:
            return {}
        if self._has_state:  # those that were the same on all ranks until the step before
            states = {name: state for name, state in self._generators.items() if name in self._common}
        else:
            states = _generators({})
        return {name: _digest(state) for name, state in states.items()}

    def _packed(self) -> bytes:
        values = {
            "step": self._step,
            "epoch_ends": self._epoch_ends,
            "epoch_steps": self._epoch_steps,
            "parts": [part.values() for part in self._parts],
            "generators": {name: _plain(state) for name, state in self._generators.items() if name in self._common},
        }
        file = io.BytesIO()
        torch.save(values, file)
        return file.getvalue()

    @torch.no_grad()
    def _unpack(self, packed: bytes, is_file: bool) -> None:
        values = torch.load(io.BytesIO(packed), map_location="cpu", weights_only=False)
        if len(values["parts"]) != len(self._parts):
            raise ValueError(f"it has {len(values['parts'])} parts, and the state here {len(self._parts)}")
        for part, own in zip(self._parts, values["parts"], strict=True):
            part.load(own)
        self._step, self._epoch_ends = values["step"], values["epoch_ends"]
        self._epoch_steps, self._is_resumed = values["epoch_steps"], is_file
        generators = {name: state for name, state in values["generators"].items() if not is_file or name in self._common}
        _set_generators(generators)
        self._common = set(generators)
        # Also if the one who gave it is lost before all others have loaded it.
        self._has_state = True
        self._keep()

    def _write(self) -> Exception | None:
        """Why rank 0 cannot write the state to its file."""
        if self._save is None or _core.get_rank() != 0:
            return None
        try:
            data = self._packed()
            _core.replace_file(self._save, data + _hash(data) + _MAGIC)
        except Exception as error:
            return error
        return None


def _check_parts(parts: Any) -> None:
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


def _not_data(value: Any) -> Any:
    """What a dict or list must not hold, because loading puts a copy in its place; None: nothing."""
    if isinstance(value, dict):
        return next((found for each in value.values() if (found := _not_data(each)) is not None), None)
    if isinstance(value, (list, tuple)):
        return next((found for each in value if (found := _not_data(each)) is not None), None)
    is_parameter = isinstance(value, torch.Tensor) and value.requires_grad
    return value if is_parameter or hasattr(value, "load_state_dict") else None


class _Drawn(NamedTuple):
    """The state of a generator of random or of numpy. Getting that costs as much as all the rest of an ElasticState."""

    memory: bytes  # in which it lies: where that is the same, nobody has drawn a number since
    state: Any
    digest: bytes  # the same on ranks whose generators are


_NAMES = ("torch", "random", "numpy", "cuda")


def _generators(former: dict[str, Any]) -> dict[str, Any]:
    """The states of all generators. former: the last ones."""
    states: dict[str, Any] = {"torch": torch.get_rng_state()}
    generator, kept = random._inst, former.get("random")
    memory = _memory_of(generator, _Random) + repr(vars(generator).get("gauss_next")).encode()
    if kept is None or kept.memory != memory:
        kept = _Drawn(memory, generator.getstate(), _hash(memory))
    states["random"] = kept
    if "numpy" in sys.modules:
        generator, kept = sys.modules["numpy"].random.mtrand._rand, former.get("numpy")
        bits, memory = generator._bit_generator, b""
        if type(bits).__name__ == "MT19937":  # 624 words and a position; the generator has the second one of a pair of normal numbers
            words = ctypes.string_at(bits.ctypes.state_address, 2500)
            memory = words + _memory_of(generator, type(generator))
        if not memory or kept is None or kept.memory != memory:
            state = generator.get_state(legacy=False)
            digest = _hash((words if memory else b"") + repr(state).encode())
            kept = _Drawn(memory, state, digest)
        states["numpy"] = kept
    if torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state_all()
    return states


def _plain(state: Any) -> Any:
    return state.state if isinstance(state, _Drawn) else state


def _memory_of(thing: Any, kind: type) -> bytes:
    """What an object holds as one of this kind."""
    return ctypes.string_at(id(thing) + object.__basicsize__, kind.__basicsize__ - object.__basicsize__)


def _digest(state: Any) -> bytes:
    if isinstance(state, list):
        return b"".join(map(_digest, state))
    return _hash(state.numpy().tobytes()) if isinstance(state, torch.Tensor) else state.digest


def _hash(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()


def _set_generators(states: dict[str, Any]) -> None:
    for name, kept in states.items():
        state = _plain(kept)
        if name == "torch":
            torch.set_rng_state(state)
        elif name == "random":
            random.setstate(state)
        elif name == "numpy":
            sys.modules["numpy"].random.set_state(state)
        else:
            torch.cuda.set_rng_state_all(state)


_MAGIC = b"lockstep"  # behind the archive, whose readers look for its end from behind: with a hash, because torch checks none


def read_file(path: str) -> bytes:
    bytes_ = _core.read_file(path)
    n = len(bytes_) - len(_MAGIC) - 16
    data = bytes_[: max(0, n)]
    if bytes_[n + 16 :] != _MAGIC or _hash(data) != bytes_[n : n + 16]:
        raise ValueError("it is damaged, or no file that an ElasticState has written")
    return data
