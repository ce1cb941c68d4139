"""Collectives over several ranks."""

import os
import threading
from pathlib import Path

import numpy as np
from ranks import on_ranks, raises

import lockstep as ls


@on_ranks(3)
def test_arrays(rank, size):
    assert size == 3 and ls.get_backend() == "shared" and ls.infer_launcher() == "lockstep"
    assert (ls.get_local_rank(), ls.get_local_size()) == (rank, 3)
    for dtype in ["i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "f2", "f4", "f8"]:
        for op, expected in [("sum", 6), ("product", 6), ("min", 1), ("max", 3), ("mean", 2)]:
            x = np.full((2, 3), rank + 1, dtype)
            assert ls.all_reduce(x, op) is None
            assert np.array_equal(x, np.full((2, 3), expected, dtype)), (dtype, op, x)
    flags = np.array([rank == 1, True, False])
    ls.all_reduce(flags, "bor")
    assert flags.tolist() == [True, True, False]
    bits = np.array([1 << rank], "u2")
    ls.all_reduce(bits, op="bxor")
    assert bits[0] == 7

    large = np.full(1 << 20, float(rank))
    ls.all_reduce(large, timeout=60)
    assert (large == 3).all()

    x = np.full(4, rank)
    ls.broadcast(x, 2)
    assert (x == 2).all()
    if rank == 1:
        x = np.full(4, 5)
        x.flags.writeable = False  # the source is only read
    ls.broadcast(x, src=1)
    assert (x == 5).all()

    parts = ls.all_gather(np.full((rank, 2), rank, "f4"))  # shapes may differ
    assert [p.shape for p in parts] == [(0, 2), (1, 2), (2, 2)]
    assert all(p.dtype == np.float32 and (p == r).all() for r, p in enumerate(parts))
    parts = ls.all_gather(memoryview(bytearray([rank] * (rank + 1))))
    assert [bytes(p) for p in parts] == [b"\0", b"\1\1", b"\2\2\2"]
    parts = ls.gather(np.array(rank), dst=1)
    assert parts == ([0, 1, 2] if rank == 1 else [])

    seeds = ls.all_gather(np.array(ls.sync_random_seed()))
    assert seeds[0] == seeds[1] == seeds[2]

    group = ls.default_group().split(rank // 2)  # ranks are those of the group
    assert (group.rank, group.size) == [(0, 2), (1, 2), (0, 1)][rank]
    x = np.array([rank])
    ls.all_reduce(x, "sum", group)
    assert x[0] == [1, 1, 2][rank]
    ls.barrier(group)
    ls.barrier(timeout=30)


class Thing:
    def __init__(self, x):
        self.x = x


@on_ranks(3)
def test_objects(rank):
    values = ls.all_gather_object({"rank": rank, "more": [None] * rank, "thing": Thing(rank)})
    assert [v["rank"] for v in values] == [0, 1, 2] and [v["thing"].x for v in values] == [0, 1, 2]
    assert ls.gather_object("x" * rank, 1) == (["", "x", "xx"] if rank == 1 else None)
    items = [rank, str(rank), None]
    ls.broadcast_object_list(items, src=1)
    assert items == [1, "1", None]

    part = [[(r, i) for i in range(n)] for r, n in enumerate([3, 1, 2])][rank]
    expected = [(0, 0), (1, 0), (2, 0), (0, 1), (2, 1)]
    for folder in None, ".":
        all = ls.collect_results(part, 5, tmpdir=folder)
        assert all == (expected if rank == 0 else None), all
    assert not [f for f in os.listdir(".") if f.startswith("lockstep-")]

    # What ranks disagree on is known before anything is changed, and the group lives on.
    for call, text in [
        (lambda: ls.broadcast_object_list([0] * (rank + 1)), "the lengths of their lists"),
        (lambda: ls.gather_object(0, dst=rank), "dst"),
        (lambda: ls.all_gather_object(0) if rank else ls.gather_object(0), "the function they call"),
        (lambda: ls.collect_results([], rank), "size"),
    ]:
        with raises(ls.MismatchError, text, "test_ranks.py:"):
            call()

    if rank == 0:
        assert ls.collect_results([1], 1) == [1]
    else:
        assert ls.collect_results([], 1) is None
    try:
        ls.collect_results([lambda: 0] if rank == 2 else [rank], 3)
        assert rank == 1
    except ls.PeerFailed as error:
        assert rank == 0 and "rank 2 failed" in str(error) and "pickle" in str(error), error
    except Exception as error:
        assert rank == 2 and "pickle" in str(error), error

    data = {"b": 1.0, "a": np.full(2, rank), "n": rank} if rank else {"n": rank, "a": np.full(2, rank), "b": 1.0}
    ls.all_reduce_dict(data)
    assert data["n"] == 3 and data["b"] == 3.0 and (data["a"] == 3).all() and type(data["n"]) is int
    for bad, text in [
        ({"x": rank} if rank else {"y": 0}, "'y: int' is on rank 0 but not on rank 1"),
        ({"x": np.zeros(rank + 1)}, "'x: f64' has 1 elements on rank 0 and 2 on rank 1"),
        ({"x": 1 if rank else 1.0}, "'x: f64' is on rank 0 but not on rank 1"),
    ]:
        with raises(ls.MismatchError, text):
            ls.all_reduce_dict(bad)
    ls.barrier()


@on_ranks(3)
def test_control_flow(rank):
    made = ls.main_process_first(lambda: os.path.exists("made") or Path("made").touch())
    assert made is (None if rank == 0 else True)
    out_of_range = "list index out of range"
    with raises(IndexError, out_of_range) if rank == 0 else raises(ls.PeerFailed, f"rank 0 failed inside: IndexError: {out_of_range}"):
        ls.main_process_first(lambda: [][rank])
    with raises(ls.UsageError if rank == 0 else ls.PeerFailed):
        ls.main_process_first(ls.barrier)
    assert ls.master_only(lambda: "only here")() == ("only here" if rank == 0 else None)
    ls.barrier()


@on_ranks(2)
def test_a_thread_with_a_group_of_its_own(rank):
    other = ls.default_group().duplicate()
    sums = []

    def work():
        for i in range(100):
            x = np.array([i + rank])
            ls.all_reduce(x, group=other)
            sums.append(int(x[0]))

    thread = threading.Thread(target=work)
    thread.start()
    for _ in range(100):
        x = np.array([float(rank)])
        ls.all_reduce(x)
        assert x[0] == 1
    thread.join()
    assert sums == [2 * i + 1 for i in range(100)]


@on_ranks(2)
def test_leaving_and_joining_again_alone():
    ls.barrier()
    ls.destroy_dist()
    ls.destroy_dist()
    assert ls.get_dist_info() == (0, 1) and not ls.is_distributed()
    ls.init_dist(launcher="none")
    assert ls.get_world_size() == 1


@on_ranks(2)
def test_numbers_of_dicts_have_no_width(rank):
    def reduced(value, op):
        data = {"x": value, "array": np.array([rank], "i8"), "f": 0.5}
        ls.all_reduce_dict(data, op)
        assert data["array"].tolist() == [{"sum": 1, "product": 0, "min": 0, "max": 1, "mean": 0}[op]]
        return data["x"]

    big = 2**62
    for value, op, expected in [
        (big, "sum", 2**63),
        (-big - 1, "sum", -(2**63) - 2),
        (big, "product", 2**124),
        (big + rank, "max", big + 1),
        (big + rank, "min", big),
        (big, "mean", float(big)),
        (3 + rank, "mean", 3.5),
        (np.int64(3 + rank), "mean", 3.5),
        (-3 - rank, "mean", -3.5),
        (2**63 - 1, "sum", 2**64 - 2),
    ]:
        found = reduced(value, op)
        assert found == expected and type(found) is type(expected), (found, expected)
    for op, expected in ("band", 1), ("bor", 7), ("bxor", 6):
        data = {"x": 3 + 2 * rank, "y": -1}
        ls.all_reduce_dict(data, op)
        assert data == {"x": expected, "y": 0 if op == "bxor" else -1}, data
    with raises(ls.MismatchError, "x: int", "x: i64"):
        ls.all_reduce_dict({"x": 1 if rank else np.array([1], "i8")})
    ls.barrier()
