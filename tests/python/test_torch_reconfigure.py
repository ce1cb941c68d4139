"""torch.distributed._reconfigure, from PyTorch 2.15: one process group, whose ranks change."""

import os
import signal
from datetime import timedelta

import pytest
from ranks import on_ranks, raises, survives

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402

import lockstep as ls  # noqa: E402

if not hasattr(dist, "_reconfigure"):
    pytest.skip("PyTorch before 2.15 has no torch.distributed._reconfigure", allow_module_level=True)

STORE = "reconfigure.store"


def start(n=3):
    """The number of this process, which its ranks need not be, and the store."""
    number, store = int(os.environ["RANK"]), dist.FileStore(STORE, n)
    dist.init_process_group("lockstep", store=store, rank=number, world_size=n, timeout=timedelta(seconds=30), enable_reconfigure=True)
    return number, store


def handles(store, key, numbers):
    """Of the processes with these numbers, each of which calls this."""
    store.set(f"{key}/{os.environ['RANK']}", dist._get_reconfigure_handle())
    return [store.get(f"{key}/{number}").decode() for number in numbers]


def sum_of_ranks():
    x = torch.tensor([float(dist.get_rank() + 1)])
    dist.all_reduce(x)
    return x.item()


@on_ranks(3, init=None, shares=False)
def test_ranks_leave_and_come_back():
    number, store = start()
    with raises(ls.UsageError, "has no ranks before torch.distributed._reconfigure has returned"):
        dist.all_reduce(torch.ones(1))
    everyone = handles(store, "all", range(3))
    dist._reconfigure(1, everyone).wait()
    assert (dist.get_rank(), dist.get_world_size(), sum_of_ranks()) == (number, 3, 6)
    layer = ls.nn.convert_sync_batchnorm(torch.nn.BatchNorm1d(2))
    layer(torch.randn(4, 2))
    if number != 1:  # in the other order
        dist._reconfigure(2, [everyone[2], everyone[0]]).wait()
        assert (dist.get_rank(), dist.get_world_size(), sum_of_ranks()) == (number == 0, 2, 3)
        received = torch.zeros(1)
        if number == 0:
            dist.send(torch.tensor([7.0]), 0)
        else:
            dist.recv(received, 1)
            assert received.item() == 7
        dist.monitored_barrier()
    else:
        dist._reconfigure(3, [everyone[1]]).wait()
        assert (dist.get_rank(), dist.get_world_size(), sum_of_ranks()) == (0, 1, 1)
    dist._reconfigure(4, set(everyone)).wait()
    assert dist.get_rank() == sorted(everyone).index(everyone[number]) and sum_of_ranks() == 6


@on_ranks(3, init=None, shares=False)
def test_what_is_refused():
    number, store = start()
    everyone = handles(store, "all", range(3))
    with raises(ls.UsageError, f"the handle of this process, {everyone[number]}, is not among the 2 given"):
        dist._reconfigure(1, [handle for handle in everyone if handle != everyone[number]])
    dist._reconfigure(2, everyone).wait()
    with raises(ls.UsageError, "uuid 2 was already used in this process group"):
        dist._reconfigure(2, everyone)
    assert sum_of_ranks() == 6  # the group stays
    with raises(ls.UsageError, "made without enable_reconfigure=True"):
        dist.new_group([0, 1, 2]).reconfigure(dist.distributed_c10d.ReconfigureOptions())


@on_ranks(3, init=None, shares=False)
def test_a_backward_in_another_group_than_the_forward():
    number, store = start()
    everyone = handles(store, "all", range(3))
    dist._reconfigure(1, everyone).wait()
    layer = ls.nn.convert_sync_batchnorm(torch.nn.BatchNorm1d(2), dist.group.WORLD)
    for uuid, others in (2, everyone), (3, everyone[:2]):
        loss = layer(torch.randn(4, 2, requires_grad=True)).square().sum()
        if number == 2 and uuid == 3:
            return
        dist._reconfigure(uuid, others).wait()
        with raises(ls.UsageError, "the process group was reconfigured after the forward of this layer: repeat the step"):
            loss.backward()
        layer(torch.randn(4, 2, requires_grad=True)).square().sum().backward()


@on_ranks(3, init=None, shares=False, code=137, returned=2)
def test_going_on_after_a_killed_rank():
    number, store = start()
    everyone = handles(store, "all", range(3))
    dist._reconfigure(1, everyone).wait()
    assert sum_of_ranks() == 6
    if number == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with survives(ls.PeerLost, "rank 1"):
        while True:
            dist.all_reduce(torch.ones(1))
    with raises(ls.PeerLost, "rank 1"):  # a dead group stays dead
        dist.all_reduce(torch.ones(1))
    dist._reconfigure(2, [everyone[0], everyone[2]]).wait()
    assert (dist.get_world_size(), sum_of_ranks()) == (2, 3)


@on_ranks(3, init=None, shares=False)
def test_a_process_that_does_not_come():
    number, store = start()
    everyone = handles(store, "all", range(3))
    if number == 2:
        store.get("done/0"), store.get("done/1")
        dist._reconfigure(2, everyone).wait()
    else:
        with raises(ls.TimeoutError, "rank 2"):
            dist._reconfigure(1, everyone, timeout=timedelta(seconds=1))
        with raises(ls.UsageError, "has no ranks before"):
            dist.all_reduce(torch.ones(1))
        store.set(f"done/{number}", "")
        dist._reconfigure(2, everyone).wait()
    assert sum_of_ranks() == 6
