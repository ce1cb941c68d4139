"""Ranks that go on after one was lost, under `lockstep run --elastic`."""

import os
import signal
import time

import numpy as np
import pytest
from conftest import elastic
from ranks import here, on_ranks, raises

import lockstep as ls


@on_ranks(3, launcher=elastic(3, "1:2"), returned=2)
def test_survivors_of_a_kill_regroup(rank):
    assert ls.is_elastic() and not ls.has_waiting_replacements()
    old = ls.default_group().duplicate()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with raises(ls.PeerLost, "rank 1 was killed by signal 9 (SIGKILL)"):
        while True:
            ls.barrier()
            ls.step_done()
    world = ls.regroup(timeout=30)
    assert world == (rank // 2, 2, 1, [(1, 0, "was killed by signal 9 (SIGKILL)")], []), world
    assert world.lost[0].why.startswith("was killed") and ls.get_dist_info() == (world.rank, world.size)
    x = np.full(1000, world.rank + 1.0)
    ls.all_reduce(x)
    assert (x == 3).all()
    with raises(ls.PeerLost, "generation 0 of the world is over"):
        old.duplicate()


@on_ranks(2, launcher=elastic(2, "1"), returned=2)
def test_a_replacement_joins(rank):
    is_replacement = os.environ["LOCKSTEP_SEGMENT"].endswith(":next")
    if not is_replacement:
        if rank == 1:
            raise ValueError("rank 1 is at its end")
        with raises(ls.PeerFailed, "rank 1 is at its end"):
            ls.barrier()
        alone = ls.regroup()
        assert alone.size == 1 and "ValueError: rank 1 is at its end" in alone.lost[0].why, alone
        ls.step_done()
        while not ls.has_waiting_replacements():
            time.sleep(0.01)
        assert ls.regroup() == (0, 2, 2, [], [1])
    assert ls.get_world_size() == 2
    numbers = ls.all_gather_object(is_replacement)
    assert numbers == [False, True]


@on_ranks(2)
def test_in_ranks_without_elastic_it_is_refused():
    assert not ls.is_elastic() and not ls.has_waiting_replacements()
    ls.step_done()
    with raises(ls.UsageError, "lockstep run -n N --elastic MIN", here(1)):
        ls.regroup()
    with raises(ls.UsageError, "timeout is 'soon'"):
        ls.regroup("soon")
    ls.barrier()


def test_alone_it_is_refused():
    with pytest.raises(ls.UsageError):
        ls.regroup()


def test_the_former_names():
    with pytest.warns(DeprecationWarning, match="count_step is called lockstep.step_done"):
        ls.count_step()
    with pytest.warns(DeprecationWarning, match="replacements_wait is called lockstep.has_waiting_replacements") as caught:
        assert ls.replacements_wait() is ls.has_waiting_replacements() is False
    assert caught[0].filename == __file__
