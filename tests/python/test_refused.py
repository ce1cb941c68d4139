"""Calls that a rank refuses: on one rank, and on all alike."""

import os

import pytest

CALLS = {
    "all_reduce of an array in Fortran's order": ("ls.all_reduce(np.ones((2, 2)))", "ls.all_reduce(np.ones((2, 2), order='F'))"),
    "all_reduce by an unknown op": ("ls.all_reduce(np.ones(2))", "ls.all_reduce(np.ones(2), 'median')"),
    "all_reduce of strings": ("ls.all_reduce(np.ones(2))", "ls.all_reduce(np.array(['a', 'b']))"),
    "all_reduce with a timeout of words": ("ls.all_reduce(np.ones(2))", "ls.all_reduce(np.ones(2), timeout='soon')"),
    "broadcast from no rank": ("ls.broadcast(np.ones(2))", "ls.broadcast(np.ones(2), 9)"),
    "broadcast from a word": ("ls.broadcast(np.ones(2))", "ls.broadcast(np.ones(2), 'a')"),
    "all_gather of a list": ("ls.all_gather(np.ones(2))", "ls.all_gather([1, 2])"),
    "gather to no rank": ("ls.gather(np.ones(2))", "ls.gather(np.ones(2), -1)"),
    "all_reduce_params of a sparse tensor": (
        "import torch; ls.all_reduce_params([torch.ones(2)])",
        "import torch; ls.all_reduce_params([torch.ones(2).to_sparse()])",
    ),
    "all_reduce_params of an expanded tensor": (
        "import torch; ls.all_reduce_params([torch.ones(2)])",
        "import torch; ls.all_reduce_params([torch.ones(1).expand(2)])",
    ),
    "all_reduce by another name": ("ls.all_reduce(np.ones(2))", "ls.all_reduce(np.ones(2), reduce='sum')"),
    "all_reduce of nothing": ("ls.all_reduce(np.ones(2))", "ls.all_reduce()"),
    "broadcast of too much": ("ls.broadcast(np.ones(2))", "ls.broadcast(np.ones(2), 0, None, None, 1)"),
    "barrier of a tag": ("ls.barrier()", "ls.barrier(tag=1)"),
    "sync_random_seed of a tag": ("ls.sync_random_seed()", "ls.sync_random_seed(tag=1)"),
    "main_process_first of nothing": ("ls.main_process_first(lambda: 0)", "ls.main_process_first(None)"),
    "split by nothing": ("ls.default_group().split(0)", "ls.default_group().split(None)"),
    "split by a word": ("ls.default_group().split(0)", "ls.default_group().split(0, key='a')"),
    "duplicate for a thread": ("ls.default_group().duplicate()", "ls.default_group().duplicate(1)"),
    "all_gather by another name": ("ls.all_gather(np.ones(2))", "ls.all_gather(np.ones(2), dim=0)"),
    "gather by another name": ("ls.gather(np.ones(2))", "ls.gather(np.ones(2), root=0, group=ls.default_group())"),
    "all_reduce_dict of nothing": ("ls.all_reduce_dict({})", "ls.all_reduce_dict()"),
    "all_gather_object of too much": ("ls.all_gather_object(1)", "ls.all_gather_object(1, None, None, 1)"),
    "gather_object by another name": ("ls.gather_object(1)", "ls.gather_object(1, root=0)"),
    "broadcast_object_list by another name": ("ls.broadcast_object_list([1])", "ls.broadcast_object_list([1], root=0)"),
    "collect_results without a size": ("ls.collect_results([1], 2)", "ls.collect_results([1])"),
    "all_reduce_params of one tensor": (
        "import torch; ls.all_reduce_params([torch.ones(2)])",
        "import torch; ls.all_reduce_params(torch.ones(2))",
    ),
    "all_reduce_params of a dict": (
        "import torch; ls.all_reduce_params([torch.ones(2)])",
        "import torch; ls.all_reduce_params({'a': torch.ones(2)})",
    ),
    "all_reduce_params of numbers": (
        "import torch; ls.all_reduce_params([torch.ones(2)])",
        "import torch; ls.all_reduce_params([1.0, 2.0])",
    ),
    "all_reduce_params by another name": (
        "import torch; ls.all_reduce_params([torch.ones(2)])",
        "import torch; ls.all_reduce_params([torch.ones(2)], reduce='sum')",
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_by_one_rank(run_ranks, name):
    made, refused = CALLS[name]
    run_ranks(
        2,
        f"""
        ls.barrier()
        if rank == 1:
            with raises(ls.UsageError):
                {refused}
        with raises(ls.MismatchError, "refused", "#2: ", "program.py:5"):
            {made}
        """,
    )


@pytest.mark.parametrize("name", CALLS)
def test_by_all_ranks(run_ranks, name):
    made, refused = CALLS[name]
    run_ranks(
        2,
        f"""
        for _ in range(2):
            with raises(ls.UsageError):
                {refused}
            {made}
        x = np.ones(1)
        ls.all_reduce(x)
        assert x[0] == 2
        """,
    )


OBJECTS = {
    "all_gather_object": ("ls.all_gather_object(1)", "ls.all_gather_object(lambda: 0)"),
    "gather_object": ("ls.gather_object(1)", "ls.gather_object(lambda: 0)"),
    "broadcast_object_list": ("ls.broadcast_object_list([1], 1)", "ls.broadcast_object_list([lambda: 0], 1)"),
    "all_reduce_dict": ("ls.all_reduce_dict({'a': 1.0})", "ls.all_reduce_dict({'a': 'b'})"),
    "gather_object to no rank": ("ls.gather_object(1)", "ls.gather_object(1, 9)"),
    "gather_object to a word": ("ls.gather_object(1)", "ls.gather_object(1, dst='a')"),
    "broadcast_object_list from a word": ("ls.broadcast_object_list([1])", "ls.broadcast_object_list([1], 'a')"),
    "broadcast_object_list of a tuple": ("ls.broadcast_object_list([1], 1)", "ls.broadcast_object_list((1,), 1)"),
    "all_reduce_dict of a list": ("ls.all_reduce_dict({'a': 1.0})", "ls.all_reduce_dict([1.0])"),
    "collect_results of a number": ("ls.collect_results([1], 2)", "ls.collect_results(1, 2)"),
    "collect_results of a dict": ("ls.collect_results([1], 2)", "ls.collect_results({'a': 1}, 2)"),
    "collect_results of a text": ("ls.collect_results([1], 2)", "ls.collect_results('a', 2)"),
    "collect_results of nothing": ("ls.collect_results([1], 2)", "ls.collect_results(None, 2)"),
    "collect_results of a negative size": ("ls.collect_results([1], 2)", "ls.collect_results([1], -1)"),
    "collect_results on CUDA": ("ls.collect_results([1], 2)", "ls.collect_results([1], 2, 'cuda')"),
    "collect_results by a number": ("ls.collect_results([1], 2, tmpdir='.')", "ls.collect_results([1], 2, tmpdir=7)"),
}


@pytest.mark.parametrize("name", OBJECTS)
def test_objects_carry_the_refusal(run_ranks, name):
    made, refused = OBJECTS[name]
    run_ranks(
        2,
        f"""
        for _ in range(2):
            try:
                if rank == 1: {refused}
                else: {made}
                raise AssertionError
            except ls.PeerFailed as error:
                assert rank == 0 and "rank 1 failed: " in str(error) and "program.py:" in str(error), error
            except Exception as error:
                assert rank == 1 and not isinstance(error, AssertionError), error
            {made}
        """,
    )


@pytest.mark.parametrize("call", ["all_reduce", "barrier", "all_gather", "all_gather_object", "all_reduce_params"])
def test_a_wrong_group_counts_nowhere(run_ranks, call):
    data = "" if call == "barrier" else "[np.ones(1)], " if call == "all_reduce_params" else "np.ones(1), "
    run_ranks(
        2,
        f"""
        if rank == 1:
            try:
                ls.{call}({data}group="world")
                raise AssertionError
            except ls.UsageError as error:
                assert isinstance(error, TypeError) and "group is 'world'; it must be" in str(error), error
                assert error.operation == "{call}" and error.lineno == 4, error
        x = np.ones(1)
        ls.all_reduce(x)
        assert x[0] == 2
        """,
    )


def test_an_exception_between_two_messages(run_ranks):
    run_ranks(
        2,
        """
        import torch
        def no_memory(*_): raise MemoryError("none left")
        if rank == 1: torch.Tensor.copy_ = no_memory
        for call in (
            lambda: ls.all_reduce_params([torch.ones(2, 2).t(), torch.full([1], 1.0, dtype=torch.float64)]),
            lambda: ls.all_reduce(np.full(1, 1000.0)),
        ):
            try:
                call()
                raise AssertionError
            except MemoryError:
                assert rank == 1
            except ls.PeerFailed as error:
                assert "MemoryError: none left" in str(error), error
        """,
    )


TORCH = {
    "all_reduce of floats by bxor": (
        "dist.all_reduce(torch.ones(2))",
        "dist.all_reduce(torch.ones(2), dist.ReduceOp.BXOR)",
    ),
    "all_reduce into an expanded tensor": (
        "dist.all_reduce(torch.ones(4))",
        "dist.all_reduce(torch.ones(1).expand(4))",
    ),
    "all_gather_into_tensor into an expanded tensor": (
        "dist.all_gather_into_tensor(torch.ones(4), torch.ones(2))",
        "dist.all_gather_into_tensor(torch.ones(1).expand(4), torch.ones(2))",
    ),
    "reduce_scatter of too few tensors": (
        "dist.reduce_scatter(torch.ones(1), [torch.ones(1)] * 2)",
        "dist.reduce_scatter(torch.ones(1), [torch.ones(1)])",
    ),
    "all_gather into tensors of another size": (
        "dist.all_gather([torch.ones(2), torch.ones(2)], torch.ones(2))",
        "dist.all_gather([torch.ones(2), torch.ones(2)], torch.ones(3))",
    ),
}


@pytest.mark.parametrize("name", TORCH)
@pytest.mark.parametrize("pending", [False, True])
def test_of_torch_by_one_rank(run_torch, name, pending):
    made, refused = TORCH[name]
    run_torch(
        2,
        f"""
        import lockstep as ls
        y = torch.ones(3)
        work = dist.all_reduce(y, async_op=True) if {pending} else None
        if rank == 1:
            with raises(ls.UsageError):
                {refused}
        with raises(ls.MismatchError, "refused"):
            {made}
        if work: work.wait()
        assert y.tolist() == ([2, 2, 2] if work else [1, 1, 1]), y
        """,
    )


@pytest.mark.parametrize("name", TORCH)
def test_of_torch_by_all_ranks(run_torch, name):
    made, refused = TORCH[name]
    run_torch(
        2,
        f"""
        import lockstep as ls
        for _ in range(2):
            with raises(ls.UsageError):
                {refused}
            {made}
        """,
    )


def test_of_torch_does_not_wait(run_torch):
    run_torch(
        2,
        """
        import lockstep as ls
        if rank == 0:
            while not os.path.exists("refused"): time.sleep(0.01)
        work = dist.all_reduce(torch.ones(3), async_op=True)
        with raises(ls.UsageError, "bit operations are for integers"):
            dist.all_reduce(torch.ones(2), dist.ReduceOp.BXOR)
        open("refused", "w").close()
        work.wait()
        x = torch.ones(1)
        dist.all_reduce(x)
        assert x.item() == 2
        """,
        env={**os.environ, "LOCKSTEP_TIMEOUT": "20"},
    )


# Of rank 1, which refuses the first; and of rank 0.
MESSAGES = {
    "send": ("dist.group.WORLD.send([torch.ones(2)] * 2, 0, 7)", "dist.send(torch.ones(2), 0)", "dist.recv(torch.ones(2), 1)"),
    "recv": ("dist.recv(torch.ones(1).expand(2), 0, tag=7)", "dist.recv(torch.ones(2), 0)", "dist.send(torch.ones(2), 1)"),
}


@pytest.mark.parametrize("name", MESSAGES)
@pytest.mark.parametrize("goes_on", [False, True])
def test_of_a_message_of_torch_by_one_rank(run_torch, name, goes_on):
    refused, made, of_rank_0 = MESSAGES[name]
    run_torch(
        2,
        f"""
        import lockstep as ls
        if rank == 1:
            with raises(ls.UsageError):
                {refused}
        if rank == 0 or {goes_on}:
            with raises(ls.MismatchError, "rank 1 has refused {name}: ", "program.py:5"):
                {of_rank_0} if rank == 0 else {made}
        x = torch.ones(1)
        dist.all_reduce(x)  # the group is as before
        assert x.item() == 2
        """,
    )


def test_of_a_message_of_torch_by_both_ranks(run_torch):
    run_torch(
        2,
        f"""
        import lockstep as ls
        for _ in range(2):
            with raises(ls.UsageError):
                {MESSAGES["send"][0]} if rank == 1 else dist.recv(torch.ones(1).expand(2), 1, tag=7)
            x = torch.full([2], 1.0 + rank)
            dist.send(x, 0, tag=7) if rank == 1 else dist.recv(x, 1, tag=7)
            assert x.tolist() == [2, 2], x
        """,
    )
