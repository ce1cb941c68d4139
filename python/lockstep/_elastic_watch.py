"""What run_elastic notices of the program: what a repeated step cannot undo, and what the state does not have."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.modules import module as torch_module
from torch.nn.parallel import DistributedDataParallel
from torch.optim import optimizer as torch_optimizer

from . import _elastic_parts
from .errors import UsageError


class Watch:
    """Hooks on optimizers, on parameters without one, and on the structure of modules; in effect between begin and end."""

    def __init__(self, parts: list[Any], by_hand: set[torch.Tensor]) -> None:
        self._modules = [(place, part) for place, part in enumerate(parts) if isinstance(part, _elastic_parts.Module)]
        self._optimizers = [part for part in parts if isinstance(part, _elastic_parts.Optimizer)]
        self._by_hand = by_hand
        self._hooks: list[Any] = []
        self._hooks_of_parameters: dict[torch.Tensor, Any] = {}
        self._has_new_structure = True
        self._ids: set[int] = set()  # of the modules
        self._owned: dict[torch.Tensor, str] = {}  # their parameters: part/name
        # Those that the function has made, and what they leave alone: their parameters without requires_grad at that time.
        self._ddps: weakref.WeakKeyDictionary[DistributedDataParallel, set[torch.Tensor]] = weakref.WeakKeyDictionary()
        self._frozen_since: set[torch.Tensor] = set()  # at the end of a step: one made after a lost rank there leaves them alone
        self.forget_step()

    def forget_step(self) -> None:
        self._n_optimizer_steps = 0
        self._in_optimizer: list[tuple[torch.Tensor, int]] = []  # parameters of one that steps, and their versions before
        self._foreign: str | None = None  # an optimizer that is not a part, and changed parameters of parts
        self._strays: list[torch.Tensor] = []  # that got a gradient, and that no optimizer changes

    def begin(self) -> None:
        self._hooks = [
            torch_optimizer.register_optimizer_step_pre_hook(self._before_optimizer),
            torch_optimizer.register_optimizer_step_post_hook(self._after_optimizer),
            torch_module.register_module_module_registration_hook(self._on_registration),
            torch_module.register_module_parameter_registration_hook(self._on_registration),
            torch_module.register_module_buffer_registration_hook(self._on_registration),
        ]
        self._has_new_structure = True

    def end(self) -> None:
        for hook in (*self._hooks, *self._hooks_of_parameters.values()):
            hook.remove()
        self._hooks, self._hooks_of_parameters = [], {}

    def look(self) -> None:
        """At the structure of the modules, if it has changed; before they are kept."""
        if not self._has_new_structure:
            return
        self._has_new_structure = False
        self._ids, self._owned = set(), {}
        for place, part in self._modules:
            part.find()
            self._ids.update(map(id, part.modules))
            self._owned.update((parameter, f"{place}/{name}") for name, parameter in part.module.named_parameters())
        for parameter in (*self._in_optimizers(), *self._by_hand):
            if parameter not in self._owned:
                raise UsageError(
                    f"run_elastic: a parameter of shape {tuple(parameter.shape)} of an optimizer of the state, or of by_hand, is in no "
                    "module of the state, so its values would be lost with the rank; give its module, or a ParameterList, as a part"
                )

    def look_at_parameters(self) -> None:
        """At those that get gradients, if these have changed; when the modules are kept."""
        if not self._hooks or not any([part.kept.take_requires_grad_changed() for _, part in self._modules]):
            return
        for ddp in self._ddps:
            self._frozen_since |= _frozen(ddp)
        changed = self._by_hand.union(self._in_optimizers())
        for parameter in self._owned:
            if parameter.requires_grad and parameter not in changed and parameter not in self._hooks_of_parameters:
                hook = parameter.register_post_accumulate_grad_hook(lambda parameter: self._strays.append(parameter))
                self._hooks_of_parameters[parameter] = hook

    def _in_optimizers(self) -> Iterator[torch.Tensor]:
        for part in self._optimizers:
            yield from part.parameters

    def _before_optimizer(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if any(optimizer is part.optimizer for part in self._optimizers):
            # It may raise after it has changed some, as LBFGS in a later call of its closure.
            self._in_optimizer = [(p, p._version) for group in optimizer.param_groups for p in group["params"]]
        self._check_ddps(optimizer)

    def _after_optimizer(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if any(optimizer is part.optimizer for part in self._optimizers):
            self._in_optimizer = []
            self._n_optimizer_steps += 1
            self._check_ddps(optimizer)  # of gradients that a closure has computed
        # One that steps for an optimizer of the state belongs to it.
        elif not self._in_optimizer and any(p in self._owned for group in optimizer.param_groups for p in group["params"]):
            self._foreign = type(optimizer).__name__

    def _check_ddps(self, optimizer: torch.optim.Optimizer) -> None:
        """That the optimizer uses no gradient which each rank has of its own samples alone."""
        if not self._frozen_since and not any(self._ddps.values()):
            return
        thawed = {p for p in self._frozen_since.union(*self._ddps.values()) if p.requires_grad and p.grad is not None} - self._by_hand
        if not thawed:
            return
        own = thawed.intersection(p for group in optimizer.param_groups for p in group["params"])
        averaged: set[torch.Tensor] = set()
        for ddp, frozen in self._ddps.items():
            averaged |= set(ddp.parameters()) - frozen
        for parameter, name in self._owned.items():
            if parameter in own and parameter not in averaged:
                raise UsageError(
                    f"optimizer.step: parameter {name} of the state (part/name) had requires_grad=False when its DistributedDataParallel "
                    "was made, which leaves its gradient different on each rank. Make the DistributedDataParallel anew after "
                    "requires_grad_(True); or name the parameter in by_hand, if the program averages its gradient itself"
                )
            if parameter in own and parameter in self._frozen_since:
                self._frozen_since.clear()  # once
                warnings.warn(
                    f"run_elastic: parameter {name} of the state (part/name) required no gradient at the end of a step. After a lost rank "
                    "the function begins with that, and a DistributedDataParallel that it makes then leaves the parameter alone: call "
                    "requires_grad_(True) before it is made, and make it anew where parameters are thawed",
                    stacklevel=4,
                )
                return

    def _on_registration(self, module: torch.nn.Module, name: str, part: Any) -> None:
        if isinstance(module, DistributedDataParallel):
            if name == "module":
                self._ddps[module] = _frozen(part)
        elif id(module) in self._ids and name not in module._buffers:
            self._has_new_structure = True

    def keep_parameters(self) -> None:
        for _, part in self._modules:
            part.kept.keep()

    def has_changed_parameters(self) -> bool:
        """Whether a step that is not complete cannot be repeated."""
        if self._n_optimizer_steps > 0 or self._foreign is not None or any(p._version != version for p, version in self._in_optimizer):
            return True
        return any(part.kept.have_changed() for _, part in self._modules)

    def check_optimizers(self, call: str) -> None:
        if self._foreign is not None:
            raise UsageError(
                f"{call}: an optimizer, {self._foreign}, that is not a part of the state has changed parameters of its modules; "
                "what it remembers would be lost with the rank. Make it before run_elastic, and give it to ElasticState; a "
                "ZeroRedundancyOptimizer has a part of its state on each rank, and cannot be one"
            )
        changed = None
        for parameter in self._strays:
            changed = changed or set(self._in_optimizers())  # it may have been added in this step
            if parameter not in changed and parameter in self._owned:
                raise UsageError(
                    f"{call}: parameter {self._owned[parameter]} of the state (part/name) has got a gradient, and no optimizer of the "
                    "state changes it. Give its optimizer as a part; or name it in by_hand, if the program changes it without one; "
                    "requires_grad_(False), if nothing does"
                )

    def check_gradients(self) -> None:
        """Of a step without a step of an optimizer."""
        if self._n_optimizer_steps or not self._optimizers:
            return
        in_optimizers, new = set(self._in_optimizers()), []
        for _, part in self._modules:
            for parameter, is_new in zip(part.parameters, part.kept.has_new_gradient(), strict=False):
                if is_new and parameter in in_optimizers:
                    new.append(parameter.grad.coalesce().values() if parameter.grad.is_sparse else parameter.grad)
        # Where some are not finite a GradScaler has left the step out.
        if all(bool(grad.isfinite().all()) for grad in new) and any(bool(grad.any()) for grad in new):
            raise UsageError(
                "step_done: no optimizer of the state has used the gradients of this step: they would be lost where the next one is "
                "repeated. To sum those of several batches give ElasticBatchSampler micro_batches, and call step_done() after "
                "optimizer.step(); where a step is left out on purpose call zero_grad() before"
            )

    def release_ddps(self) -> None:
        """Those that the function has made act no more on gradients, also if an exception or a cycle keeps them alive."""
        for module in list(self._ddps):
            if hasattr(module, "_remove_autograd_hooks"):
                module._remove_autograd_hooks()
            else:  # private: another torch may do without
                gc.collect()
        self._ddps.clear()


def _frozen(module: torch.nn.Module) -> set[torch.Tensor]:
    return {parameter for parameter in module.parameters() if not parameter.requires_grad}
