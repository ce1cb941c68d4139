"""Calls over tensors and torch.distributed that a rank refuses: on one rank, and on all alike."""

# mypy: disable-error-code=call-arg

from pathlib import Path

import numpy as np
import pytest
from ranks import on_ranks, on_torch_ranks, place_of, raises, wait_for
from test_refused import assert_that_the_group_goes_on, refuse_in_all, refuse_in_rank_1

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402

import lockstep as ls  # noqa: E402

CALLS = {
    "all_reduce_params of a sparse tensor": (
        lambda: ls.all_reduce_params([torch.ones(2)]),
        lambda: ls.all_reduce_params([torch.ones(2).to_sparse()]),
    ),
    "all_reduce_params of an expanded tensor": (
        lambda: ls.all_reduce_params([torch.ones(2)]),
        lambda: ls.all_reduce_params([torch.ones(1).expand(2)]),
    ),
    "all_reduce_params of one tensor": (lambda: ls.all_reduce_params([torch.ones(2)]), lambda: ls.all_reduce_params(torch.ones(2))),
    "all_reduce_params of a dict": (lambda: ls.all_reduce_params([torch.ones(2)]), lambda: ls.all_reduce_params({"a": torch.ones(2)})),
    "all_reduce_params of numbers": (lambda: ls.all_reduce_params([torch.ones(2)]), lambda: ls.all_reduce_params([1.0, 2.0])),
    "all_reduce_params by another name": (
        lambda: ls.all_reduce_params([torch.ones(2)]),
        lambda: ls.all_reduce_params([torch.ones(2)], reduce="sum"),
    ),
}


@pytest.mark.parametrize("name", CALLS)
@on_ranks(2)
def test_by_one_rank(rank, name):
    refuse_in_rank_1(rank, *CALLS[name])


@on_ranks(2)
def test_by_all_ranks():
    refuse_in_all(CALLS)
    assert_that_the_group_goes_on()


@on_ranks(2, shares=False)
def test_an_exception_between_two_messages(rank):
    def no_memory(*_):
        raise MemoryError("none left")

    if rank == 1:
        torch.Tensor.copy_ = no_memory
    for call in (
        lambda: ls.all_reduce_params([torch.ones(2, 2).t(), torch.full([1], 1.0, dtype=torch.float64)]),
        lambda: ls.all_reduce(np.full(1, 1000.0)),
    ):
        with raises((MemoryError, ls.PeerFailed), "none left") if rank == 1 else raises(ls.PeerFailed, "MemoryError: none left"):
            call()


TORCH = {
    "all_reduce of floats by bxor": (lambda: dist.all_reduce(torch.ones(2)), lambda: dist.all_reduce(torch.ones(2), dist.ReduceOp.BXOR)),
    "all_reduce into an expanded tensor": (lambda: dist.all_reduce(torch.ones(4)), lambda: dist.all_reduce(torch.ones(1).expand(4))),
    "all_gather_into_tensor into an expanded tensor": (
        lambda: dist.all_gather_into_tensor(torch.ones(4), torch.ones(2)),
        lambda: dist.all_gather_into_tensor(torch.ones(1).expand(4), torch.ones(2)),
    ),
    "reduce_scatter of too few tensors": (
        lambda: dist.reduce_scatter(torch.ones(1), [torch.ones(1)] * 2),
        lambda: dist.reduce_scatter(torch.ones(1), [torch.ones(1)]),
    ),
    "all_gather into tensors of another size": (
        lambda: dist.all_gather([torch.ones(2), torch.ones(2)], torch.ones(2)),
        lambda: dist.all_gather([torch.ones(2), torch.ones(2)], torch.ones(3)),
    ),
}


@pytest.mark.parametrize("name", TORCH)
@pytest.mark.parametrize("pending", [False, True])
@on_torch_ranks(2)
def test_of_torch_by_one_rank(rank, name, pending):
    made, refused = TORCH[name]
    y = torch.ones(3)
    work = dist.all_reduce(y, async_op=True) if pending else None
    if rank == 1:
        with raises(ls.UsageError):
            refused()
    with raises(ls.MismatchError, "refused"):
        made()
    if work:
        work.wait()
    assert y.tolist() == ([2, 2, 2] if work else [1, 1, 1]), y


@on_torch_ranks(2)
def test_of_torch_by_all_ranks():
    refuse_in_all(TORCH)


@on_torch_ranks(2, env={"LOCKSTEP_TIMEOUT": "20"})
def test_of_torch_does_not_wait(rank):
    if rank == 0:
        wait_for("refused")
    work = dist.all_reduce(torch.ones(3), async_op=True)
    with raises(ls.UsageError, "bit operations are for integers"):
        dist.all_reduce(torch.ones(2), dist.ReduceOp.BXOR)
    Path("refused").touch()
    work.wait()
    x = torch.ones(1)
    dist.all_reduce(x)
    assert x.item() == 2


# Of rank 1, which refuses the first; and of rank 0.
MESSAGES = {
    "send": (
        lambda: dist.group.WORLD.send([torch.ones(2)] * 2, 0, 7),
        lambda: dist.send(torch.ones(2), 0),
        lambda: dist.recv(torch.ones(2), 1),
    ),
    "recv": (
        lambda: dist.recv(torch.ones(1).expand(2), 0, tag=7),
        lambda: dist.recv(torch.ones(2), 0),
        lambda: dist.send(torch.ones(2), 1),
    ),
}


@pytest.mark.parametrize("name", MESSAGES)
@pytest.mark.parametrize("goes_on", [False, True])
@on_torch_ranks(2)
def test_of_a_message_of_torch_by_one_rank(rank, name, goes_on):
    refused, made, of_rank_0 = MESSAGES[name]
    if rank == 1:
        with raises(ls.UsageError):
            refused()
    if rank == 0 or goes_on:
        with raises(ls.MismatchError, f"rank 1 has refused {name}: ", place_of(refused)):
            of_rank_0() if rank == 0 else made()
    x = torch.ones(1)
    dist.all_reduce(x)  # the group is as before
    assert x.item() == 2


@on_torch_ranks(2)
def test_of_a_message_of_torch_by_both_ranks(rank):
    refused, _, _ = MESSAGES["send"]
    for _ in range(2):
        with raises(ls.UsageError):
            refused() if rank == 1 else dist.recv(torch.ones(1).expand(2), 1, tag=7)
        x = torch.full([2], 1.0 + rank)
        dist.send(x, 0, tag=7) if rank == 1 else dist.recv(x, 1, tag=7)
        assert x.tolist() == [2, 2], x
