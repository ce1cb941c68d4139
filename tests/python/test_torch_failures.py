"""What a rank of torch.distributed hears when another one fails, and what ends a wait."""

import glob
import os
import resource
import signal
import sys
import threading
from datetime import timedelta
from pathlib import Path

import pytest
from conftest import TORCHRUN
from ranks import (
    here,
    in_a_file,
    init_torch,
    interrupt_when_it_waits,
    on_ranks,
    on_torch_ranks,
    raises,
    show_pid,
    survives,
    wait_for,
)

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

import lockstep as ls  # noqa: E402


@on_torch_ranks(2)
def test_errors_name_the_line_of_the_program(rank):
    with raises(ls.UsageError, "PREMUL_SUM", here(1)):
        dist.all_reduce(torch.ones(2), dist._make_nccl_premul_sum(2.0))
    with raises(ls.MismatchError, here(2), here(4)):
        if rank:
            dist.all_reduce(torch.ones(2))
        else:
            dist.broadcast(torch.ones(2), 0)


@on_torch_ranks(2)
def test_errors_of_async_calls(rank):
    if rank:
        work = dist.all_reduce(torch.ones(2), async_op=True)
    else:
        work = dist.all_reduce(torch.ones(3), async_op=True)
    with raises(ls.MismatchError, here(-3), here(-1)):
        work.wait()
    assert not work.is_success()


@on_torch_ranks(2)
def test_the_limit_of_a_call_covers_the_wait_for_posted_ones(rank):
    options = dist.AllreduceOptions()
    options.timeout = timedelta(milliseconds=200)
    options.asyncOp = False
    said = f"rank 0 waited 0.2 s for its own all_reduce, posted at {here(2)}, which has not ended"
    if rank == 0:
        work = dist.all_reduce(torch.ones(1), async_op=True)
        with raises(ls.TimeoutError, said, here(1)):
            dist.group.WORLD.allreduce([torch.ones(1)], options)
        Path("over").touch()
        with raises(ls.PeerFailed):
            work.wait()
    else:
        wait_for("over")
        with raises(ls.PeerFailed, said):
            dist.barrier()


@on_torch_ranks(2)
def test_a_late_rank_is_named(rank):
    group = dist.new_group(timeout=timedelta(seconds=1))
    if rank == 0:
        with raises(ls.TimeoutError, "waited 1 s for rank 1", here(1)):
            dist.all_reduce(torch.ones(1), group=group)
        Path("late").touch()
    else:
        wait_for("late")
    dist.barrier()


@on_torch_ranks(2, code=1, returned=1)
def test_the_exception_of_a_rank_reaches_the_others(rank):
    with survives(ls.PeerFailed, "rank 1 failed: ValueError: no more data", here(3)):
        if rank == 1:
            raise ValueError("no more data")
        dist.all_reduce(torch.ones(1))


@on_torch_ranks(2, code=1, returned=1)
def test_the_exception_of_a_rank_reaches_a_future_of_the_others(rank):
    with survives(ls.PeerFailed, "rank 1 failed: ValueError: no more data", here(3)):
        if rank == 1:
            raise ValueError("no more data")
        dist.all_reduce(torch.ones(1), async_op=True).get_future().wait()


WAITS = {"barrier": lambda rank: dist.barrier(), "recv": lambda rank: dist.recv(torch.ones(1), 1 - rank, tag=rank)}


@pytest.mark.parametrize("wait", WAITS)
@on_torch_ranks(2)
def test_an_interrupt_ends_a_wait(rank, wait):
    dist.barrier()
    if rank == 0:
        show_pid()
        with raises(KeyboardInterrupt):
            WAITS[wait](rank)
        Path("interrupted").touch()
    else:
        interrupt_when_it_waits()
        wait_for("interrupted")
        with raises(ls.PeerFailed, "KeyboardInterrupt"):
            WAITS[wait](rank)


@on_torch_ranks(2)
def test_fork_is_not_a_rank():
    dist.all_reduce(torch.ones(1), async_op=True).wait()
    child = os.fork()
    if child == 0:
        for is_async in False, True:
            try:
                dist.all_reduce(torch.ones(1), async_op=is_async)
                os._exit(1)
            except ls.UsageError as error:
                assert "fork" in str(error)
        sys.exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    dist.barrier()


@on_torch_ranks(2)
def test_messages_that_do_not_fit(rank):
    group = dist.new_group(timeout=timedelta(seconds=1))
    with raises(ls.MismatchError, "rank 1 sends 2 elements of f32, rank 0 receives 3 elements of f32", here(4 - 2 * rank)):
        if rank:
            dist.send(torch.ones(2), 0, group=group)
        else:
            dist.recv(torch.ones(3), 1, group=group)
    with raises(ls.TimeoutError, "rank 0 to receive (tag 1)" if rank else "rank 1 to send (tag 2)"):
        if rank:
            dist.send(torch.ones(2), 0, group=group, tag=1)
        else:
            dist.recv(torch.ones(2), 1, group=group, tag=2)
    x = torch.full((1,), float(rank))
    if rank:
        dist.send(x, 0, group=group)
    else:
        dist.recv(x, 1, group=group)
    assert x.item() == 1


@on_torch_ranks(2)
def test_a_message_that_a_fork_asks_for(rank):
    x = torch.zeros(1)
    before = dist.irecv(x, 1) if rank == 0 else None
    child = os.fork()
    if child == 0:
        for call in (lambda: dist.send(x, 1 - rank), lambda: before.wait() if before else dist.recv(x, 0)):
            try:
                call()
                os._exit(1)
            except ls.UsageError as error:
                assert "fork" in str(error)
        del before
        os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    if rank:
        dist.send(torch.ones(1), 0)
    else:
        before.wait()
    assert x.item() == 1 - rank


@pytest.mark.skipif(
    "libasan" in os.environ.get("LD_PRELOAD", ""),
    reason="UndefinedBehaviorSanitizer needs a descriptor",
)
@on_torch_ranks(2, shares=False)
def test_a_group_without_descriptors():
    resource.setrlimit(resource.RLIMIT_NOFILE, (200, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    taken = []
    try:
        while True:
            taken.append(os.dup(0))
    except OSError:
        pass
    with raises(ls.EngineError, "Too many open files", here(1)):
        dist.new_group()
    for each in taken:
        os.close(each)
    dist.barrier(dist.new_group())


@on_torch_ranks(2)
def test_a_timeout_of_ages(rank):
    ages = timedelta(days=365 * 1000)  # in ns more than 64 bits
    group = dist.new_group(timeout=ages)
    x = torch.ones(1)
    for _ in range(20):
        dist.all_reduce(x, group=group)
    assert x.item() == 2**20
    dist.monitored_barrier(group, timeout=ages)
    if rank:
        dist.send(x, 0, group=group)
    else:
        dist.irecv(x, 1, group=group).wait(ages)


@on_torch_ranks(2, code=3, returned=1)
def test_a_message_from_a_rank_that_left(rank):
    x = torch.ones(1)
    if rank:
        dist.send(x, 0)
        os._exit(3)
    with survives(ls.PeerLost, "rank 1", here(2)):
        dist.recv(x, 1)
        dist.recv(x, 1)


def loss_of_ddp():
    model = DistributedDataParallel(torch.nn.Linear(4, 4))
    return model, model(torch.ones(2, 4)).sum()


def loss_of_fsdp():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = fully_shard(torch.nn.Linear(4, 4), mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return model, model(torch.ones(2, 4)).sum()


@pytest.mark.parametrize("loss_of", [loss_of_ddp, loss_of_fsdp])
@on_torch_ranks(2, code=1, returned=1)
def test_a_rank_fails_while_another_is_in_backward(rank, loss_of):
    _model, loss = loss_of()  # which acts as long as it is there
    with survives(ls.PeerFailed, "rank 1 failed: ValueError: bad batch", here(3)):
        if rank == 1:
            raise ValueError("bad batch")
        loss.backward()


@on_torch_ranks(3, code=128 + 9, returned=2)
def test_monitored_barrier_names_a_dead_rank(rank):
    with survives(ls.PeerLost, "Rank 1 failed to pass", here(3)):
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.monitored_barrier()


@on_ranks(2, init=None, shares=False)
def test_a_rank_that_cannot_write_its_trace_tells_the_others_why():
    rank = int(os.environ["RANK"])
    if rank == 1:
        os.environ["LOCKSTEP_TRACE"] = "/proc"  # no files are made there
    with survives(ls.Error if rank == 1 else ls.PeerFailed, "/proc/rank-1"):
        dist.init_process_group("lockstep")
        dist.barrier()


@on_ranks(1, init=None, launcher=[], returned=1)
def test_a_fork_after_a_group_was_destroyed():
    def train():
        dist.init_process_group("lockstep", init_method="lockstep://")
        x = torch.ones(3)
        dist.all_reduce(x, async_op=True).wait()
        assert x.tolist() == [1, 1, 1]

    def threads():
        return [name for path in glob.glob("/proc/self/task/*/comm") if "lockstep" in (name := Path(path).read_text())]

    train()
    assert threads() == ["lockstep-comm\n"], threads()
    dist.destroy_process_group()
    assert not threads(), threads()
    for is_destroyed in True, False:
        if not is_destroyed:
            train()
        child = os.fork()
        if child == 0:
            if not is_destroyed:
                dist.destroy_process_group()
            train()
            dist.destroy_process_group()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0


@on_torch_ranks(3, shares=False)
def test_new_group_notices_that_a_rank_has_ended(rank):
    if rank == 2:
        os._exit(0)
    if rank == 1:
        with raises(ls.PeerLost, "rank 1 ended and did not join init_process_group or new_group", here(1)):
            dist.new_group([1, 2])
        Path("heard").touch()
    wait_for("heard")  # rank 0 has the store


@on_torch_ranks(2, env={"LOCKSTEP_TIMEOUT": "1"})
def test_new_group_obeys_the_limit(rank):
    if rank == 0:
        with raises(ls.TimeoutError, "rank 1 did not join init_process_group or new_group", "1000 ms"):
            dist.new_group()
        Path("late").touch()
    wait_for("late")


@on_torch_ranks(2, env={"LOCKSTEP_TIMEOUT": "100"})
def test_the_programs_timeout_wins_over_the_environments(rank):
    dist.destroy_process_group()
    dist.init_process_group("lockstep", **in_a_file(rank), timeout=timedelta(seconds=1))
    if rank == 0:
        with raises(ls.TimeoutError, "waited 1 s for rank 1"):
            dist.barrier()
        Path("late").touch()
    wait_for("late")


def barrier(group, is_there):
    is_there.set()
    dist.barrier(group)


def wait(group, is_there):
    work = dist.all_reduce(torch.ones(1), group=group, async_op=True)
    is_there.set()
    work.wait()


def call_in_a_daemon(rank, call):
    group = dist.new_group([0, 1])
    is_there = threading.Event()
    if rank == 0:
        threading.Thread(target=call, args=(group, is_there), daemon=True).start()
        is_there.wait()
    dist.barrier()


@pytest.mark.parametrize("call", [barrier, wait])
def test_a_daemon_in_a_call_when_python_ends(run_ranks, call):
    """In ours: torch itself ends the process where its own functions take the GIL when Python has ended."""
    for _ in range(5):
        run_ranks(2, call_in_a_daemon, call=call, init=init_torch, shares=False)


@on_ranks(2, init=None, launcher=TORCHRUN)  # `lockstep run` keeps the store itself
def test_rank_0_cannot_open_its_store():
    def refuse(*arguments, **options):
        if options.get("is_master"):
            raise RuntimeError("no port is free")
        return store(*arguments, **options)

    store, dist.TCPStore = dist.TCPStore, refuse
    with raises(ls.EngineError, "rank 0 cannot open its store at ", "no port is free"):
        dist.init_process_group("lockstep", init_method="lockstep://")
