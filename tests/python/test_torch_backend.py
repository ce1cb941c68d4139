"""The operations of torch.distributed over the backend lockstep, in real processes."""

import contextlib
import ctypes
import datetime
import os
import platform
import struct
import threading
import time
import warnings
from pathlib import Path

import pytest
from ranks import here, in_a_file, init_torch, on_ranks, on_torch_ranks, raises, wait_for

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402

import lockstep as ls  # noqa: E402


@on_torch_ranks(3)
def test_collectives(rank, size):
    assert "lockstep" in str(dist.get_backend()) and size == 3

    def full(value, n=4, dtype=torch.float32):
        return torch.full((n,), value, dtype=dtype)

    def is_all(x, value):
        return bool((x == value).all())

    for dtype in [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16,
                  torch.bfloat16, torch.float32, torch.float64, torch.complex64]:  # fmt: skip
        for op, expected in [
            (dist.ReduceOp.SUM, 6),
            (dist.ReduceOp.AVG, 2),
            (dist.ReduceOp.PRODUCT, 6),
            (dist.ReduceOp.MIN, 1),
            (dist.ReduceOp.MAX, 3),
        ]:
            if dtype.is_complex and op != dist.ReduceOp.SUM:
                continue
            x = full(rank + 1, dtype=dtype)
            assert dist.all_reduce(x, op) is None and is_all(x, expected), (dtype, op, x)
    flags = torch.tensor([rank == 1, True, False])
    dist.all_reduce(flags)
    assert flags.tolist() == [True, True, False]
    bits = full(1 << rank, dtype=torch.int32)
    dist.all_reduce(bits, dist.ReduceOp.BOR)
    assert is_all(bits, 7)
    columns = torch.arange(6.0).reshape(2, 3).t()
    dist.all_reduce(columns)
    assert torch.equal(columns, 3 * torch.arange(6.0).reshape(2, 3).t())
    parameter = torch.nn.Parameter(torch.ones(3, 2).t())
    dist.broadcast(parameter, 0)

    x = full(float(rank))
    dist.broadcast(x, 2)
    assert is_all(x, 2)
    x = full(rank + 1.0)
    dist.reduce(x, 1)
    assert is_all(x, 6 if rank == 1 else rank + 1)

    parts = [full(-1.0, 2) for _ in range(size)]
    dist.all_gather(parts, full(float(rank), 2))
    assert [p[0].item() for p in parts] == [0, 1, 2]
    parts = [full(-1.0, r + 1) for r in range(size)]  # sizes may differ
    dist.all_gather(parts, full(float(rank), rank + 1))
    assert [p.tolist() for p in parts] == [[0], [1, 1], [2, 2, 2]]
    out = full(-1.0, 6)
    dist.all_gather_into_tensor(out, full(float(rank), 2))
    assert out.tolist() == [0, 0, 1, 1, 2, 2]
    out[2 * rank : 2 * rank + 2] = rank + 5
    dist.all_gather_into_tensor(out, out[2 * rank : 2 * rank + 2])  # in place, as FSDP does
    assert out.tolist() == [5, 5, 6, 6, 7, 7]
    flags8 = [torch.zeros(2, dtype=torch.float8_e4m3fn) for _ in range(size)]
    dist.all_gather(flags8, torch.full((2,), float(rank)).to(torch.float8_e4m3fn))
    assert [p[1].float().item() for p in flags8] == [0, 1, 2]

    parts = [full(-1.0, 2) for _ in range(size)] if rank == 1 else None
    dist.gather(full(float(rank), 2), parts, dst=1)
    assert rank != 1 or [p[0].item() for p in parts] == [0, 1, 2]
    x = full(-1.0, 2)
    dist.scatter(x, [full(float(r), 2) for r in range(size)] if rank == 2 else None, src=2)
    assert is_all(x, rank)

    x = full(-1.0, 2)
    dist.reduce_scatter(x, [full(float(r), 2) for r in range(size)])
    assert is_all(x, 3 * rank)
    x = full(-1.0, rank + 1)
    dist.reduce_scatter(x, [full(float(r), r + 1) for r in range(size)])
    assert is_all(x, 3 * rank)
    x = full(-1.0, 2)
    dist.reduce_scatter_tensor(x, torch.arange(6.0), dist.ReduceOp.AVG)
    assert x.tolist() == [2 * rank, 2 * rank + 1]

    out = full(-1.0, 3)
    dist.all_to_all_single(out, torch.arange(3.0) + 10 * rank)
    assert out.tolist() == [rank, 10 + rank, 20 + rank]
    sent = [torch.full((r,), 10.0 * rank + r) for r in range(size)]  # r elements to rank r
    out = torch.empty(rank * size)
    dist.all_to_all_single(out, torch.cat(sent), [rank] * size, list(range(size)))
    assert out.tolist() == [10 * r + rank for r in range(size) for _ in range(rank)]
    parts = [torch.empty(rank) for _ in range(size)]
    dist.all_to_all(parts, sent)
    assert [p.tolist() for p in parts] == [[10 * r + rank] * rank for r in range(size)]

    xs = [full(rank + 1.0), full(rank + 1.0, 2)]
    dist.all_reduce_coalesced(xs)
    assert is_all(xs[0], 6) and is_all(xs[1], 6)
    objects = [None] * size
    dist.all_gather_object(objects, {"rank": rank})
    assert [o["rank"] for o in objects] == [0, 1, 2]
    dist.barrier()


@on_torch_ranks(3)
def test_lists_of_temporaries_views_and_results(rank, size):
    def values(parts):
        return [set(p.flatten().tolist()) for p in parts]

    for n in 2, 1000:

        def square(value, n=n):
            return torch.full((n, n), float(value))

        x = square(-1)
        work = dist.reduce_scatter(x, [square(1) * r for r in range(size)], async_op=True)
        others = [square(7) for _ in range(2 * size)]  # noqa: F841 - where the inputs were, if nobody keeps them
        work.wait()
        assert values([x]) == [{3 * rank}]
        columns = torch.arange(n * n, dtype=torch.float32).view(n, n).t()
        dist.reduce_scatter(x, [(columns.t() * (r + 1)).t() for r in range(size)])
        assert torch.equal(x, columns * 3 * (rank + 1))

        parts = [square(r) for r in range(size)]
        dist.reduce_scatter(parts[rank], parts)
        assert values(parts) == [{3 * r if r == rank else r} for r in range(size)]
        parts = [square(10 * rank + r) for r in range(size)]
        dist.all_to_all(parts, parts[::-1])
        assert values(parts) == [{10 * r + size - 1 - rank} for r in range(size)]
        parts = [square(r) for r in range(size)]
        dist.scatter(parts[0], parts if rank == 0 else None, src=0)
        assert values(parts[:1]) == [{rank}]
        parts = [square(rank) for _ in range(size)]
        dist.all_gather(parts, parts[1])
        assert values(parts) == [{0}, {1}, {2}]
        parts = [square(rank) for _ in range(size)]
        dist.gather(parts[0], parts if rank == 1 else None, dst=1)
        assert rank != 1 or values(parts) == [{0}, {1}, {2}]


@on_torch_ranks(3)
def test_entries_that_share_memory_are_reduced_once(rank):
    from torch.distributed import _functional_collectives as funcol

    warnings.simplefilter("ignore")

    def coalesced(entries):
        with dist._coalescing_manager():
            for each in entries:
                dist.all_reduce(each)

    def behind_another(entries):  # which changes the memory before this one runs
        works = [dist.all_reduce(entries[0], op=dist.ReduceOp.MAX, async_op=True), dist.all_reduce_coalesced(entries, async_op=True)]
        for work in works:
            work.wait()

    forms = {
        "blocking": lambda entries: dist.all_reduce_coalesced(entries),
        "asynchronous": lambda entries: dist.all_reduce_coalesced(entries, async_op=True).wait(),
        "coalesced": coalesced,
    }
    lists = {
        "twice": lambda x: [x, x],
        "views": lambda x: [x[:4], x[2:]],
        "contained": lambda x: [x, x[1:3], x[2:]],
        "strided": lambda x: [x, x.view(2, 3).t(), x[::2]],
    }
    for form, reduce in forms.items():
        for kind, entries_of in lists.items():
            x = torch.full((6,), rank + 1.0)
            reduce(entries_of(x))
            assert x.eq(6).all(), (form, kind, x)
    x = torch.full((6,), rank + 1.0)
    behind_another([x, x])
    assert x.eq(9).all(), x
    for entries_of in lists.values():
        results = funcol.all_reduce_coalesced(entries_of(torch.full((6,), rank + 1.0)), "sum", dist.group.WORLD)
        assert all(result.eq(6).all() for result in results)


@pytest.mark.parametrize("is_async", [False, True])
@on_torch_ranks(2)
def test_results_that_differ_cannot_share_memory(rank, is_async):
    warnings.simplefilter("ignore")

    def run(call, *arguments, **options):
        work = call(*arguments, **options, async_op=is_async)
        if work is not None:
            work.wait()

    def coalesce(call, pairs):
        with dist._coalescing_manager():
            for pair in pairs:
                call(*pair)

    for shared in (lambda x: [x, x]), (lambda x: [x[:2], x[1:3]]), (lambda x: [x[::2], x[::2]]):
        outs = shared(torch.zeros(4))
        like = [torch.ones_like(out) for out in outs]
        wide = shared(torch.zeros(8, 2))
        for call, *arguments in [
            (run, dist.all_gather, outs, like[0]),
            (run, dist.all_to_all, outs, like),
            (run, dist.gather, like[0], outs, 0),
            (coalesce, dist.reduce_scatter_tensor, [(out, torch.ones(2 * len(out))) for out in outs]),
            (coalesce, dist.all_gather_into_tensor, [(out, torch.ones(len(out) // 2, 2)) for out in wide]),
        ]:
            if rank == 0:
                with raises(ls.UsageError, "outputs 0 and 1 share memory"):
                    call(*arguments)
            elif dist.gather not in arguments:
                with contextlib.suppress(ls.UsageError):
                    call(*arguments)


@on_torch_ranks(2)
def test_an_input_that_is_anothers_output(rank):
    x, y = torch.zeros(4), torch.zeros(4)
    x[:2] = rank + 1
    with dist._coalescing_manager():
        dist.all_gather_into_tensor(y, x[:2])
        dist.all_gather_into_tensor(x, torch.full((2,), 7.0))
    assert y.tolist() == [1, 1, 2, 2] and x.eq(7).all(), (x, y)
    x, y = torch.full((4,), rank + 1.0), torch.zeros(2)
    with dist._coalescing_manager():
        dist.reduce_scatter_tensor(x[:2], torch.full((4,), 5.0))
        dist.reduce_scatter_tensor(y, x)
    assert y.eq(3).all() and x[:2].eq(10).all(), (x, y)
    columns = torch.zeros(3, 2)
    dist.all_gather(list(columns.unbind(1)), torch.full((3,), rank + 1.0))  # they share none
    assert columns.eq(torch.tensor([1.0, 2.0])).all(), columns


@on_torch_ranks(2)
def test_a_tensor_may_get_other_memory_while_a_call_is_pending(rank):
    store = dist.distributed_c10d._get_default_store()
    n = 1 << 22  # so large that the system takes the memory back at once

    def reduce(start, *tensors):
        if rank == 1:
            store.wait([start.__name__])
        work = start(*tensors, async_op=True)
        if rank == 0:
            for x in tensors:
                x.data = torch.zeros(3)
            other = torch.full((n,), 7.0)
            store.set(start.__name__, "")
        work.wait()
        if rank == 0:
            assert all(x.eq(0).all() for x in tensors) and other.eq(7).all()

    x = torch.ones(n)
    reduce(dist.all_reduce, x)
    assert rank == 0 or x.eq(2).all()
    x = torch.zeros(n // 2)
    reduce(dist.reduce_scatter_tensor, x, torch.ones(n))
    assert rank == 0 or x.eq(2).all()


@on_torch_ranks(2)
def test_async_calls_keep_the_order_of_the_program(rank):
    xs = [torch.full((n,), float(rank + 1)) for n in (1, 1000, 100000)]
    works = [dist.all_reduce(x, async_op=True) for x in xs]
    y = torch.ones(1)
    dist.all_reduce(y)  # after those before it
    assert y.item() == 2 and all(w.is_completed() for w in works)
    for x, work in zip(xs, works, strict=True):
        assert work.wait() and work.is_success() and (x == 3).all()
    work = dist.all_reduce(xs[0], async_op=True)
    seen = work.get_future().then(lambda f: f.value()[0].item() + 1)
    assert seen.wait() == 7 and work.result()[0].item() == 6
    work = dist.all_reduce(torch.full((2, 3), float(rank)).t(), async_op=True)
    work.wait()
    assert (work.result()[0] == 1).all()


@on_torch_ranks(2)
def test_a_callback_may_wait_for_a_later_call(rank):
    store = dist.distributed_c10d._get_default_store()
    first, second = torch.ones(3), torch.ones(3)
    if rank == 1:
        store.wait(["rank 0 has its callback"])
    work = dist.all_reduce(first, async_op=True)
    if rank == 0:
        seen = work.get_future().then(lambda _: later.wait() and second[0].item())
    later = dist.all_reduce(second, async_op=True)
    if rank == 0:
        store.set("rank 0 has its callback", "")
        assert seen.wait() == 2
    later.wait()


@on_torch_ranks(3)
def test_groups_in_several_threads_and_orders(rank):
    groups = [dist.new_group() for _ in range(3)] + [dist.new_group([0, 2])]
    assert rank != 1 or dist.get_rank(groups[3]) == -1

    def work(group):
        for i in range(50):
            x = torch.full((8,), float(rank + i))
            dist.all_reduce(x, group=group)
            assert (x == 3 + 3 * i).all(), x

    threads = [threading.Thread(target=work, args=(group,)) for group in groups[:3]]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    # Two groups in another order on each rank.
    a, b = torch.ones(4), torch.ones(4)
    order = [(a, groups[0]), (b, groups[1])]
    works = [dist.all_reduce(x, group=g, async_op=True) for x, g in (order if rank else reversed(order))]
    for w in works:
        w.wait()
    assert (a == 3).all() and (b == 3).all()
    if rank != 1:
        x = torch.full((2,), float(dist.get_rank(groups[3])))
        dist.all_reduce(x, group=groups[3])
        assert (x == 1).all()


@on_torch_ranks(3)
def test_messages(rank, size):
    right, left = (rank + 1) % size, (rank - 1) % size
    got = torch.empty(3)
    work = dist.irecv(got, left)  # all receive before they send
    dist.isend(torch.full((3,), float(rank)), right).wait()
    work.wait()
    assert (got == left).all()
    if rank == 0:
        for tag in (7, 8):
            dist.send(torch.full((1,), float(tag)), 1, tag=tag)
    if rank == 1:
        a, b = torch.empty(1), torch.empty(1)
        works = [dist.irecv(b, 0, tag=8), dist.irecv(a, 0, tag=7)]
        for w in works:
            w.wait()
        assert (a.item(), b.item()) == (7, 8)
    if rank == 2:
        x = torch.empty(1)
        assert sorted(dist.recv(x, tag=9) for _ in range(2)) == [0, 1]
    else:
        dist.send(torch.ones(1), 2, tag=9)
    x = torch.empty(2)
    ops = [dist.P2POp(dist.isend, torch.full((2,), float(rank)), right), dist.P2POp(dist.irecv, x, left)]
    for w in dist.batch_isend_irecv(ops):
        w.wait()
    assert (x == left).all()


@on_torch_ranks(2)
def test_messages_of_every_type_and_layout(rank):
    types = [torch.bool, torch.uint8, torch.int64, torch.float16, torch.bfloat16, torch.float64, torch.complex64, torch.float8_e4m3fn]
    for i, dtype in enumerate(types):
        for n in (0, 1, 300_001):
            sent = (torch.arange(n) % 7 > 2).to(dtype)
            got = torch.zeros(n).to(dtype)
            if rank == 0:
                dist.send(sent, 1, tag=i)
            else:
                assert dist.recv(got, 0, tag=i) == 0
                assert torch.equal(got.view(torch.uint8), sent.view(torch.uint8))
    grid = torch.arange(12.0).view(3, 4)
    if rank == 0:
        dist.isend(grid.t(), 1)  # nobody keeps the handle
        dist.send(grid[:, 1], 1, tag=1)
    else:
        got, column = torch.zeros(3, 8), torch.zeros(4, 4)
        work = dist.irecv(column[:3, 2], 0, tag=1)
        dist.recv(got[:, ::2].t(), 0)
        while not work.is_completed():
            pass
        assert torch.equal(got[:, ::2], grid) and (got[:, 1::2] == 0).all()
        assert torch.equal(column[:3, 2], grid[:, 1]) and column.sum() == grid[:, 1].sum()
    dist.barrier()


@on_torch_ranks(3)
def test_messages_beside_collectives_and_threads(rank, size):
    def exchange(tag):
        right, left = (rank + 1) % size, (rank - 1) % size
        for i in range(50):
            got = torch.empty(1000 + i)
            sent = torch.full((1000 + i,), rank + i / 100)
            works = [dist.irecv(got, left if i % 2 else None, tag=tag), dist.isend(sent, right, tag=tag)]
            for w in works:
                w.wait()
            assert (got == torch.tensor(left + i / 100)).all()

    threads = [threading.Thread(target=exchange, args=(tag,)) for tag in range(2)]
    for t in threads:
        t.start()
    for _ in range(50):
        x = torch.ones(100)
        dist.all_reduce(x)
        assert (x == size).all()
    for t in threads:
        t.join()


def init_without_process_vm():
    """process_vm_readv and process_vm_writev fail as under a strict seccomp profile."""
    libc = ctypes.CDLL(None)
    numbers = {"x86_64": (310, 311), "aarch64": (270, 271)}[platform.machine()]
    steps = [(0x20, 0, 0, 0), (0x15, 1, 0, numbers[0]), (0x15, 0, 1, numbers[1]), (6, 0, 0, 0x50001), (6, 0, 0, 0x7FFF0000)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *each) for each in steps))
    assert libc.prctl(38, 1, 0, 0, 0) == libc.prctl(22, 2, struct.pack("HP", 5, ctypes.addressof(code))) == 0
    return init_torch()


@on_ranks(2, init=init_without_process_vm, shares=False)
def test_messages_where_no_process_may_access_another(rank):
    def n_sockets():
        return sum(str(os.readlink(fd)).startswith("socket") for fd in Path("/proc/self/fd").iterdir() if fd.is_symlink())

    before = n_sockets()
    dist.barrier()  # or the other connects before it is counted
    x = torch.full((1000,), float(rank))
    if rank:
        dist.recv(x, 0)
    else:
        dist.send(x, 1)
    assert (x == 0).all()
    assert n_sockets() > before, "the message did not go over Gloo"


@on_torch_ranks(2)
def test_alone_again_and_beside_another_backend(rank):
    dist.destroy_process_group()
    dist.init_process_group("cpu:lockstep", **in_a_file(rank), timeout=datetime.timedelta(seconds=30))
    x = torch.ones(1)
    dist.all_reduce(x)
    assert x.item() == 2
    dist.destroy_process_group()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True)
    dist.init_process_group("lockstep", store=store, rank=0, world_size=1)
    x = torch.ones(1)
    dist.all_reduce(x)
    parts = [torch.empty(1)]
    dist.all_gather(parts, x)
    assert parts[0].item() == 1 and dist.get_world_size() == 1


@on_torch_ranks(2)
def test_sparse_tensors(rank):
    x = torch.sparse_coo_tensor([[0, rank + 1]], [1.0, 2.0 + rank], (4,))
    dist.all_reduce(x)
    assert x.to_dense().tolist() == [2, 2, 3, 0], x
    empty = torch.sparse_coo_tensor(torch.empty((1, 0), dtype=torch.long), [], (4,))
    dist.all_reduce(empty)
    assert empty.coalesce().values().numel() == 0


@on_torch_ranks(3)
def test_monitored_barrier(rank):
    dist.monitored_barrier()
    dist.monitored_barrier(timeout=datetime.timedelta(seconds=30), wait_all_ranks=True)
    if rank == 0:
        with raises(ls.TimeoutError, "Ranks 1, 2 failed to pass", here(1)):
            dist.monitored_barrier(timeout=datetime.timedelta(seconds=0.3), wait_all_ranks=True)
    dist.barrier()  # the group is as before
    others = dist.new_group([1, 2])
    dist.monitored_barrier(others)
    gloo = dist.new_group(backend="gloo")
    dist.monitored_barrier(gloo)
    impatient = dist.new_group(timeout=datetime.timedelta(seconds=0.3))
    if rank == 0:
        with raises(ls.TimeoutError, "Rank 1 failed to pass"):
            dist.monitored_barrier(impatient)
    dist.barrier()


@on_torch_ranks(2)
def test_monitored_barrier_that_waits_for_all_of_one_rank(rank):
    if rank == 0:
        with raises(ls.TimeoutError, "Ranks 1 failed to pass"):
            dist.monitored_barrier(timeout=datetime.timedelta(seconds=0.1), wait_all_ranks=True)
    dist.barrier()


@on_torch_ranks(3)
def test_monitored_barrier_of_ranks_that_never_communicated(rank):
    group = dist.new_group()

    def fails_with(text, seconds=None):
        try:
            group.monitored_barrier(*([datetime.timedelta(seconds=seconds)] if seconds is not None else []))
        except ls.TimeoutError as error:
            assert text in str(error), error
        else:
            raise AssertionError

    if rank == 0:
        fails_with("Rank 0 timed out in monitoredBarrier", 0)
        fails_with("Rank 1 failed to pass monitoredBarrier", 0.1)
        Path("late").touch()
    else:
        wait_for("late")
        fails_with(f"Rank {rank} successfully reached monitoredBarrier, but received errors")
        fails_with("Rank 1 failed to pass monitoredBarrier")
    group.monitored_barrier()
    dist.barrier(group)


@on_torch_ranks(3, shares=False)
def test_rank_0_may_end_after_a_monitored_barrier(rank):
    """The store is in its process."""
    if rank == 0:
        time.sleep(0.3)  # so that the others ask for the outcome seldom
    dist.monitored_barrier()
    os._exit(0)


@pytest.mark.skipif(torch.__version__ < (2, 15), reason="wants an accelerator")
@on_torch_ranks(3)
def test_split_group_of_torch(rank):
    half = dist.split_group(split_ranks=[[0, 2], [1]])
    x = torch.full((2,), rank + 1.0)
    dist.all_reduce(x, group=half)
    assert x.tolist() == [2.0 if rank == 1 else 4.0] * 2
    assert dist.get_backend(half) == "lockstep"


@on_torch_ranks(3)
def test_split_group(rank, size):
    # torch's function of this name wants an accelerator.
    half = dist.group.WORLD.split_group([0, 2], timeout=datetime.timedelta(seconds=30), group_name="half")
    assert (half is None) == (rank == 1)
    if half:
        assert (half.rank(), half.size()) == (rank // 2, 2)
        x = torch.ones(2)
        half.allreduce(x).wait()
        assert (x == 2).all()
        one = half.split_group([rank // 2], timeout=datetime.timedelta(seconds=30), group_name=f"alone{rank}")
        one.allreduce(x).wait()
        assert (x == 2).all()
    dist.barrier()


@on_torch_ranks(2)
def test_abort_ends_the_calls_of_all_ranks(rank):
    group = dist.new_group()
    x = torch.ones(1)
    if rank == 0:
        work = dist.all_reduce(x, group=group, async_op=True)
        group.abort()
        with raises(ls.PeerFailed, "aborted", here(-2)):
            work.wait()
        Path("aborted").touch()
    wait_for("aborted")
    with raises(ls.PeerFailed, "the process group was aborted"):
        dist.all_reduce(x, group=group)
    dist.barrier()  # other groups go on


@on_torch_ranks(2)
def test_shutdown_lets_calls_end():
    group = dist.new_group()
    x = torch.full((100000,), 1.0)
    works = [dist.all_reduce(x, group=group, async_op=True) for _ in range(5)]
    group.shutdown()
    assert all(work.is_completed() for work in works) and (x == 32).all()
    with raises(ls.UsageError, "has been shut down", here(1)):
        dist.all_reduce(x, group=group)
    dist.barrier()


@on_torch_ranks(2)
def test_init_again(rank):
    for i in range(5):
        x = torch.ones(1000)
        work = dist.all_reduce(x, async_op=True)
        if i % 2:
            work.wait()
        dist.barrier()
        dist.destroy_process_group()
        dist.init_process_group("lockstep", **in_a_file(rank, f"store-{i}"))
        assert (x == 2).all()


@pytest.mark.parametrize("is_async", [False, True])
@on_torch_ranks(2)
def test_tensors_of_inference_mode(is_async):
    with torch.inference_mode():
        columns = torch.arange(6.0).view(2, 3).t()
    for tensor in columns, columns[:, 1]:
        expected = 2 * tensor
        work = dist.all_reduce(tensor, async_op=is_async)
        if work:
            work.wait()
        assert tensor.equal(expected), tensor


@on_torch_ranks(2)
def test_the_last_owner_may_be_a_callback(rank):
    group = dist.new_group([0, 1])
    has_ended = threading.Event()
    may_end = threading.Event()

    class Ends:
        def __del__(self):
            has_ended.set()

    if rank == 1:
        dist.distributed_c10d._get_default_store().wait(["posted"])
    work = dist.all_reduce(torch.ones(1), group=group, async_op=True)
    if rank == 0:
        ends = Ends()
        # The call is pending: the callback runs in another thread.
        work.get_future().then(lambda _, group=group, ends=ends: may_end.wait())
        del ends
        dist.distributed_c10d._get_default_store().set("posted", "")
    dist.destroy_process_group(group)
    del work, group
    may_end.set()
    assert rank == 1 or has_ended.wait()
    dist.barrier()


@on_ranks(4, init=None, shares=False)
def test_a_group_across_default_groups():
    """As of torchft: two replicas of two ranks, each a default group, and groups of one rank of each."""
    from lockstep import _backend

    replica, local = divmod(int(os.environ["RANK"]), 2)
    store = dist.FileStore("store", 4)
    dist.init_process_group("lockstep", store=dist.PrefixStore(f"replica {replica}", store), rank=local, world_size=2)
    quorum = dist.ProcessGroup(store, replica, 2)
    for number in range(2):
        own = dist.PrefixStore(f"quorum {local} {number}", store)
        backend = _backend.make(own, replica, 2, datetime.timedelta(seconds=60), "torchft quorum")
        quorum._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.CUSTOM, backend)
        x = torch.tensor([1.0 + local + 10 * replica])
        quorum.allreduce([x]).wait()
        assert x.item() == 12 + 2 * local
        group = dist.new_group([0, 1])  # asks the ranks of this default group
        dist.all_reduce(x, group=group)
        assert x.item() == 26
