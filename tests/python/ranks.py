"""What the bodies of ranks use: functions of the test modules, which run_ranks has called in each rank."""

import atexit
import contextlib
import copy
import functools
import inspect
import itertools
import os
import signal
import time
from pathlib import Path


def init_dist():
    """The default group is that of lockstep."""
    import lockstep

    lockstep.init_dist(timeout=60)
    return {"rank": lockstep.get_rank(), "size": lockstep.get_world_size()}


def init_torch():
    """The default group is torch's, over the backend lockstep."""
    import torch.distributed as dist

    dist.init_process_group("lockstep")
    return {"rank": dist.get_rank(), "size": dist.get_world_size()}


def on_ranks(n, **options):
    """Makes a test of the body of n ranks. Its parameters but `rank` and `size` are those of the test; options: run_ranks."""

    def make(body):
        @functools.wraps(body)
        def test(run_ranks, **arguments):
            run_ranks(n, test, **options, **arguments)

        names = ["run_ranks", *(name for name in inspect.signature(body).parameters if name not in ("rank", "size"))]
        parameters = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in names]
        test.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return test

    return make


on_torch_ranks = functools.partial(on_ranks, init=init_torch)


def wait_for(path):
    """Until another rank has made it."""
    while not os.path.exists(path):
        time.sleep(0.01)


def show_pid():
    """To interrupt_when_it_waits in another rank."""
    Path("pid.new").write_text(str(os.getpid()))
    os.rename("pid.new", "pid")


def interrupt_when_it_waits():
    """Where it has slept at 20 looks in turn: on the way to the call a thread that starts, or a lock, lets it sleep, too."""
    wait_for("pid")
    pid = int(Path("pid").read_text())
    n_asleep = 0
    while n_asleep < 20:
        n_asleep = 0 if Path(f"/proc/{pid}/wchan").read_text() == "0" else n_asleep + 1
        time.sleep(0.01)
    os.kill(pid, signal.SIGINT)


def here(n_lines):
    """The place in the caller's file n lines below the call, as errors name it."""
    frame = inspect.currentframe().f_back
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno + n_lines}"


def place_of(function):
    """The place of a function's first line, likewise."""
    return f"{os.path.basename(function.__code__.co_filename)}:{function.__code__.co_firstlineno}"


def in_a_file(rank, name="store"):
    """For a second default group of two ranks a store of its own.

    Rank 0's server of the first one ends with that group, at a moment that the other ranks do not know: one that asks it
    for the second group loses the connection.
    """
    return {"init_method": f"file://{os.getcwd()}/{name}", "rank": rank, "world_size": 2}


class raises:
    """with raises(Error, *checks): an error of this class, whose text has each check, or that each check is true of."""

    def __init__(self, error, *checks):
        self.error, self.checks = error, checks

    def __enter__(self):
        return self

    def __exit__(self, kind, error, _):
        self.caught = error
        assert kind is not None, f"no {self.error}"
        if not isinstance(error, self.error):
            return False
        if getattr(error, "lineno", None):
            assert f"{os.path.basename(error.filename)}:{error.lineno}" in str(error), (error.filename, error.lineno, error)
        for check in self.checks:
            assert check in str(error) if isinstance(check, str) else check(error), (check, error)
        return True


class survives(raises):
    """raises, in a rank that `lockstep run` would end a second after another one has failed."""

    def __enter__(self):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


def close(actual, expected, tolerance, what, dtype=None):
    """Relative where the expected values are large."""
    import torch

    if expected is None or expected.dtype is torch.int64:
        assert (actual is None) if expected is None else torch.equal(actual, expected), what
        return
    assert actual.dtype == (dtype or expected.dtype), (what, actual.dtype)
    assert actual.device.type in ("cpu", expected.device.type), (what, actual.device)
    actual, expected = actual.double().cpu(), expected.double().cpu()
    scale = max(1, expected.abs().max().item()) if expected.numel() else 1
    error = (actual - expected).abs().max().item() if expected.numel() else 0
    assert error <= tolerance * scale, (what, error)


class OverRanks:
    """Which part of each batch this rank has, and how sums over ranks are made: `sum_over_ranks(tensor)`, in place."""

    def __init__(self, rank, sum_over_ranks, barrier=None):
        self.rank, self.sum_over_ranks, self.barrier = rank, sum_over_ranks, barrier

    def compare(self, plain, layer, counts, *shape, run=None, dtype=None, layout=None, tolerance=1e-9, of_state=None,
                of_sums=None, n_steps=2, scope=contextlib.nullcontext):  # fmt: skip
        """`layer` over the ranks, which have `counts` samples, does what `plain` does with the whole batch.

        run: how `layer` is called, if otherwise. of_state, of_sums: tolerance of buffers, and of sums of gradients.
        """
        import torch

        dtype, layout = dtype or torch.float64, layout or torch.contiguous_format
        reference = next(itertools.chain(plain.parameters(), plain.buffers()))
        for _ in range(n_steps):
            batch = (torch.randn(sum(counts), *shape, dtype=torch.float64) * 3 + 7).to(reference.device, dtype)
            whole = batch.to(reference.dtype, copy=True).requires_grad_()
            expected = plain(whole)
            gradient = torch.randn_like(expected).to(dtype)
            expected.backward(gradient.to(expected.dtype))
            mine = batch.split(counts)[self.rank].contiguous(memory_format=layout).requires_grad_()
            with scope():
                actual = (layer if run is None else run)(mine)
                assert actual.is_contiguous(memory_format=layout), "output"
                actual.backward(gradient.split(counts)[self.rank])
            assert mine.grad.is_contiguous(memory_format=layout), "gradient"
            close(actual, expected.split(counts)[self.rank], tolerance, "output", dtype)
            close(mine.grad, whole.grad.split(counts)[self.rank], tolerance, "gradient", dtype)
        for name, parameter in layer.named_parameters():
            total = parameter.grad.cpu()
            if total is parameter.grad:
                total = total.clone()
            self.sum_over_ranks(total)
            close(total, plain.get_parameter(name).grad, of_sums or tolerance, name, parameter.dtype)
        assert layer.state_dict().keys() == plain.state_dict().keys()
        for name, buffer in layer.named_buffers():
            close(buffer, plain.get_buffer(name), of_state or tolerance, name, buffer.dtype)


# What the messages of layers go through: a lockstep.Group, or a process group of Gloo or of lockstep.
WORLDS = ["no torch.distributed", "gloo", "lockstep"]


def on_worlds(n, worlds=WORLDS, **options):
    """on_ranks for each of the worlds, which the body joins."""
    import pytest

    return lambda body: pytest.mark.parametrize("world", worlds)(on_ranks(n, init=None, **options)(body))


def join(world):
    """One of WORLDS, for layers over its ranks."""
    import torch
    import torch.distributed as dist

    import lockstep

    torch.set_num_threads(1)
    torch.manual_seed(0)
    if world == "no torch.distributed":
        lockstep.init_dist(timeout=60)
        return OverRanks(lockstep.get_rank(), lockstep.all_reduce, lockstep.barrier)
    dist.init_process_group(world)
    atexit.register(dist.destroy_process_group)  # without it torch may end a process with std::terminate
    return OverRanks(dist.get_rank(), dist.all_reduce, dist.barrier)


def own_group(*parts):
    """Of the groups of these ranks that of this rank: of torch.distributed if it is initialised, else of lockstep."""
    import torch.distributed as dist

    import lockstep

    own = next(i for i, part in enumerate(parts) if (dist if dist.is_initialized() else lockstep).get_rank() in part)
    return [dist.new_group(part) for part in parts][own] if dist.is_initialized() else lockstep.default_group().split(own)


def state_of(net):
    return net.state_dict()


def sgd(module):
    import torch

    return torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)


def compare_training(first, wrap, batches, optimizer=None, scope=contextlib.nullcontext, tolerance=1e-9, read=state_of):
    """Ranks of torch.distributed with their samples of each batch train `first` as one rank does with all.

    wrap(net): the module that the ranks train. optimizer(module): theirs. read(module): its state, without prefixes.
    """
    import torch
    import torch.distributed as dist

    rank, size = dist.get_rank(), dist.get_world_size()

    def train(module, steps, samples, scope):
        for batch in batches:
            steps.zero_grad()
            with scope():
                module(batch[samples]).square().mean().backward()
            steps.step()

    alone = copy.deepcopy(first)
    train(alone, sgd(alone), slice(None), contextlib.nullcontext)
    module = wrap(first)
    train(module, (optimizer or sgd)(module), slice(rank, None, size), scope)
    state, expected = read(module), alone.state_dict()
    assert state.keys() == expected.keys(), state.keys()
    for name, value in state.items():
        error = (value - expected[name]).abs().max().item()
        assert error <= tolerance, (name, error)
        assert value.device == expected[name].device, name
        if size > 1:
            parts = [torch.empty_like(value, device="cpu") for _ in range(size)]
            dist.all_gather(parts, value.cpu().contiguous())
            assert all(torch.equal(part, parts[0]) for part in parts), name
