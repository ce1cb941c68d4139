"""What a rank of torch.distributed hears when another one fails, and what ends a wait."""

import os

import pytest
from conftest import in_a_file, survivor

pytest.importorskip("torch")


def test_errors_name_the_line_of_the_program(run_torch):
    run_torch(
        2,
        """
        import lockstep as ls
        try:
            dist.all_reduce(torch.ones(2), dist._make_nccl_premul_sum(2.0)); raise AssertionError
        except ls.UsageError as error:
            assert "PREMUL_SUM" in str(error) and "program.py:4" in str(error), error
        with raises(ls.MismatchError, "program.py:8", "program.py:9"):
            if rank: dist.all_reduce(torch.ones(2))
            else: dist.broadcast(torch.ones(2), 0)
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
        with raises(ls.MismatchError, "program.py:4", "program.py:6"):
            work.wait()
        assert not work.is_success()
        """,
    )


def test_the_limit_of_a_call_covers_the_wait_for_posted_ones(run_torch):
    run_torch(
        2,
        """
        import datetime, lockstep as ls
        options = dist.AllreduceOptions()
        options.timeout = datetime.timedelta(milliseconds=200)
        options.asyncOp = False
        said = "rank 0 waited 0.2 s for its own all_reduce, posted at program.py:8, which has not ended"
        if rank == 0:
            work = dist.all_reduce(torch.ones(1), async_op=True)
            with raises(ls.TimeoutError, said, lambda error: error.lineno == 10):
                dist.group.WORLD.allreduce([torch.ones(1)], options)
            open("over", "w").close()
            with raises(ls.PeerFailed):
                work.wait()
        else:
            while not os.path.exists("over"): time.sleep(0.01)
            with raises(ls.PeerFailed, said):
                dist.barrier()
        """,
    )


def test_a_late_rank_is_named(run_torch):
    run_torch(
        2,
        """
        import datetime, lockstep as ls
        group = dist.new_group(timeout=datetime.timedelta(seconds=1))
        if rank == 0:
            with raises(ls.TimeoutError, "waited 1 s for rank 1", "program.py:6"):
                dist.all_reduce(torch.ones(1), group=group)
            open("late", "w").close()
        else:
            while not os.path.exists("late"): time.sleep(0.01)
        dist.barrier()
        """,
    )


@pytest.mark.parametrize(
    "call",
    ["dist.all_reduce(torch.ones(1))", "dist.all_reduce(torch.ones(1), async_op=True).get_future().wait()"],
    ids=["call", "future"],
)
def test_the_exception_of_a_rank_reaches_the_others(run_torch, call):
    program = survivor(
        "raise ValueError('no more data')",
        call,
        "PeerFailed",
        "rank 1 failed: ValueError: no more data",
    )
    assert "heard" in run_torch(2, program, code=1)


@pytest.mark.parametrize("wait", ["dist.barrier()", "dist.recv(torch.ones(1), 1 - rank, tag=rank)"])
def test_an_interrupt_ends_a_wait(run_torch, wait):
    run_torch(
        2,
        """
        import lockstep as ls
        dist.barrier()
        if rank == 0:
            with open("pid", "w") as file: file.write(str(os.getpid()))
            try:
                WAIT
                raise AssertionError
            except KeyboardInterrupt:
                open("interrupted", "w").close()
        else:
            while not os.path.exists("pid") or not open("pid").read(): time.sleep(0.01)
            while open(f"/proc/{open('pid').read()}/wchan").read() == "0": time.sleep(0.01)
            os.kill(int(open("pid").read()), signal.SIGINT)
            while not os.path.exists("interrupted"): time.sleep(0.01)
            with raises(ls.PeerFailed, "KeyboardInterrupt"):
                WAIT
        """.replace("WAIT", wait),
    )


def test_fork_is_not_a_rank(run_torch):
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


def test_messages_that_do_not_fit(run_torch):
    run_torch(
        2,
        """
        import datetime, lockstep as ls
        group = dist.new_group(timeout=datetime.timedelta(seconds=1))
        try:
            if rank: dist.send(torch.ones(2), 0, group=group)
            else: dist.recv(torch.ones(3), 1, group=group)
            raise AssertionError
        except ls.MismatchError as error:
            assert "rank 1 sends 2 elements of f32, rank 0 receives 3 elements of f32" in str(error), error
            assert error.lineno == 5 + (rank == 0), error
        try:
            if rank: dist.send(torch.ones(2), 0, group=group, tag=1)
            else: dist.recv(torch.ones(2), 1, group=group, tag=2)
            raise AssertionError
        except ls.TimeoutError as error:
            expected = "rank 0 to receive (tag 1)" if rank else "rank 1 to send (tag 2)"
            assert expected in str(error), error
        x = torch.full((1,), float(rank))
        if rank: dist.send(x, 0, group=group)
        else: dist.recv(x, 1, group=group)
        assert x.item() == 1
        """,
    )


def test_a_message_that_a_fork_asks_for(run_torch):
    run_torch(
        2,
        """
        import lockstep as ls
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
        if rank: dist.send(torch.ones(1), 0)
        else: before.wait()
        assert x.item() == 1 - rank
        """,
    )


def test_a_group_without_descriptors(run_torch):
    run_torch(
        2,
        """
        import resource, lockstep as ls
        resource.setrlimit(resource.RLIMIT_NOFILE, (200, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
        taken = []
        try:
            while True: taken.append(os.dup(0))
        except OSError:
            pass
        with raises(ls.EngineError, "Too many open files", lambda error: error.lineno == 10):
            dist.new_group()
        for each in taken: os.close(each)
        dist.barrier(dist.new_group())
        """,
    )


def test_a_timeout_of_ages(run_torch):
    run_torch(
        2,
        """
        from datetime import timedelta
        ages = timedelta(days=365 * 1000)  # in ns more than 64 bits
        group = dist.new_group(timeout=ages)
        x = torch.ones(1)
        for _ in range(20): dist.all_reduce(x, group=group)
        assert x.item() == 2 ** 20
        dist.monitored_barrier(group, timeout=ages)
        if rank: dist.send(x, 0, group=group)
        else: dist.irecv(x, 1, group=group).wait(ages)
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
        with raises(ls.PeerLost, "rank 1", "program.py:10"):
            dist.recv(x, 1)
        """,
        code=3,
    )


WITH_DDP = """
    from torch.nn.parallel import DistributedDataParallel
    model = DistributedDataParallel(torch.nn.Linear(4, 4))
    loss = model(torch.ones(2, 4)).sum()
"""
WITH_FSDP = """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    model = fully_shard(torch.nn.Linear(4, 4), mesh=init_device_mesh("cpu", (size,)))
    loss = model(torch.ones(2, 4)).sum()
"""


@pytest.mark.parametrize("before", [WITH_DDP, WITH_FSDP])
def test_a_rank_fails_while_another_is_in_backward(run_torch, before):
    program = survivor(
        "raise ValueError('bad batch')",
        "loss.backward()",
        "PeerFailed",
        "rank 1 failed: ValueError: bad batch",
        before=before,
    )
    assert "heard" in run_torch(2, program, code=1)


def test_monitored_barrier_names_a_dead_rank(run_torch):
    call = "dist.monitored_barrier()"
    said = run_torch(3, survivor("os.kill(os.getpid(), 9)", call, "PeerLost", "Rank 1 failed to pass"), code=137)
    assert said.count("heard") == 2


def test_a_rank_that_cannot_write_its_trace_tells_the_others_why(run_torch):
    run_torch(
        2,
        """
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        rank = int(os.environ["RANK"])
        if rank == 1: os.environ["LOCKSTEP_TRACE"] = "/proc"  # no files are made there
        try:
            dist.init_process_group("lockstep")
            dist.barrier()
            raise AssertionError
        except ls.Error as error:
            assert "/proc/rank-1" in str(error), error
            assert rank == 1 or isinstance(error, ls.PeerFailed), error
        """,
        prelude="import os, signal; import torch, torch.distributed as dist; import lockstep as ls\n",
    )


def test_a_fork_after_a_group_was_destroyed(run_ranks):
    output = run_ranks(
        1,
        """
        import glob, os, torch, torch.distributed as dist

        def train():
            dist.init_process_group("lockstep", init_method="lockstep://")
            x = torch.ones(3)
            dist.all_reduce(x, async_op=True).wait()
            assert x.tolist() == [1, 1, 1]

        def threads():
            return [name for path in glob.glob("/proc/self/task/*/comm") if "lockstep" in (name := open(path).read())]

        train()
        assert threads() == ["lockstep-comm\\n"], threads()
        dist.destroy_process_group()
        assert not threads(), threads()
        for is_destroyed in True, False:
            if not is_destroyed: train()
            child = os.fork()
            if child == 0:
                if not is_destroyed: dist.destroy_process_group()
                train()
                dist.destroy_process_group()
                os._exit(0)
            assert os.waitpid(child, 0)[1] == 0
        print("done")
        """,
        launcher=["env"],
        prelude="",
    )
    assert "done" in output


def test_new_group_notices_that_a_rank_has_ended(run_torch):
    run_torch(
        3,
        """
        import lockstep as ls
        if rank == 2: os._exit(0)
        if rank == 1:
            with raises(ls.PeerLost, "rank 1 ended and did not join init_process_group or new_group", lambda error: error.lineno == 6):
                dist.new_group([1, 2])
            open("heard", "w").close()
        while not os.path.exists("heard"): time.sleep(0.01)  # rank 0 has the store
        """,
    )


def test_new_group_obeys_the_limit(run_torch):
    run_torch(
        2,
        """
        import lockstep as ls
        if rank == 0:
            with raises(ls.TimeoutError, "rank 1 did not join init_process_group or new_group", "1000 ms"):
                dist.new_group()
            open("late", "w").close()
        while not os.path.exists("late"): time.sleep(0.01)
        """,
        env={**os.environ, "LOCKSTEP_TIMEOUT": "1"},
    )


def test_the_programs_timeout_wins_over_the_environments(run_torch):
    run_torch(
        2,
        f"""
        import lockstep as ls
        from datetime import timedelta
        dist.destroy_process_group()
        dist.init_process_group("lockstep", {in_a_file()}, timeout=timedelta(seconds=1))
        if rank == 0:
            with raises(ls.TimeoutError, "waited 1 s for rank 1"):
                dist.barrier()
            open("late", "w").close()
        while not os.path.exists("late"): time.sleep(0.01)
        """,
        env={**os.environ, "LOCKSTEP_TIMEOUT": "100"},
    )


@pytest.mark.parametrize(
    "call",
    ["is_there.set(); dist.barrier(group)", "work = dist.all_reduce(x, group=group, async_op=True); is_there.set(); work.wait()"],
    ids=["barrier", "wait"],
)
def test_a_daemon_in_a_call_when_python_ends(run_torch, call):
    """In ours: torch itself ends the process where its own functions take the GIL when Python has ended."""
    for _ in range(5):
        run_torch(
            2,
            f"""
            group = dist.new_group([0, 1])
            x = torch.ones(1)
            is_there = threading.Event()
            def wait(): {call}
            if rank == 0:
                threading.Thread(target=wait, daemon=True).start()
                is_there.wait()
            dist.barrier()
            """,
        )


def test_rank_0_cannot_open_its_store(run_ranks):
    run_ranks(
        2,
        """
        def refuse(*arguments, **options):
            if options.get("is_master"): raise RuntimeError("no port is free")
            return store(*arguments, **options)
        store, dist.TCPStore = dist.TCPStore, refuse
        with raises(ls.EngineError, "rank 0 cannot open its store", "no port is free"):
            dist.init_process_group("lockstep", init_method="lockstep://")
        """,
        prelude="import torch, torch.distributed as dist, lockstep as ls; from ranks import raises\n",
    )
