"""Batch normalisation over the batches of all ranks, on CPUs too. Needs PyTorch.

    model = lockstep.nn.convert_sync_batchnorm(model)   # outputs, gradients and running statistics are now
    loss(model(part_of_the_batch)).backward()           # those of BatchNorm on the whole batch

The ranks are those of torch.distributed, over any backend (gloo, lockstep, mpi), or, if it is not
initialised, those of lockstep.init_dist().
"""

import contextlib
import copy
import itertools
import os
import sys
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any

try:
    import torch
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"lockstep.nn needs PyTorch, which is not installed ({error}): pip install torch, then lockstep-torch from a clone "
        "of lockstep (pip install ./python/torch)",
        name="torch",
    ) from None
from torch.nn.modules.batchnorm import _BatchNorm

from . import _extension
from ._core import Group
from ._elastic import run_elastic
from ._elastic_sampler import ElasticBatchSampler
from ._elastic_state import ElasticState
from .errors import UsageError

__all__ = [
    "BatchNorm",
    "ElasticBatchSampler",
    "ElasticState",
    "SyncBatchNorm",
    "SyncBatchNormScope",
    "convert_sync_batchnorm",
    "revert_sync_batchnorm",
    "run_elastic",
]

_torch = _extension.load()


class BatchNorm(_BatchNorm):
    """torch.nn.BatchNorm1d, 2d and 3d in one: input (N, C, ...)."""

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {input.dim()}D input)")


class SyncBatchNorm(torch.nn.SyncBatchNorm):
    """torch.nn.SyncBatchNorm that also trains on CPUs.

    The same arguments, state_dict and results. Input: (N, C, ...) of float64, float32, bfloat16 or float16, in
    any layout; channels-last is kept. Ranks may have batches of different sizes, also empty ones; a rank
    without samples must still call backward (`output.sum().backward()` is enough).
    Collective in training mode, also under no_grad: an all_gather in forward, an all_reduce in backward (none
    if the input needs no gradient). With a core for each rank of one host, an all_reduce of one number precedes
    them, and a batch that fits into no cache goes a few channels at a time. No communication in eval mode,
    which without running statistics uses those of this rank's batch.
    process_group: of torch.distributed, or a lockstep.Group; by default the world of torch.distributed or, if
    that is not initialised, of lockstep.
    MismatchError also if the ranks call different layers of equal width: they compare the name that
    convert_sync_batchnorm gave, or the place in the program (line and column) that made the layer.
    Errors are those of lockstep.errors; they name the layer and the line that called the model. Gradients of
    gradients (create_graph) are those of BatchNorm too: an all_reduce more wherever backward made one, and all
    ranks must take them. Third gradients are refused.
    """

    reverts_to = BatchNorm  #: what revert_sync_batchnorm makes of it
    _title = ""  # in errors
    _made_at = ""  # the program's line and column; ranks compare it, or the title of a converted layer

    def __new__(cls, *args: Any, **kwargs: Any) -> "SyncBatchNorm":
        self: SyncBatchNorm = super().__new__(cls)
        if args or kwargs:  # none for a copy, or an unpickled layer, which has that of its original
            self.__dict__.update(_title="", _made_at=_line_and_column())  # in TorchScript a class has no attributes
        return self

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if not torch.jit.is_scripting():  # TorchScript does not compile this branch
            if isinstance(input, torch.fx.Proxy):
                return self._fx_leaf(input)
        if self.training:
            return self._train(input)
        self._check_input_dim(input)
        if self.running_mean is None and self.running_var is None and not torch.compiler.is_compiling():
            return self._eval_with_batch_statistics(input)
        return torch.nn.functional.batch_norm(
            input,
            self.running_mean,
            self.running_var,
            self.weight,
            self.bias,
            self.running_mean is None and self.running_var is None,
            0.0,
            self.eps,
        )

    @torch.jit.ignore
    def _fx_leaf(self, input: Any) -> Any:
        """Records the layer as one node of a torch.fx trace, as for the layers of torch.nn."""
        return input.tracer.create_proxy("call_module", input.tracer.path_of_module(self), (input,), {})

    def __deepcopy__(self, memo: dict[int, Any]) -> "SyncBatchNorm":
        """With the same group: a group is of this process, and copies of a layer call it in turn."""
        new: SyncBatchNorm = self.__class__.__new__(self.__class__)
        memo[id(self)] = new
        for name, value in self.__dict__.items():
            new.__dict__[name] = value if name == "process_group" else copy.deepcopy(value, memo)
        return new

    def __copy__(self) -> "SyncBatchNorm":
        new: SyncBatchNorm = _copy_as(self, type(self))
        return new

    def __getstate__(self) -> dict[str, Any]:
        """For pickle, torch.save: without a lockstep.Group, which is of this process; set process_group after loading."""
        state = dict(self.__dict__)
        if isinstance(state["process_group"], Group):
            state["process_group"] = None
        return state

    @torch.jit.ignore
    def _eval_with_batch_statistics(self, input: torch.Tensor) -> torch.Tensor:
        """Without running statistics torch uses those of the batch: this rank's, also in a SyncBatchNormScope."""
        with _torch.SuspendedScope():
            return torch.nn.functional.batch_norm(input, None, None, self.weight, self.bias, True, 0.0, self.eps)

    @torch.jit.ignore
    @torch.compiler.disable
    def _train(self, input: torch.Tensor) -> torch.Tensor:
        return SyncBatchNorm._train_over(self, input, lambda group: False)  # TorchScript's wrapper has no such method

    def _train_over(self, input: torch.Tensor, clamps_over: Callable[[Any], bool]) -> torch.Tensor:
        """clamps_over(group): whether to take max(var, eps) where torch takes var + eps."""
        if isinstance(input, torch.Tensor):
            if _is_tracing():
                raise UsageError(
                    f"{self._title or type(self).__name__}: torch.export and make_fx cannot trace a layer in training: "
                    "the graph would not exchange statistics. Trace the model after eval(), or a copy converted by "
                    "revert_sync_batchnorm"
                )
            if _is_fake(input) or input.is_meta and all(own.is_meta for own in (*self.parameters(), *self.buffers())):
                return self._shape_of(input)
        group = _group_or_default(self.process_group)
        clamps = clamps_over(group)
        if isinstance(input, torch.Tensor) and input.is_cuda and not clamps and _has_cuda_backend(group):
            return super().forward(input) if input.numel() else self._without_samples(input)
        tracks = self.track_running_stats
        title = self._title or f"SyncBatchNorm({self.num_features})"
        return _torch.sync_batch_norm(
            input,
            self.num_features,
            self.weight,
            self.bias,
            self.running_mean if tracks else None,
            self.running_var if tracks else None,
            self.num_batches_tracked if tracks else None,
            self.momentum,
            self.eps,
            group,
            title,
            self._title or f"{title} at {self._made_at}",
            clamps,
        )

    def _shape_of(self, input: torch.Tensor) -> torch.Tensor:
        """Returns an output of the right shape, dtype and layout for a tensor without values, even of one sample."""
        self._check_input_dim(input)
        with _torch.SuspendedScope():
            return torch.batch_norm(input, self.weight, self.bias, None, None, True, 0.0, self.eps, False)

    def _without_samples(self, input: torch.Tensor) -> torch.Tensor:
        """Runs torch's own layer. It needs two fixes: its backward omits gradients, and it exchanges 16-bit statistics
        with the float32 ones of its peers."""
        is_16_bit = input.dtype in (torch.float16, torch.bfloat16)
        output = super().forward(input.float() if is_16_bit else input)
        for tensor in input, self.weight, self.bias:
            output = output if tensor is None else output + 0 * tensor.sum()
        return output.to(input.dtype)

    @classmethod
    def convert_sync_batchnorm(cls, module: torch.nn.Module, process_group: Any = None) -> torch.nn.Module:
        """As the function of this name."""
        return convert_sync_batchnorm(module, process_group)


def _line_and_column() -> str:
    """Of the program's call that makes a layer, so that two on one line differ."""
    line: str = _torch.line()
    frame = sys._getframe(2)
    while frame.f_back and f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}" != line:
        frame = frame.f_back
    column: int | None = frame.f_lasti  # Python 3.10 knows the instruction
    if sys.version_info >= (3, 11):
        column = next(itertools.islice(frame.f_code.co_positions(), frame.f_lasti // 2, None))[2]
    return line if column is None else f"{line}:{column}"


def _patch_ddp_layer_check() -> None:
    """torch's DistributedDataParallel refuses every torch.nn.SyncBatchNorm on a CPU."""
    ddp = torch.nn.parallel.DistributedDataParallel
    check = getattr(ddp, "_passing_sync_batchnorm_handle", None)
    if check is None:  # private: another torch may do without
        return

    def check_layers_of_torch(self: Any, module: torch.nn.Module) -> None:
        layers = [layer for layer in module.modules() if isinstance(layer, torch.nn.SyncBatchNorm)]
        if not all(isinstance(layer, SyncBatchNorm) for layer in layers):
            check(self, module)

    ddp._passing_sync_batchnorm_handle = check_layers_of_torch


def _group_or_default(group: Any) -> Any:
    """The world of torch.distributed, if it is initialised and no group is given; None: that of lockstep."""
    if group is None and torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.group.WORLD
    if isinstance(group, int):  # what new_group returns on ranks that are not in the group
        raise UsageError("this rank is not in the process group of the layer or scope")
    return group


def _has_cuda_backend(group: Any) -> bool:
    """Whether to leave CUDA tensors to torch's own SyncBatchNorm. Ours goes through the CPU, as Gloo does."""
    try:
        backend = group._get_backend(torch.device("cuda"))
    except (AttributeError, RuntimeError):
        return False
    return not isinstance(backend, getattr(torch.distributed, "ProcessGroupGloo", ()))


def _is_fake(tensor: torch.Tensor) -> bool:
    """Whether tensor is one of FakeTensorMode."""
    return type(tensor) is not torch.Tensor and hasattr(tensor, "fake_mode")


def _is_tracing() -> bool:
    """Whether torch.export or make_fx traces the operators on tensors; it cannot see ours."""
    proxies = sys.modules.get("torch.fx.experimental.proxy_tensor")  # torch.export and make_fx import it
    return proxies is not None and proxies.get_proxy_mode() is not None


_patch_ddp_layer_check()

_CONVERTIBLE = (_BatchNorm.forward, torch.nn.SyncBatchNorm.forward, SyncBatchNorm.forward)


def convert_sync_batchnorm(module: torch.nn.Module, process_group: Any = None) -> torch.nn.Module:
    """Replaces every BatchNorm in module, torch.nn.SyncBatchNorm included, by a SyncBatchNorm over process_group.

    Returns module, or its replacement if it is itself a BatchNorm. Parameters and buffers remain the same tensors
    (existing optimizers keep working); training flag, requires_grad, hooks and other attributes are kept; a
    module in several places of the tree remains shared. What cannot be replaced is a UsageError that names it,
    and then nothing is: lazy layers before their first forward, TorchScript modules, parametrised layers,
    subclasses with a forward of their own, layers whose forward is replaced on the instance, and layers after
    layer.compile(). SyncBatchNormScope needs no conversion. Not collective.
    """
    return _convert(module, lambda layer: SyncBatchNorm, "convert_sync_batchnorm", process_group)


def _convert(
    module: torch.nn.Module, new_type: Callable[[torch.nn.Module], type[SyncBatchNorm]], function: str, process_group: Any
) -> torch.nn.Module:
    """What `function` does, which makes a new_type(layer) of each layer."""
    targets = {name: layer for name, layer in module.named_modules() if _is_batch_norm(layer)}
    problems = [f"'{name}' ({type(layer).__name__}): {why}" for name, layer in targets.items() if (why := _why_not_convertible(layer))]
    if problems:
        raise UsageError(
            f"{function}: these layers cannot be replaced: "
            + "; ".join(problems)
            + ". Change them, or use a SyncBatchNormScope, which leaves the model as it is"
        )
    replacements = {}
    for name, layer in targets.items():
        new = _copy_as(layer, new_type(layer))
        new.process_group = process_group
        new._title = f"SyncBatchNorm '{name}'" if name else ""
        new.reverts_to = _plain_type(layer)
        replacements[layer] = new
    return _replace(module, replacements)


def revert_sync_batchnorm(module: torch.nn.Module) -> torch.nn.Module:
    """The inverse, with the same rules: each SyncBatchNorm becomes what convert_sync_batchnorm replaced.

    One that was created as such, whose number of dimensions is unknown, becomes a lockstep.nn.BatchNorm.
    """
    replacements = {}
    for layer in module.modules():
        if isinstance(layer, torch.nn.SyncBatchNorm):
            new = _copy_as(layer, _plain_type(layer))
            for name in "process_group", "reverts_to", "_title", "_made_at":
                new.__dict__.pop(name, None)
            replacements[layer] = new
    return _replace(module, replacements)


def _is_batch_norm(module: torch.nn.Module) -> bool:
    name = getattr(module, "original_name", "") if isinstance(module, torch.jit.ScriptModule) else ""
    return isinstance(module, _BatchNorm) or "BatchNorm" in name


def _why_not_convertible(layer: torch.nn.Module) -> str | None:
    if isinstance(layer, torch.jit.ScriptModule):
        return "it is compiled by TorchScript"
    if isinstance(layer, torch.nn.modules.lazy.LazyModuleMixin):
        return "it is lazy; run the model once before"
    if torch.nn.utils.parametrize.is_parametrized(layer):
        return "it is parametrised"
    if type(layer).forward not in _CONVERTIBLE:
        return "it has a forward of its own"
    if "forward" in layer.__dict__:  # a copy of it would run the old layer
        return "its forward is replaced on the instance"
    if getattr(layer, "_compiled_call_impl", None) is not None:
        return "its compile method was called; call it on what converting returns"
    return None


def _plain_type(layer: torch.nn.Module) -> type[_BatchNorm]:
    if isinstance(layer, SyncBatchNorm):
        return layer.reverts_to
    return BatchNorm if isinstance(layer, torch.nn.SyncBatchNorm) else type(layer)


def _copy_as(layer: torch.nn.Module, new_type: type[_BatchNorm]) -> Any:
    """A module of new_type with the parameters, buffers, hooks and attributes of layer.

    The hooks are in the dicts of layer itself, in which their handles remove them.
    """
    new = new_type.__new__(new_type)  # type: ignore[call-overload]
    new.__dict__ = {
        name: value.copy() if name.startswith("_") and "_hooks" not in name and hasattr(value, "copy") else value
        for name, value in layer.__dict__.items()
    }
    return new


def _replace(module: torch.nn.Module, replacements: dict[torch.nn.Module, torch.nn.Module]) -> torch.nn.Module:
    for parent in list(module.modules()):
        for name, child in parent._modules.items():
            if child in replacements:
                parent._modules[name] = replacements[child]
    return replacements.get(module, module)


class SyncBatchNormScope(contextlib.AbstractContextManager["SyncBatchNormScope"]):
    """Within a `with` block, every training-mode batch_norm of this thread is synchronised; the model is not changed.

    From any caller: BatchNorm layers, torch.nn.functional.batch_norm, TorchScript modules. It computes and
    communicates as SyncBatchNorm, and is collective in the same way: all ranks make the same calls in a scope. They are matched
    by order and width alone: layers of one width in another order on one rank are not noticed, as converted ones are.
    backward may run after the block, unless it runs forwards again (torch.utils.checkpoint): then it belongs
    inside the block. A forward that it runs again outside is a UsageError if the weight or running_mean of its
    batch_norm was last used in a scope. If scopes are nested, the innermost applies. What torch.compile has
    compiled runs uncompiled in all threads while there is a scope.
    Blocks may end in any order, as those of generators do; one that ends on another thread than it began on is
    a UsageError, and has ended.
    Not synchronised: eval mode, also of a layer without running statistics, as in SyncBatchNorm (but TorchScript's,
    and functional.batch_norm(training=True) by whatever module); other threads; instance_norm. SyncBatchNorm layers
    keep their own group.
    PyTorch refuses a batch of one value per channel on this rank before the scope sees it (a converted layer takes it).
    """

    def __init__(self, process_group: Any = None) -> None:
        self.process_group = process_group
        self._entered: list[tuple[int, Any]] = []  # the thread, and the scope

    def __enter__(self) -> "SyncBatchNormScope":
        _while_in_scopes.enter()
        try:
            scope = _torch.SyncBatchNormScope(_group_or_default(self.process_group))
        except BaseException:
            _while_in_scopes.exit()
            raise
        self._entered.append((threading.get_ident(), scope))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        here = threading.get_ident()
        own = [place for place, (thread, _) in enumerate(self._entered) if thread == here]
        _, scope = self._entered.pop(own[-1] if own else -1)
        try:
            scope.exit()
        finally:
            _while_in_scopes.exit()
        if isinstance(value, ValueError) and "more than 1 value per channel" in str(value) and hasattr(value, "add_note"):
            value.add_note("in a SyncBatchNormScope PyTorch refuses such a share of the batch; convert_sync_batchnorm takes it")
        if not own:
            raise UsageError("a SyncBatchNormScope was exited on another thread than the one that entered it; it has ended")


class _WhileInScopes:
    """What holds for all threads while there is a scope. Scopes may end in any order: the first begins it, the last ends it.

    torch.compile's stance, because compiled code has no batch_norm that the dispatcher sees. And hooks of all modules:
    a BatchNorm without running statistics calls batch_norm in training mode also in eval mode.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._n_scopes = 0
        self._stance: Any = None
        self._hooks: list[Any] = []
        self._of_thread = threading.local()

    def enter(self) -> None:
        for _, suspended in self._of_thread.__dict__.pop("suspended", []):
            suspended.exit()  # the last scope ended on another thread in the middle of a forward of this one
        with self._lock:
            if self._n_scopes == 0:
                self._stance = torch.compiler.set_stance("force_eager")
                hooks = torch.nn.modules.module
                self._hooks = [
                    hooks.register_module_forward_pre_hook(self._suspend),
                    hooks.register_module_forward_hook(self._resume, always_call=True),
                ]
            self._n_scopes += 1

    def exit(self) -> None:
        with self._lock:
            self._n_scopes -= 1
            if self._n_scopes == 0:
                for hook in self._hooks:
                    hook.remove()
                self._stance.__exit__(None, None, None)

    def _suspend(self, module: torch.nn.Module, _: Any) -> None:
        if isinstance(module, _BatchNorm) and not module.training and module.running_mean is None:
            self._of_thread.__dict__.setdefault("suspended", []).append((module, _torch.SuspendedScope()))

    def _resume(self, module: torch.nn.Module, *_: Any) -> None:
        suspended = self._of_thread.__dict__.get("suspended")
        if suspended and suspended[-1][0] is module:
            suspended.pop()[1].exit()


_while_in_scopes = _WhileInScopes()
