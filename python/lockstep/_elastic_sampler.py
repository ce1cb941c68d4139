"""Which samples each rank takes in each step of an elastic training."""

from __future__ import annotations

from collections.abc import Iterator, Sized
from typing import TYPE_CHECKING

import torch
from torch.utils.data import Sampler

from . import _core
from .errors import UsageError

if TYPE_CHECKING:
    from ._elastic_state import ElasticState


class _Iteration:
    """One over a sampler: whether all of its batches became steps."""

    def __init__(self, first: int, end: int, n_micro: int) -> None:
        self.first, self.end, self.n_micro = first, end, n_micro  # steps; batches of each
        self.n_before_a_step = 0  # batches that were taken before the first step was complete: a loader's workers read ahead
        self.is_exhausted = False
        self.generator = torch.get_rng_state()  # before the DataLoader draws a number, for its workers

    def check(self, step: int) -> None:
        n_missing = (self.end - step) * self.n_micro
        if self.is_exhausted and n_missing > max(0, self.n_before_a_step - self.n_micro):
            raise UsageError(
                f"ElasticBatchSampler: all batches of an iteration, of steps {self.first} to {self.end - 1}, were taken, and step {step} "
                "is not complete. Each batch is a step: call step_done() for it, also where it is left out; to sum the gradients "
                "of several give micro_batches"
            )


class ElasticBatchSampler(Sampler[list[int]]):
    """The batches of a DataLoader(data, batch_sampler=...): which samples this rank takes, by the completed steps of state.

    A function of the step and of the ranks alone, so that any number of ranks computes the same steps: step k of an epoch
    consists of the positions k * global_batch to (k + 1) * global_batch - 1 of the epoch's order, which is that
    of torch's DistributedSampler; rank r of n takes every n-th of them, from the r-th on. Iterating begins
    with state's present step and ends with the epoch: begin a new iteration in each call of run_elastic's function.

    data: what has a length. global_batch: samples of a step, on all ranks together. shuffle: a new order in every epoch,
    from seed, the same on all ranks. drop_last: leave out the last step of an epoch if it has fewer samples.
    micro_batches: so many batches of each rank are a step, of equal consecutive parts of its samples (gradient accumulation:
    state.micro_batch).
    """

    def __init__(
        self,
        data: Sized,
        global_batch: int,
        state: ElasticState,
        *,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        micro_batches: int = 1,
    ) -> None:
        n_samples = len(data)
        steps = 0 if global_batch < 1 else n_samples // global_batch if drop_last else -(-n_samples // global_batch)
        if steps == 0:
            raise UsageError(
                f"ElasticBatchSampler: {n_samples} samples in batches of {global_batch}{', without the last' if drop_last else ''} "
                "make no step; global_batch is the number of samples of a step on all ranks together"
            )
        if micro_batches < 1:
            raise UsageError(f"ElasticBatchSampler: micro_batches is {micro_batches}; it is the number of batches of a step")
        self.steps_per_epoch = steps
        self.micro_batches = micro_batches
        self._n_samples = n_samples
        self._global_batch = global_batch
        self._state = state
        self._shuffle = shuffle
        self._seed = seed
        self._order: tuple[int, list[int]] = (-1, [])  # of an epoch
        if micro_batches > 1:
            state._accumulate_for(self)

    @property
    def epoch(self) -> int:
        """Of the present step; in epochs(), that epoch, also at its end."""
        epochs = self._state._in_epochs
        if epochs is not None and epochs.steps_per_epoch == self.steps_per_epoch:
            return self._state.epoch_ends
        return self._state.step // self.steps_per_epoch

    def n_samples(self, step: int) -> int:
        """The samples of a step, on all ranks together."""
        first = step % self.steps_per_epoch * self._global_batch
        return min(self._global_batch, self._n_samples - first)

    def batch(self, step: int, micro: int = 0) -> list[int]:
        """The samples of this rank in a step, counted over all epochs, or in one of its micro batches.

        Empty where there are fewer samples than ranks.
        """
        if not 0 <= micro < self.micro_batches:
            raise UsageError(f"ElasticBatchSampler: there is no micro batch {micro} of {self.micro_batches}")
        epoch, step_in_epoch = divmod(step, self.steps_per_epoch)
        if self._order[0] != epoch:
            order = list(range(self._n_samples))
            if self._shuffle:
                generator = torch.Generator()
                generator.manual_seed(self._seed + epoch)
                order = torch.randperm(self._n_samples, generator=generator).tolist()
            self._order = (epoch, order)
        first, n = step_in_epoch * self._global_batch, self.n_samples(step)
        begin, end = (first + n * part // self.micro_batches for part in (micro, micro + 1))
        return self._order[1][begin:end][_core.get_rank() :: _core.get_world_size()]

    def __iter__(self) -> Iterator[list[int]]:
        n_fewest = min(self.n_samples(step) for step in (0, self.steps_per_epoch - 1)) // self.micro_batches
        if n_fewest < _core.get_world_size():
            raise UsageError(
                f"ElasticBatchSampler: a {'step' if self.micro_batches == 1 else 'micro batch'} of {n_fewest} samples leaves some of "
                f"{_core.get_world_size()} ranks without; a DataLoader cannot make an empty batch. Give drop_last=True or another "
                "global_batch, or take the samples of each step from batch()"
            )
        state = self._state
        state._use(self)
        iteration = _Iteration(state.step, (self.epoch + 1) * self.steps_per_epoch, self.micro_batches)
        if state._is_running:
            if (former := state._iterations.get(id(self))) is not None:
                former.check(state.step)
                if former.first == state.step and former.n_before_a_step == 0:  # a loader with workers begins twice
                    iteration.generator = former.generator
            state._iterations[id(self)] = iteration
        return self._batches(iteration, state._n_attempts)

    def _batches(self, iteration: _Iteration, n_attempts: int) -> Iterator[list[int]]:
        state = self._state
        if state._is_running:
            # Without lost ranks a DataLoader draws one number in each epoch.
            if iteration.first != iteration.end - self.steps_per_epoch:
                torch.set_rng_state(iteration.generator)
            state._begin_step()
        for step in range(iteration.first, iteration.end):
            for micro in range(self.micro_batches):
                if state._n_attempts != n_attempts:
                    raise UsageError("ElasticBatchSampler: begin a new iteration in each call of run_elastic's function")
                iteration.n_before_a_step += state.step == iteration.first
                yield self.batch(step, micro)
        iteration.is_exhausted = True

    def __len__(self) -> int:
        """Batches that are left in the epoch."""
        return ((self.epoch + 1) * self.steps_per_epoch - self._state.step) * self.micro_batches
