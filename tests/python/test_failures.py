"""What a rank hears when another one fails, and what ends a wait."""

import re
import textwrap

import pytest
from conftest import survivor


def test_a_mismatch_names_ranks_and_lines(run_ranks):
    output = run_ranks(
        2,
        """
        x = np.zeros(4)
        try:
            if rank == 0:
                ls.all_reduce(x)
            else:
                ls.broadcast(x)
            raise AssertionError
        except ls.MismatchError as error:
            if rank == 0: print(error)
        with raises(ls.MismatchError):
            ls.barrier()  # a dead group says the same
        """,
    )
    assert re.search(r"at program\.py:5: ", output), output
    assert re.search(r"\n *0 +all_reduce +f64 +4 .*program\.py:5\n", output), output
    assert re.search(r"\n *1 +broadcast +f64 +4 +0 .*program\.py:7\n", output), output


def test_a_late_rank(run_ranks):
    run_ranks(
        2,
        """
        if rank == 0:
            with raises(ls.TimeoutError, "rank 1", "barrier", "program.py:4"):
                ls.barrier(timeout=0.2)
            open("done", "w").close()
        else:
            while not os.path.exists("done"):
                time.sleep(0.01)
        """,
    )


def test_the_traceback_of_an_exception_is_printed_once(run_ranks):
    output = run_ranks(
        3,
        """
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # `lockstep run` ends the others after a second
        if rank == 1:
            raise ValueError("rank 1 is at its end")
        ls.barrier()
        """,
        code=1,
    )
    assert output.count("Traceback") == 1 and output.count("lockstep.errors.PeerFailed: barrier on group 'world'") == 2, output


def test_an_uncaught_exception_reaches_the_others(run_ranks):
    program = survivor(
        "raise ValueError('no such file: data.npy')",
        "ls.all_reduce(np.zeros(1))",
        "PeerFailed",
        "rank 1 failed: ValueError: no such file: data.npy",
    )
    output = run_ranks(3, program, code=1)
    assert output.count("heard") == 2 and "Traceback" in output, output


def test_a_killed_rank_is_named(run_ranks):
    program = survivor("os.kill(os.getpid(), signal.SIGKILL)", "ls.barrier()", "PeerLost", "rank 1", "SIGKILL")
    assert "heard" in run_ranks(2, program, code=128 + 9)


def test_a_rank_that_left(run_ranks):
    run_ranks(
        2,
        """
        if rank == 1:
            sys.exit(0)
        with raises(ls.PeerLost, "rank 1"):
            ls.barrier()
        """,
    )


# A thread of rank 0 that can only run where its main thread gives the GIL away: in the call that waits.
WHILE_IT_WAITS = """
        sys.setswitchinterval(1000)
        begins = threading.Event()
        def in_the_meantime():
            begins.wait()
            open("waits", "w").close()
        def until(path):
            while not os.path.exists(path):
                time.sleep(0.01)
        if rank == 0:
            threading.Thread(target=in_the_meantime).start()
            with open("pid", "w") as file: file.write(str(os.getpid()))
"""


def test_other_threads_run_while_a_call_waits(run_ranks):
    run_ranks(
        2,
        WHILE_IT_WAITS
        + """
        if rank == 0:
            begins.set()
        else:
            until("waits")
        ls.barrier()
        """,
    )


def test_an_interrupt_ends_a_wait(run_ranks):
    run_ranks(
        2,
        WHILE_IT_WAITS
        + """
        ls.barrier()
        if rank == 0:
            try:
                begins.set()
                ls.barrier()
                raise AssertionError
            except KeyboardInterrupt:
                open("interrupted", "w").close()
            with raises(ls.PeerFailed):
                ls.barrier()
        else:
            until("waits")
            os.kill(int(open("pid").read()), signal.SIGINT)
            until("interrupted")
            with raises(ls.PeerFailed, "rank 0 failed: KeyboardInterrupt"):
                ls.barrier()
        """,
    )


def test_an_interrupt_ends_a_process_that_waits_in_init_dist(run_ranks):
    run_ranks(
        2,
        "import os, signal, sys, threading, time, lockstep as ls; rank = int(os.environ['RANK'])\n"
        + textwrap.dedent(WHILE_IT_WAITS)
        + textwrap.dedent("""
        if rank == 0:
            begins.set()
            ls.init_dist()
        else:
            until("waits")
            os.kill(int(open("pid").read()), signal.SIGINT)
            until("never")
        """),
        code=128 + 2,
        prelude="",
    )


def test_a_thread_that_abandons_the_group_ends_its_calls(run_ranks):
    run_ranks(
        2,
        """
        def abandon():
            begins.wait()
            ls.default_group().abandon("rank 0 has enough")
        sys.setswitchinterval(1000)
        begins = threading.Event()
        if rank == 0:
            threading.Thread(target=abandon).start()
            begins.set()
        with raises(ls.PeerFailed, "rank 0 has enough"):
            if rank == 0:
                ls.barrier()
            else:
                while not os.path.exists("over"):
                    time.sleep(0.01)
                ls.barrier()
        open("over", "w").close()
        """,
    )


def test_a_handler_of_the_program_does_not_end_a_wait(run_ranks):
    run_ranks(
        2,
        """
        seen = []
        signal.signal(signal.SIGINT, lambda *_: seen.append(1))
        """
        + WHILE_IT_WAITS
        + """
        ls.barrier()
        if rank == 0:
            begins.set()
            ls.barrier()
            assert seen == [1]
        else:
            until("waits")
            os.kill(int(open("pid").read()), signal.SIGINT)
            ls.barrier()
        """,
    )


def test_fork_is_not_a_rank(run_ranks):
    run_ranks(
        2,
        """
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
        """,
    )


@pytest.mark.parametrize("pad", ["", "x"])
def test_an_exception_whose_text_is_no_utf8(run_ranks, pad):
    program = survivor(
        f"raise ValueError('{pad}bad \\ud800 and ' + '\\u00e4' * 5000)",
        "ls.barrier()",
        "PeerFailed",
        f"rank 1 failed: ValueError: {pad}bad ? and \u00e4",
    )
    output = run_ranks(2, program, code=1)
    assert "heard" in output and "Traceback" in output, output


def test_no_memory_for_the_result_of_gather(run_ranks):
    run_ranks(
        2,
        """
        from lockstep import _collectives
        if rank == 0:
            def no_memory(self, n): raise MemoryError("none left")
            _collectives._Flat.__call__ = no_memory
        try:
            ls.all_gather(np.zeros(3))
            raise AssertionError
        except MemoryError:
            assert rank == 0
        except ls.PeerFailed as error:
            assert rank == 1 and "MemoryError: none left" in str(error), error
        """,
    )


def test_interrupted_unpickling_of_collected_results(run_ranks):
    run_ranks(
        2,
        """
        class Exits:
            def __reduce__(self): return sys.exit, (7,)
        try:
            ls.collect_results([Exits()], 2)
            assert rank == 1
        except SystemExit as end:
            assert rank == 0 and end.code == 7
        ls.barrier()
        """,
    )


def test_a_rank_of_multiprocessing_leaves(run_ranks):
    run_ranks(
        2,
        """
        import multiprocessing, lockstep as ls
        from ranks import raises
        def main():
            ls.init_dist(timeout=60)
            if ls.get_rank() == 1: return  # leaves; the process may live on
            with raises(ls.PeerLost, "rank 1", "left"):
                ls.barrier()
        if __name__ == "__main__":
            child = multiprocessing.get_context("fork").Process(target=main)
            child.start()
            child.join()
            assert child.exitcode == 0, child.exitcode
        """,
        prelude="",
    )


@pytest.mark.parametrize("wait", ["ls.barrier(group)", "ls.all_reduce(np.zeros(1), group=group)"])
def test_a_daemon_in_a_call_when_python_ends(run_ranks, wait):
    for _ in range(5):
        run_ranks(
            2,
            f"""
            group = ls.default_group().duplicate()
            if rank == 0:
                threading.Thread(target=lambda: {wait}, daemon=True).start()
            ls.barrier()
            """,
        )


def test_a_program_started_by_a_rank_is_not_a_rank(run_ranks, mpirun):
    """It inherits the variables of the launcher, which do not tell the two apart."""
    run_ranks(
        2,
        """
        import subprocess
        child = "import lockstep as ls; ls.init_dist(timeout=5)"
        def start(program, **options):
            return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, **options)
        for environment in None, dict(os.environ):
            told = start(child, env=environment)
            assert told.returncode == 1 and "a program started by a rank is not a rank" in told.stderr, told.stderr
        alone = start("import lockstep as ls; ls.init_dist('none'); assert ls.get_world_size() == 1")
        assert alone.returncode == 0, alone.stderr
        ls.barrier()
        ls.destroy_dist()
        """,
        launcher=mpirun,
    )
