"""What a rank hears when another one fails, and what ends a wait."""

import multiprocessing
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from ranks import here, on_ranks, raises, show_pid, survives, wait_for

import lockstep as ls
from lockstep import _collectives


@on_ranks(2)
def test_a_mismatch_names_ranks_and_lines(rank):
    x = np.zeros(4)
    reduced, broadcast = here(4), here(6)
    table = rf"\n *0 +all_reduce +f64 +4 .*{reduced}\n *1 +broadcast +f64 +4 +0 .*{broadcast}$"
    with raises(ls.MismatchError, f" at {[reduced, broadcast][rank]}: ", lambda error: re.search(table, str(error))):
        if rank == 0:
            ls.all_reduce(x)
        else:
            ls.broadcast(x)
    with raises(ls.MismatchError):
        ls.barrier()  # a dead group says the same


@on_ranks(2)
def test_a_late_rank(rank):
    if rank == 0:
        with raises(ls.TimeoutError, "rank 1", "barrier", here(1)):
            ls.barrier(timeout=0.2)
        Path("done").touch()
    else:
        wait_for("done")


def raise_in_rank_1(rank, error):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # `lockstep run` ends the others after a second
    if rank == 1:
        raise error
    ls.barrier()


def test_the_traceback_of_an_exception_is_printed_once(run_ranks):
    output = run_ranks(3, raise_in_rank_1, error=ValueError("rank 1 is at its end"), code=1)
    assert output.count("Traceback") == 1 and output.count("lockstep.errors.PeerFailed: barrier on group 'world'") == 2, output


@on_ranks(3, code=1, returned=2, says="Traceback")
def test_an_uncaught_exception_reaches_the_others(rank):
    with survives(ls.PeerFailed, "rank 1 failed: ValueError: no such file: data.npy", here(3)):
        if rank == 1:
            raise ValueError("no such file: data.npy")
        ls.all_reduce(np.zeros(1))


@on_ranks(2, code=128 + 9, returned=1)
def test_a_killed_rank_is_named(rank):
    with survives(ls.PeerLost, "rank 1", "SIGKILL", here(3)):
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        ls.barrier()


@on_ranks(2, shares=False)
def test_a_rank_that_left(rank):
    if rank == 1:
        sys.exit(0)
    with raises(ls.PeerLost, "rank 1"):
        ls.barrier()


class Waits:
    """A thread of rank 0 that can only run where its main thread gives the GIL away: in the call that waits."""

    def __init__(self, rank):
        sys.setswitchinterval(1000)
        self.begins = threading.Event()
        if rank == 0:
            threading.Thread(target=self.in_the_meantime).start()
            show_pid()

    def in_the_meantime(self):
        self.begins.wait()
        Path("waits").touch()

    def interrupt(self):
        """By rank 1."""
        wait_for("waits")
        os.kill(int(Path("pid").read_text()), signal.SIGINT)


@on_ranks(2)
def test_other_threads_run_while_a_call_waits(rank):
    waits = Waits(rank)
    if rank == 0:
        waits.begins.set()
    else:
        wait_for("waits")
    ls.barrier()


@on_ranks(2)
def test_an_interrupt_ends_a_wait(rank):
    waits = Waits(rank)
    ls.barrier()
    if rank == 0:
        with raises(KeyboardInterrupt):
            waits.begins.set()
            ls.barrier()
        Path("interrupted").touch()
        with raises(ls.PeerFailed):
            ls.barrier()
    else:
        waits.interrupt()
        wait_for("interrupted")
        with raises(ls.PeerFailed, "rank 0 failed: KeyboardInterrupt"):
            ls.barrier()


@on_ranks(2, init=None, code=128 + 2)
def test_an_interrupt_ends_a_process_that_waits_in_init_dist():
    rank = int(os.environ["RANK"])
    waits = Waits(rank)
    if rank == 0:
        waits.begins.set()
        ls.init_dist()
    else:
        waits.interrupt()
        wait_for("never")


@on_ranks(2)
def test_a_thread_that_abandons_the_group_ends_its_calls(rank):
    def abandon():
        begins.wait()
        ls.default_group().abandon("rank 0 has enough")

    sys.setswitchinterval(1000)
    begins = threading.Event()
    if rank == 0:
        threading.Thread(target=abandon).start()
        begins.set()
    with raises(ls.PeerFailed, "rank 0 has enough"):
        if rank == 1:
            wait_for("over")
        ls.barrier()
    Path("over").touch()


@on_ranks(2)
def test_a_handler_of_the_program_does_not_end_a_wait(rank):
    seen = []
    signal.signal(signal.SIGINT, lambda *_: seen.append(1))
    waits = Waits(rank)
    ls.barrier()
    if rank == 0:
        waits.begins.set()
        ls.barrier()
        assert seen == [1]
    else:
        waits.interrupt()
        ls.barrier()


@on_ranks(2)
def test_fork_is_not_a_rank():
    child = os.fork()
    if child == 0:
        try:
            ls.barrier()
            os._exit(1)
        except ls.UsageError as error:
            assert "fork" in str(error)
        ls.destroy_dist()
        os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    ls.barrier()


@pytest.mark.parametrize("pad", ["", "x"])
@on_ranks(2, code=1, returned=1, says="Traceback")
def test_an_exception_whose_text_is_no_utf8(rank, pad):
    with survives(ls.PeerFailed, f"rank 1 failed: ValueError: {pad}bad ? and \u00e4", here(3)):
        if rank == 1:
            raise ValueError(f"{pad}bad \ud800 and " + "\u00e4" * 5000)
        ls.barrier()


@on_ranks(2)
def test_no_memory_for_the_result_of_gather(rank):
    def no_memory(self, n):
        raise MemoryError("none left")

    allocate = _collectives._Flat.__call__
    if rank == 0:
        _collectives._Flat.__call__ = no_memory
    with raises(MemoryError) if rank == 0 else raises(ls.PeerFailed, "MemoryError: none left"):
        ls.all_gather(np.zeros(3))
    _collectives._Flat.__call__ = allocate  # the next test may run in this process


class Exits:
    def __reduce__(self):
        return sys.exit, (7,)


@on_ranks(2)
def test_interrupted_unpickling_of_collected_results(rank):
    if rank == 1:
        ls.collect_results([Exits()], 2)
    else:
        with raises(SystemExit, lambda end: end.code == 7):
            ls.collect_results([Exits()], 2)
    ls.barrier()


@on_ranks(2, init=None, shares=False)
def test_a_rank_of_multiprocessing_leaves():
    def main():
        ls.init_dist(timeout=60)
        if ls.get_rank() == 1:
            return  # leaves; the process may live on
        with raises(ls.PeerLost, "rank 1", "left"):
            ls.barrier()

    child = multiprocessing.get_context("fork").Process(target=main)
    child.start()
    child.join()
    assert child.exitcode == 0, child.exitcode


WAITS = {"barrier": ls.barrier, "all_reduce": lambda group: ls.all_reduce(np.zeros(1), group=group)}


def wait_in_a_daemon(rank, wait):
    group = ls.default_group().duplicate()
    if rank == 0:
        threading.Thread(target=WAITS[wait], args=(group,), daemon=True).start()
    ls.barrier()


@pytest.mark.parametrize("wait", WAITS)
def test_a_daemon_in_a_call_when_python_ends(run_ranks, wait):
    for _ in range(5):
        run_ranks(2, wait_in_a_daemon, wait=wait, shares=False)


def start_programs():
    def start(program, **options):
        return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, **options)

    for environment in None, dict(os.environ):
        told = start("import lockstep as ls; ls.init_dist(timeout=5)", env=environment)
        assert told.returncode == 1 and "a program started by a rank is not a rank" in told.stderr, told.stderr
    alone = start("import lockstep as ls; ls.init_dist('none'); assert ls.get_world_size() == 1")
    assert alone.returncode == 0, alone.stderr
    ls.barrier()
    ls.destroy_dist()


def test_a_program_started_by_a_rank_is_not_a_rank(run_ranks, mpirun):
    """It inherits the variables of the launcher, which do not tell the two apart."""
    run_ranks(2, start_programs, launcher=mpirun)
