"""What a step reads of each part of an ElasticState: how it is kept, set back, and given to other ranks and to files.

| row                                    | kept at each completed step          | set back where a step is repeated           |
|----------------------------------------|--------------------------------------|---------------------------------------------|
| parameters                             | 16 values of each; all with snapshot | a step that has changed them is refused     |
| which gradients are defined            | a list                               | zeros, or none                              |
| requires_grad, training flags          | lists                                | all of them                                 |
| buffers                                | a copy                               | the same tensors, with the values           |
| extra state of modules                 | a copy                               | by set_extra_state                          |
| optimizers: options of their groups    | a copy                               | whole groups; those that were added removed |
| optimizers: their state                | not copied, but with snapshot        | as parameters                               |
| schedulers, scalers, dicts, lists, ... | a copy                               | by load_state_dict, or in place             |

values() are all rows of a part, for a rank or a file; load() takes them, and raises where they do not fit. After load(),
keep() makes them what a repetition begins with.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from itertools import chain
from operator import attrgetter, is_
from typing import Any

import torch

from . import _extension

_torch = _extension.load()


_form_of = attrgetter("dtype", "shape")


class _Tensors:
    """Copies of the tensors in dicts: one operation for all of a kind, because one for each costs ten times as much."""

    def __init__(self, dicts: list[dict[str, Any]]) -> None:
        self._dicts = dicts
        self._places = [(values, name) for values in dicts for name in values]
        self._tensors: list[Any] = []  # None where a module has a buffer that is None
        self._kinds: list[list[torch.Tensor]] = []  # of one device, type, and shape but for the first dimension
        self._forms: list[list[Any]] = []  # of them: type and shape
        self._copies: list[torch.Tensor] = []
        self._alone: list[torch.Tensor] = []
        self._copies_alone: list[torch.Tensor] = []

    def keep(self) -> None:
        now = [values.get(name) for values, name in self._places]
        if (  # the program may have assigned others, and x.data = y, resize_ and to() change those that are there
            len(now) != len(self._tensors)
            or not all(map(is_, now, self._tensors))
            or self._forms != _forms_of(self._kinds)
        ):
            kinds: dict[Any, list[torch.Tensor]] = defaultdict(list)
            alone = []  # what cat changes or split cannot take: sparse tensors, and quantized ones of several scales
            for tensor in now:
                if tensor is not None and (tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested):
                    alone.append(tensor)
                elif tensor is not None:
                    kinds[tensor.device, tensor.dtype, tensor.ndim, tensor.shape[1:]].append(tensor)
            self._tensors, self._kinds, self._alone = now, list(kinds.values()), alone
            self._forms = _forms_of(self._kinds)
        self._copies = [torch.cat(kind) if kind[0].ndim else torch.stack(kind) for kind in self._kinds]
        self._copies_alone = [tensor.clone() for tensor in self._alone]

    def set_back(self) -> None:
        for values in self._dicts:
            values.clear()  # of what the step has added, too
        for (values, name), tensor in zip(self._places, self._tensors, strict=True):
            values[name] = tensor
        for kind, forms, kept in zip(self._kinds, self._forms, self._copies, strict=True):
            lengths = [shape[0] if shape else 1 for _, shape in forms]
            for tensor, form, value in zip(kind, forms, kept.split(lengths), strict=True):
                _set(tensor, value.view(form[1]), _form_of(tensor) == form)
        for tensor, value in zip(self._alone, self._copies_alone, strict=True):
            _set(tensor, value, tensor.dtype is value.dtype)


def _forms_of(kinds: list[list[torch.Tensor]]) -> list[list[Any]]:
    return [list(map(_form_of, kind)) for kind in kinds]


def _set(tensor: torch.Tensor, value: torch.Tensor, is_of_this_form: bool) -> None:
    if is_of_this_form:
        tensor.copy_(value)
    else:
        tensor.data = value.clone()


class Module:
    """A module; its structure is looked up anew when the program has changed it (find)."""

    def __init__(self, module: torch.nn.Module, snapshot: bool) -> None:
        self.module = module
        self._snapshot = snapshot
        self.kept: Any = None  # of the parameters: _torch.KeptParameters
        self._training: list[bool] = []
        self._extra: list[Any] = []
        self.find()

    def find(self) -> None:
        self.modules = list(self.module.modules())
        self.parameters = list(self.module.parameters())
        self.kept = _torch.KeptParameters(self.parameters)
        self._with_extra = [m for m in self.modules if type(m).get_extra_state is not torch.nn.Module.get_extra_state]
        buffers = [m._buffers for m in self.modules]
        self._tensors = _Tensors(buffers + [m._parameters for m in self.modules] if self._snapshot else buffers)

    def keep(self) -> None:
        self.kept.keep()
        self._training = [module.training for module in self.modules]
        self._extra = [copy.deepcopy(module.get_extra_state()) for module in self._with_extra]
        self._tensors.keep()

    def set_back(self) -> None:
        self._tensors.set_back()
        for module, extra in zip(self._with_extra, self._extra, strict=True):
            module.set_extra_state(copy.deepcopy(extra))
        self._set_flags(self._training, self.kept.requires_grad(), self.kept.has_gradient())

    def _set_flags(self, training: list[bool], requires_grad: list[bool], has_gradient: list[bool]) -> None:
        for module, flag in zip(self.modules, training, strict=True):
            module.training = flag
        for parameter, flag, has in zip(self.parameters, requires_grad, has_gradient, strict=True):
            parameter.requires_grad_(flag)
            # Not the former tensor: it may be a part of a DistributedDataParallel's memory.
            parameter.grad = torch.zeros_like(parameter if parameter.grad is None else parameter.grad) if has else None

    def values(self) -> Any:
        state = self.module.state_dict()
        return {
            "state": state,
            "not persistent": {name: buffer for name, buffer in self.module.named_buffers() if name not in state},
            "flags": (self._training, self.kept.requires_grad(), self.kept.has_gradient()),
        }

    def load(self, values: Any) -> None:
        self.find()
        own = self.module.state_dict()
        for name, value in values["state"].items():
            if isinstance(value, torch.Tensor) and name in own and value.dtype != own[name].dtype:
                raise TypeError(f"{name} is {own[name].dtype} here, and {value.dtype} there")
        self.module.load_state_dict(values["state"])
        for name, value in values["not persistent"].items():
            buffer = self.module.get_buffer(name)
            is_of_this_form = value.dtype is buffer.dtype and (value.is_nested or value.shape == buffer.shape)
            _set(buffer, value.to(buffer.device), is_of_this_form)
        self._set_flags(*values["flags"])


class Optimizer:
    """An optimizer, whose parameters are in a module of the state."""

    def __init__(self, optimizer: torch.optim.Optimizer, snapshot: bool) -> None:
        self.optimizer = optimizer
        self._snapshot = snapshot
        self._groups: list[dict[str, Any]] = []  # without parameters
        self._values: Any = None

    @property
    def parameters(self) -> list[torch.Tensor]:
        return list(chain.from_iterable(group["params"] for group in self.optimizer.param_groups))

    def keep(self) -> None:
        self._groups = [_options(group) for group in self.optimizer.param_groups]
        if self._snapshot:
            self._values = copy.deepcopy(self.optimizer.state_dict())

    def set_back(self) -> None:
        del self.optimizer.param_groups[len(self._groups) :]
        if self._snapshot:
            self.load(copy.deepcopy(self._values))
        for group, kept in zip(self.optimizer.param_groups, self._groups, strict=True):
            parameters = group["params"]
            group.clear()
            group.update(params=parameters, **_copied(kept))

    def values(self) -> Any:
        return self.optimizer.state_dict()

    def load(self, values: Any) -> None:
        self.optimizer.load_state_dict(values)
        # torch converts them to the parameter's type.
        places = chain.from_iterable(group["params"] for group in values["param_groups"])
        for place, parameter in zip(places, self.parameters, strict=True):
            for name, value in values["state"].get(place, {}).items():
                own = self.optimizer.state[parameter]
                if isinstance(value, torch.Tensor) and own[name].dtype != value.dtype:
                    own[name] = value.to(parameter.device, copy=True)


class Other:
    """What has state_dict and load_state_dict, a dict, or a list."""

    def __init__(self, part: Any) -> None:
        self._part = part
        self._values: Any = None

    def keep(self) -> None:
        self._values = _copied(self.values())

    def set_back(self) -> None:
        self.load(_copied(self._values))

    def values(self) -> Any:
        return self._part if isinstance(self._part, (dict, list)) else self._part.state_dict()

    def load(self, values: Any) -> None:
        if isinstance(self._part, dict):
            self._part.clear()
            self._part.update(values)
        elif isinstance(self._part, list):
            self._part[:] = values
        else:
            self._part.load_state_dict(values)
            # Of a GradScaler: that gradients were unscaled in this step.
            getattr(self._part, "_per_optimizer_states", {}).clear()


def kept_part(part: Any, snapshot: bool) -> Module | Optimizer | Other:
    if isinstance(part, torch.nn.Module):
        return Module(part, snapshot)
    return Optimizer(part, snapshot) if isinstance(part, torch.optim.Optimizer) else Other(part)


_CONSTANTS = (bool, int, float, str, type(None))


def _copied(values: Any) -> Any:
    """A deep copy; of numbers and texts it is the same object, which is ten times as fast."""
    if type(values) is not dict:
        return copy.deepcopy(values)
    memo: dict[int, Any] = {}
    return {name: value if type(value) in _CONSTANTS else copy.deepcopy(value, memo) for name, value in values.items()}


def _options(group: dict[str, Any]) -> Any:
    """Of a group of an optimizer, without its parameters."""
    return _copied({name: value for name, value in group.items() if name != "params"})
