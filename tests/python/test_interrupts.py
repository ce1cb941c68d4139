"""A handler of a signal that raises, in each phase of a call: what the rank gets, what the others get, and what is then."""

import collections
import ctypes
import functools
import signal
from pathlib import Path

import pytest
from ranks import WORLDS, interrupt_when_it_waits, join, on_ranks, on_torch_ranks, raises, show_pid, wait_for

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402

import lockstep as ls  # noqa: E402
import lockstep.nn  # noqa: E402

# Signals in C, so that no Python code runs, and with it the handler, before the call of C that follows.
raise_in_c, raise_in_a_gradient = ctypes.CDLL(None)["raise"], ctypes.CDLL(None)["raise"]
raise_in_c.restype, raise_in_a_gradient.restype = float, None
kick, in_a_gradient = (functools.partial(each, signal.SIGUSR1) for each in (raise_in_c, raise_in_a_gradient))


class AtRead:
    __float__ = kick


def call_in_turn(*steps):
    collections.deque(map(functools.partial.__call__, map(functools.partial, steps)), 0)


def set_handler():
    def stop(*_):
        raise ZeroDivisionError("stopped")

    torch.Tensor._as_parameter_ = 0  # hooks call it with a tensor more
    signal.signal(signal.SIGUSR1, stop)


def forward(layer, x, with_signal):
    if with_signal:
        layer.eps = AtRead()
    return lambda: layer(x)


def backward(layer, x, with_signal):
    y = layer(x)
    if with_signal:
        y.register_hook(in_a_gradient)
    return lambda: y.sum().backward()


def second_backward(layer, x, with_signal):
    (gradient,) = torch.autograd.grad(layer(x).pow(2).sum(), x, create_graph=True)
    if with_signal:
        gradient.register_hook(in_a_gradient)
    return lambda: gradient.pow(2).sum().backward()


PHASES = {"forward": forward, "backward": backward, "second backward": second_backward}


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("world", WORLDS)
@on_ranks(2, init=None)
def test_before_a_message_of_a_layer(world, phase):
    """Over Gloo, whose waits no signal ends, the handler runs when the layer has done its part."""
    rank = join(world).rank
    if rank == 0:
        set_handler()
    layer = ls.nn.SyncBatchNorm(3, dtype=torch.float64)
    x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    layer(x).sum().backward()
    again = ls.nn.SyncBatchNorm(3, dtype=torch.float64)
    act = PHASES[phase](layer, x, with_signal=rank == 0)
    if rank == 0:
        with raises(ZeroDivisionError, "stopped"):
            act()
    elif world == "gloo":
        act()
    else:
        with raises(ls.Error, "rank 0", "ZeroDivisionError: stopped"):
            act()
    if world == "gloo":
        again(x).sum().backward()
    else:
        with raises(ls.Error, "ZeroDivisionError: stopped"):
            again(x)


def blocking(options):
    options.asyncOp = False
    return options


CALLS = {
    "all_reduce": lambda group: functools.partial(group.allreduce, [torch.ones(1)], blocking(dist.AllreduceOptions())),
    "barrier": lambda group: functools.partial(group.barrier, blocking(dist.distributed_c10d.BarrierOptions())),
}


@pytest.mark.parametrize("call", CALLS)
@on_torch_ranks(2)
def test_before_a_call_that_blocks(rank, call):
    """It is a refused call: the group goes on if the others refuse theirs, and they learn of it if not."""
    act = CALLS[call](dist.group.WORLD)
    dist.barrier()
    if rank == 0:
        set_handler()
        with raises(ZeroDivisionError, "stopped"):
            call_in_turn(kick, act)
        with raises(ls.MismatchError, "ZeroDivisionError: stopped"):
            dist.barrier()
    else:
        with raises(ls.MismatchError, f"refused {call}", "ZeroDivisionError: stopped"):
            act()


@on_torch_ranks(2)
def test_before_a_wait(rank):
    """The call goes on, and so does the group."""
    x = torch.ones(1)
    if rank == 0:
        set_handler()
        work = dist.all_reduce(x, async_op=True)
        with raises(ZeroDivisionError, "stopped"):
            call_in_turn(kick, work.wait)
        Path("interrupted").touch()
        work.wait()
    else:
        wait_for("interrupted")
        dist.all_reduce(x)
    assert x.item() == 2
    dist.barrier()


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("world", [world for world in WORLDS if world != "gloo"])
@on_ranks(2, init=None)
def test_ctrl_c_ends_the_wait_of_a_layer(world, phase):
    rank = join(world).rank
    layer = ls.nn.SyncBatchNorm(3, dtype=torch.float64)
    x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    act = PHASES[phase](layer, x, with_signal=False)
    torch.ones(1, requires_grad=True).sum().backward()  # the first one may sleep while torch prepares it
    if rank == 0:
        show_pid()
        with raises(KeyboardInterrupt):
            act()
        Path("interrupted").touch()
    else:
        interrupt_when_it_waits()
        wait_for("interrupted")
        with raises(ls.PeerFailed, "rank 0 failed: KeyboardInterrupt"):
            act()
    with raises(ls.PeerFailed, "rank 0 failed: KeyboardInterrupt"):
        layer(x)
