"""torch.distributed over the backend lockstep, in real processes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import COMMAND

pytest.importorskip("torch")

PRELUDE = (
    "import os, signal, sys, threading, time; import torch, torch.distributed as dist; "
    "dist.init_process_group('lockstep'); rank, size = dist.get_rank(), dist.get_world_size()\n"
)


@pytest.fixture
def run_torch(run_ranks):
    """run_ranks for a program that has torch's `dist`, over lockstep."""
    return lambda n, program, **options: run_ranks(n, program, **{"prelude": PRELUDE, **options})


def test_collectives(run_torch):
    run_torch(
        3,
        """
        assert "lockstep" in str(dist.get_backend()) and size == 3
        full = lambda value, n=4, dtype=torch.float32: torch.full((n,), value, dtype=dtype)
        is_all = lambda x, value: bool((x == value).all())

        for dtype in [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16,
                      torch.bfloat16, torch.float32, torch.float64, torch.complex64]:
            for op, expected in [(dist.ReduceOp.SUM, 6), (dist.ReduceOp.AVG, 2), (dist.ReduceOp.PRODUCT, 6),
                                 (dist.ReduceOp.MIN, 1), (dist.ReduceOp.MAX, 3)]:
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
        """,
    )


def test_async_calls_keep_the_order_of_the_program(run_torch):
    run_torch(
        2,
        """
        xs = [torch.full((n,), float(rank + 1)) for n in (1, 1000, 100000)]
        works = [dist.all_reduce(x, async_op=True) for x in xs]
        y = torch.ones(1)
        dist.all_reduce(y)  # after those before it
        assert y.item() == 2 and all(w.is_completed() for w in works)
        for x, work in zip(xs, works):
            assert work.wait() and work.is_success() and (x == 3).all()
        work = dist.all_reduce(xs[0], async_op=True)
        seen = work.get_future().then(lambda f: f.value()[0].item() + 1)
        assert seen.wait() == 7 and work.result()[0].item() == 6
        work = dist.all_reduce(torch.full((2, 3), float(rank)).t(), async_op=True)
        work.wait()
        assert (work.result()[0] == 1).all()
        """,
    )


def test_groups_in_several_threads_and_orders(run_torch):
    run_torch(
        3,
        """
        groups = [dist.new_group() for _ in range(3)] + [dist.new_group([0, 2])]
        assert rank != 1 or dist.get_rank(groups[3]) == -1
        def work(group):
            for i in range(50):
                x = torch.full((8,), float(rank + i))
                dist.all_reduce(x, group=group)
                assert (x == 3 + 3 * i).all(), x
        threads = [threading.Thread(target=work, args=(group,)) for group in groups[:3]]
        for thread in threads: thread.start()
        for thread in threads: thread.join()
        # Two groups in another order on each rank.
        a, b = torch.ones(4), torch.ones(4)
        order = [(a, groups[0]), (b, groups[1])]
        works = [dist.all_reduce(x, group=g, async_op=True) for x, g in (order if rank else reversed(order))]
        for w in works: w.wait()
        assert (a == 3).all() and (b == 3).all()
        if rank != 1:
            x = torch.full((2,), float(dist.get_rank(groups[3])))
            dist.all_reduce(x, group=groups[3])
            assert (x == 1).all()
        """,
    )


def test_messages(run_torch):
    run_torch(
        3,
        """
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
            for w in works: w.wait()
            assert (a.item(), b.item()) == (7, 8)
        if rank == 2:
            x = torch.empty(1)
            assert sorted(dist.recv(x) for _ in range(2)) == [0, 1]
        else:
            dist.send(torch.ones(1), 2)
        x = torch.empty(2)
        ops = [dist.P2POp(dist.isend, torch.full((2,), float(rank)), right), dist.P2POp(dist.irecv, x, left)]
        for w in dist.batch_isend_irecv(ops): w.wait()
        assert (x == left).all()
        """,
    )


def test_alone_again_and_beside_another_backend(run_torch):
    run_torch(
        2,
        """
        dist.destroy_process_group()
        dist.init_process_group("cpu:lockstep", timeout=__import__("datetime").timedelta(seconds=30))
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
        """,
    )


def test_errors_name_the_line_of_the_program(run_torch):
    run_torch(
        2,
        """
        import lockstep as ls
        try:
            dist.all_reduce(torch.ones(2), dist._make_nccl_premul_sum(2.0)); raise AssertionError
        except ls.UsageError as error:
            assert "PREMUL_SUM" in str(error) and "program.py:4" in str(error), error
        try:
            if rank: dist.all_reduce(torch.ones(2))
            else: dist.broadcast(torch.ones(2), 0)
            raise AssertionError
        except ls.MismatchError as error:
            assert "program.py:8" in str(error) and "program.py:9" in str(error), error
        """,
    )


def test_errors_of_async_calls(run_torch):
    run_torch(
        2,
        """
        import lockstep as ls
        if rank:
            work = dist.all_reduce(torch.ones(2), async_op=True)
        else:
            work = dist.all_reduce(torch.ones(3), async_op=True)
        try:
            work.wait()
            raise AssertionError
        except ls.MismatchError as error:
            assert "program.py:4" in str(error) and "program.py:6" in str(error), error
        assert not work.is_success()
        """,
    )


def test_a_late_rank_is_named(run_torch):
    run_torch(
        2,
        """
        import datetime, lockstep as ls
        group = dist.new_group(timeout=datetime.timedelta(seconds=1))
        if rank == 0:
            try:
                dist.all_reduce(torch.ones(1), group=group)
                raise AssertionError
            except ls.TimeoutError as error:
                assert "waited 1 s for rank 1" in str(error) and "program.py:6" in str(error), error
            open("late", "w").close()
        else:
            while not os.path.exists("late"): time.sleep(0.01)
        dist.barrier()
        """,
    )


def test_the_exception_of_a_rank_reaches_the_others(run_torch):
    output = run_torch(
        2,
        """
        import lockstep as ls
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # `lockstep run` ends the others after a second
        if rank == 1:
            raise ValueError("no more data")
        try:
            dist.all_reduce(torch.ones(1))
            raise AssertionError
        except ls.PeerFailed as error:
            assert "rank 1 failed: ValueError: no more data" in str(error), error
        print("heard")
        """,
        code=1,
    )
    assert "heard" in output, output


def test_an_interrupt_ends_a_wait(run_torch):
    run_torch(
        2,
        """
        import lockstep as ls
        dist.barrier()
        if rank == 0:
            with open("pid", "w") as file: file.write(str(os.getpid()))
            try:
                dist.barrier()
                raise AssertionError
            except KeyboardInterrupt:
                open("interrupted", "w").close()
        else:
            while not os.path.exists("pid") or not open("pid").read(): time.sleep(0.01)
            while open(f"/proc/{open('pid').read()}/wchan").read() == "0": time.sleep(0.01)
            os.kill(int(open("pid").read()), signal.SIGINT)
            while not os.path.exists("interrupted"): time.sleep(0.01)
            try:
                dist.barrier()
                raise AssertionError
            except ls.PeerFailed as error:
                assert "KeyboardInterrupt" in str(error), error
        """,
    )


TRAINS = """
    from torch.nn.parallel import DistributedDataParallel
    torch.manual_seed(rank)
    model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Tanh(), torch.nn.Linear(5, 2)).double()
    {wrap}
    torch.manual_seed(0)
    data = torch.randn(8, 6, dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(data[rank::size]).square().mean().backward()
        optimizer.step()
    {read}
    parts = [torch.empty_like(weight) for _ in range(size)]
    dist.all_gather(parts, weight)
    assert torch.equal(parts[0], parts[1])
    if rank == 0:
        torch.manual_seed(0)
        torch.manual_seed(0)
        alone = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Tanh(), torch.nn.Linear(5, 2)).double()
        optimizer = torch.optim.SGD(alone.parameters(), 0.1)
        for _ in range(3):
            optimizer.zero_grad()
            alone(data).square().mean().backward()
            optimizer.step()
        assert torch.allclose(alone[0].weight.detach().reshape(-1), weight, rtol=0, atol=1e-9)
"""


def test_distributed_data_parallel(run_torch):
    run_torch(
        2,
        TRAINS.format(
            wrap="model = DistributedDataParallel(model)", read="weight = model.module[0].weight.detach().reshape(-1).clone()"
        ),
    )


def test_fully_sharded(run_torch):
    run_torch(
        2,
        TRAINS.format(
            wrap="""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    for p in model.parameters(): dist.broadcast(p.data, 0)
    fully_shard(model, mesh=init_device_mesh("cpu", (size,)))""",
            read="weight = model[0].weight.full_tensor().detach().reshape(-1).clone()",
        ),
    )


def test_torchrun(run_torch, tmp_path):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--no-python"]
    run_torch(
        2,
        """
        x = torch.ones(2)
        dist.all_reduce(x)
        assert (x == 2).all()
        dist.destroy_process_group()
        dist.init_process_group("lockstep")
        dist.all_reduce(x)
        assert (x == 4).all()
        """,
        launcher=torchrun,
    )


def test_spawn(tmp_path):
    program = Path(tmp_path) / "program.py"
    program.write_text("""
import sys, torch, torch.distributed as dist, torch.multiprocessing as mp
def main(rank, name):
    dist.init_process_group("lockstep", init_method=f"file://{name}", rank=rank, world_size=2)
    x = torch.ones(1)
    dist.all_reduce(x)
    assert x.item() == 2
    dist.destroy_process_group()
if __name__ == "__main__":
    for method in "spawn", "fork":
        mp.start_processes(main, args=(sys.argv[1] + method,), nprocs=2, start_method=method)
""")
    done = subprocess.run(
        [sys.executable, program, tmp_path / "store"], stderr=subprocess.PIPE, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr


def test_a_fork_is_no_rank(run_torch):
    run_torch(
        2,
        """
        import lockstep as ls
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
        """,
    )


def test_sparse_tensors(run_torch):
    run_torch(
        2,
        """
        x = torch.sparse_coo_tensor([[0, rank + 1]], [1.0, 2.0 + rank], (4,))
        dist.all_reduce(x)
        assert x.to_dense().tolist() == [2, 2, 3, 0], x
        empty = torch.sparse_coo_tensor(torch.empty((1, 0), dtype=torch.long), [], (4,))
        dist.all_reduce(empty)
        assert empty.coalesce().values().numel() == 0
        """,
    )


def test_a_message_from_a_rank_that_left(run_torch):
    run_torch(
        2,
        """
        import lockstep as ls
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # `lockstep run` ends the others after a second
        x = torch.ones(1)
        if rank:
            dist.send(x, 0)
            os._exit(3)
        dist.recv(x, 1)
        try:
            dist.recv(x, 1)
            raise AssertionError
        except ls.PeerLost as error:
            assert "rank 1" in str(error) and "program.py:10" in str(error), error
        """,
        code=3,
    )


def test_hosts(run_torch, tmp_path):
    """Ranks in PID namespaces of their own share no memory, as on another host: Gloo between them."""
    if subprocess.run(["unshare", "--pid", "--fork", "true"], capture_output=True).returncode != 0:
        pytest.skip("this user may not make PID namespaces")
    run_torch(
        3,
        """
        for _ in range(3):
            x = torch.full((1000,), rank + 1.0)
            dist.all_reduce(x)
            assert (x == 6).all()
        parts = [torch.empty(2) for _ in range(size)]
        dist.all_gather(parts, torch.full((2,), float(rank)))
        assert [p[0].item() for p in parts] == [0, 1, 2]
        if rank == 0:
            dist.send(torch.full((1,), 5.0), 2)
        if rank == 2:
            x = torch.empty(1)
            dist.recv(x, 0)
            assert x.item() == 5
        dist.barrier()
        dist.destroy_process_group()
        """,
        launcher=[COMMAND, "run", "-n", "3", "--", "sh", "-c",
                  '[ "$RANK" != 2 ] || exec unshare --pid --fork --kill-child "$@"; exec "$@"', "sh"],
        env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"},
    )  # fmt: skip


def test_a_rank_fails_while_another_is_in_backward(run_torch):
    output = run_torch(
        2,
        """
        from torch.nn.parallel import DistributedDataParallel
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # `lockstep run` ends the others after a second
        model = DistributedDataParallel(torch.nn.Linear(4, 4))
        loss = model(torch.ones(2, 4)).sum()
        if rank == 1:
            raise ValueError("bad batch")
        try:
            loss.backward()
            raise AssertionError
        except RuntimeError as error:
            assert "rank 1 failed: ValueError: bad batch" in str(error) and "program.py:9" in str(error), error
        print("heard")
        """,
        code=1,
    )
    assert "heard" in output, output
