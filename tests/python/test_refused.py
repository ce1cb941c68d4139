"""Calls that a rank refuses: on one rank, and on all alike."""

# mypy: disable-error-code=call-arg

import numpy as np
import pytest
from ranks import on_ranks, place_of, raises

import lockstep as ls


def refuse_in_rank_1(rank, made, refused):
    ls.barrier()
    if rank == 1:
        with raises(ls.UsageError):
            refused()
    with raises(ls.MismatchError, "refused", "#2: ", place_of(refused)):
        made()


def refuse_in_all(calls):
    for name, (made, refused) in calls.items():
        print(name)
        for _ in range(2):
            with raises(ls.UsageError):
                refused()
            made()


def assert_that_the_group_goes_on():
    x = np.ones(1)
    ls.all_reduce(x)
    assert x[0] == 2


CALLS = {
    "all_reduce of an array in Fortran's order": (
        lambda: ls.all_reduce(np.ones((2, 2))),
        lambda: ls.all_reduce(np.ones((2, 2), order="F")),
    ),
    "all_reduce by an unknown op": (lambda: ls.all_reduce(np.ones(2)), lambda: ls.all_reduce(np.ones(2), "median")),
    "all_reduce of strings": (lambda: ls.all_reduce(np.ones(2)), lambda: ls.all_reduce(np.array(["a", "b"]))),
    "all_reduce with a timeout of words": (lambda: ls.all_reduce(np.ones(2)), lambda: ls.all_reduce(np.ones(2), timeout="soon")),
    "broadcast from no rank": (lambda: ls.broadcast(np.ones(2)), lambda: ls.broadcast(np.ones(2), 9)),
    "broadcast from a word": (lambda: ls.broadcast(np.ones(2)), lambda: ls.broadcast(np.ones(2), "a")),
    "all_gather of a list": (lambda: ls.all_gather(np.ones(2)), lambda: ls.all_gather([1, 2])),
    "gather to no rank": (lambda: ls.gather(np.ones(2)), lambda: ls.gather(np.ones(2), -1)),
    "all_reduce by another name": (lambda: ls.all_reduce(np.ones(2)), lambda: ls.all_reduce(np.ones(2), reduce="sum")),
    "all_reduce of nothing": (lambda: ls.all_reduce(np.ones(2)), lambda: ls.all_reduce()),
    "broadcast of too much": (lambda: ls.broadcast(np.ones(2)), lambda: ls.broadcast(np.ones(2), 0, None, None, 1)),
    "barrier of a tag": (lambda: ls.barrier(), lambda: ls.barrier(tag=1)),
    "sync_random_seed of a tag": (lambda: ls.sync_random_seed(), lambda: ls.sync_random_seed(tag=1)),
    "main_process_first of nothing": (lambda: ls.main_process_first(lambda: 0), lambda: ls.main_process_first(None)),
    "split by nothing": (lambda: ls.default_group().split(0), lambda: ls.default_group().split(None)),
    "split by a word": (lambda: ls.default_group().split(0), lambda: ls.default_group().split(0, key="a")),
    "duplicate for a thread": (lambda: ls.default_group().duplicate(), lambda: ls.default_group().duplicate(1)),
    "all_gather by another name": (lambda: ls.all_gather(np.ones(2)), lambda: ls.all_gather(np.ones(2), dim=0)),
    "gather by another name": (lambda: ls.gather(np.ones(2)), lambda: ls.gather(np.ones(2), root=0, group=ls.default_group())),
    "all_reduce_dict of nothing": (lambda: ls.all_reduce_dict({}), lambda: ls.all_reduce_dict()),
    "all_gather_object of too much": (lambda: ls.all_gather_object(1), lambda: ls.all_gather_object(1, None, None, 1)),
    "gather_object by another name": (lambda: ls.gather_object(1), lambda: ls.gather_object(1, root=0)),
    "broadcast_object_list by another name": (lambda: ls.broadcast_object_list([1]), lambda: ls.broadcast_object_list([1], root=0)),
    "collect_results without a size": (lambda: ls.collect_results([1], 2), lambda: ls.collect_results([1])),
}


@pytest.mark.parametrize("name", CALLS)
@on_ranks(2)
def test_by_one_rank(rank, name):
    refuse_in_rank_1(rank, *CALLS[name])


@on_ranks(2)
def test_by_all_ranks():
    refuse_in_all(CALLS)
    assert_that_the_group_goes_on()


OBJECTS = {
    "all_gather_object": (lambda: ls.all_gather_object(1), lambda: ls.all_gather_object(lambda: 0)),
    "gather_object": (lambda: ls.gather_object(1), lambda: ls.gather_object(lambda: 0)),
    "broadcast_object_list": (lambda: ls.broadcast_object_list([1], 1), lambda: ls.broadcast_object_list([lambda: 0], 1)),
    "all_reduce_dict": (lambda: ls.all_reduce_dict({"a": 1.0}), lambda: ls.all_reduce_dict({"a": "b"})),
    "gather_object to no rank": (lambda: ls.gather_object(1), lambda: ls.gather_object(1, 9)),
    "gather_object to a word": (lambda: ls.gather_object(1), lambda: ls.gather_object(1, dst="a")),
    "broadcast_object_list from a word": (lambda: ls.broadcast_object_list([1]), lambda: ls.broadcast_object_list([1], "a")),
    "broadcast_object_list of a tuple": (lambda: ls.broadcast_object_list([1], 1), lambda: ls.broadcast_object_list((1,), 1)),
    "all_reduce_dict of a list": (lambda: ls.all_reduce_dict({"a": 1.0}), lambda: ls.all_reduce_dict([1.0])),
    "collect_results of a number": (lambda: ls.collect_results([1], 2), lambda: ls.collect_results(1, 2)),
    "collect_results of a dict": (lambda: ls.collect_results([1], 2), lambda: ls.collect_results({"a": 1}, 2)),
    "collect_results of a text": (lambda: ls.collect_results([1], 2), lambda: ls.collect_results("a", 2)),
    "collect_results of nothing": (lambda: ls.collect_results([1], 2), lambda: ls.collect_results(None, 2)),
    "collect_results of a negative size": (lambda: ls.collect_results([1], 2), lambda: ls.collect_results([1], -1)),
    "collect_results on CUDA": (lambda: ls.collect_results([1], 2), lambda: ls.collect_results([1], 2, "cuda")),
    "collect_results by a number": (lambda: ls.collect_results([1], 2, tmpdir="."), lambda: ls.collect_results([1], 2, tmpdir=7)),
}


@on_ranks(2)
def test_objects_carry_the_refusal(rank):
    for name, (made, refused) in OBJECTS.items():
        print(name)
        for _ in range(2):
            if rank == 1:
                with raises(Exception, lambda error: not isinstance(error, ls.PeerFailed)):
                    refused()
            else:
                with raises(ls.PeerFailed, "rank 1 failed: ", place_of(made)):
                    made()
        made()


WRONG_GROUP = {
    "all_reduce": lambda: ls.all_reduce(np.ones(1), group="world"),
    "barrier": lambda: ls.barrier(group="world"),
    "all_gather": lambda: ls.all_gather(np.ones(1), group="world"),
    "all_gather_object": lambda: ls.all_gather_object(np.ones(1), group="world"),
    "all_reduce_params": lambda: ls.all_reduce_params([np.ones(1)], group="world"),
}


@on_ranks(2)
def test_a_wrong_group_counts_nowhere(rank):
    for operation, call in WRONG_GROUP.items():
        if rank == 1:
            with raises(ls.UsageError, "group is 'world'; it must be", place_of(call)) as refusal:
                call()
            assert refusal.caught.operation == operation and isinstance(refusal.caught, TypeError), refusal.caught
        assert_that_the_group_goes_on()
