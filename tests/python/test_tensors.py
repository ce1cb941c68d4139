"""Tensors of PyTorch in the collectives, and what mmengine.dist has for them."""

import resource
import signal
from collections import namedtuple
from pathlib import Path

import pytest
from ranks import on_ranks, raises

torch = pytest.importorskip("torch")

import lockstep as ls  # noqa: E402


@on_ranks(2)
def test_tensors_over_ranks(rank, size):
    for dtype in [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16,
                  torch.float32, torch.float64]:  # fmt: skip
        x = torch.full((2, 3), rank + 1, dtype=dtype)
        ls.all_reduce(x)
        assert x.eq(3).all() and x.dtype is dtype, x
        ls.broadcast(x.fill_(rank), 1)
        assert x.eq(1).all()
        parts = ls.all_gather(torch.full((rank + 1, 2), rank, dtype=dtype))
        assert [p.shape for p in parts] == [(1, 2), (2, 2)] and all(p.dtype is dtype and p.eq(r).all() for r, p in enumerate(parts))
    flags = torch.tensor([rank == 1, False])
    ls.all_reduce(flags, "bor")
    assert flags.tolist() == [True, False]
    part = torch.zeros(4)
    ls.all_reduce(part[1:3].fill_(1))  # contiguous, and a view
    assert part.tolist() == [0, 2, 2, 0]
    shared = torch.ones(4)
    ls.all_reduce_dict({"a": shared, "b": shared, "c": shared[1:], "d": shared[:3]})
    assert shared.eq(size).all(), shared
    data = {"loss": torch.tensor(rank + 1.0), "n": rank}
    ls.all_reduce_dict(data, "mean")
    assert data["loss"].item() == 1.5

    for coalesce, bucket_size_mb in [(True, -1), (True, 1e-5), (False, -1)]:
        params = [torch.nn.Parameter(torch.full((3, 2), rank + 1.0)), torch.full((4, 5), rank + 1).t(),
                  torch.full((2,), rank + 1.0, dtype=torch.bfloat16), torch.zeros(0), torch.tensor(rank + 1.0)]  # fmt: skip
        ls.all_reduce_params((p for p in params), coalesce, bucket_size_mb)
        assert all(p.eq(3).all() for p in params), params
        ls.all_reduce_params(params, coalesce, bucket_size_mb, op="mean")
        twice = torch.ones(3)
        ls.all_reduce_params([twice, twice], coalesce, bucket_size_mb)
        assert twice.eq(size).all(), twice
        views = torch.ones(6)
        ls.all_reduce_params([views[:4], views[2:], views.view(2, 3).t(), views.detach()], coalesce, bucket_size_mb)
        assert views.eq(size).all(), views
        assert all(p.eq(3).all() for p in params) and params[0].grad is None and params[0].is_leaf, params


@pytest.mark.parametrize(
    "tensor, text",
    [
        (torch.zeros(3, 4).t(), "is not C-contiguous"),
        (torch.zeros(6)[::2], "is not C-contiguous"),
        (torch.zeros(3, requires_grad=True), "x.detach"),
        (torch.nn.Parameter(torch.zeros(3)), "x.detach"),
        (torch.zeros(3, device="meta"), "CPU"),
        (torch.zeros(3, dtype=torch.complex64), "complex64"),
        *((torch.empty(3, dtype=getattr(torch, name)), name) for name in ("int4", "uint2") if hasattr(torch, name)),
        (torch.zeros(3).to_sparse(), "CPU|sparse"),
    ],
)
def test_what_is_refused(tensor, text):
    with pytest.raises(ls.UsageError, match=text):
        ls.all_reduce(tensor)


def test_all_reduce_params_takes_the_cpu_only():
    with pytest.raises(ls.UsageError, match="tensor 1 is torch.strided on meta"):
        ls.all_reduce_params([torch.zeros(1), torch.zeros(1, device="meta")])
    ls.all_reduce_params([])


@pytest.mark.parametrize("coalesce", [True, False])
def test_all_reduce_params_is_seen_by_backward(coalesce):
    loss = torch.ones(3, requires_grad=True).sqrt()  # saves its result
    ls.all_reduce_params([loss], coalesce)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.sum().backward()
    with torch.inference_mode():
        ls.all_reduce_params([torch.ones(3)], coalesce)


def test_devices_of_data():
    Pair = namedtuple("Pair", "a b")
    cpu = torch.device("cpu")
    data = {"x": [torch.zeros(2), (torch.ones(1),)], "y": Pair(torch.zeros(3), torch.zeros(4))}
    assert ls.get_data_device(data) == cpu == ls.get_comm_device()
    moved = ls.cast_data_device(data, "meta")
    assert ls.get_data_device(moved) == torch.device("meta") and type(moved["y"]) is Pair
    assert ls.cast_data_device(data, cpu)["x"][0] is data["x"][0]
    out = {"x": [torch.ones(2), (torch.zeros(1),)], "y": Pair(torch.ones(3), torch.ones(4))}
    assert ls.cast_data_device(data, cpu, out) is out
    assert out["x"][0].eq(0).all() and out["x"][1][0].eq(1).all() and out["y"].b.eq(0).all()
    for bad, text in [([], "no tensor"), ([torch.zeros(1), torch.zeros(1, device="meta")], "are on cpu, meta"),
                      ("text", "data holds str"), ([1], "data holds int")]:  # fmt: skip
        with pytest.raises(ls.UsageError, match=text):
            ls.get_data_device(bad)
    for bad in [], {"x": out["x"]}, {"x": out["x"], "z": out["y"]}:
        with pytest.raises(ls.UsageError, match="out"):
            ls.cast_data_device(data, cpu, bad)


@pytest.mark.parametrize(
    "write",
    [
        lambda y: ls.all_reduce(y),
        lambda y: ls.all_reduce_dict({"y": y}),
        lambda y: ls.all_reduce_params([y]),
        lambda y: ls.cast_data_device(torch.zeros(3), "cpu", y),
    ],
)
def test_what_writes_into_a_tensor_is_seen_by_backward(write):
    y = torch.full((3,), 4.0, requires_grad=True).sqrt()  # saves its result
    before = y._version
    write(y.detach())
    assert y._version > before
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
    with torch.inference_mode():
        write(torch.ones(3))


@pytest.mark.parametrize(
    "read",
    [
        lambda y: ls.all_gather(y),
        lambda y: ls.gather(y),
        lambda y: ls.broadcast(y, src=0),
        lambda y: [] if ls.all_gather_object(y) else [],
    ],
)
def test_what_reads_a_tensor_leaves_its_version(read):
    y = torch.full((3,), 4.0, requires_grad=True).sqrt()
    read(y.detach())
    y.sum().backward()


def test_a_subclass_that_exports_other_elements_is_asked_for_them():
    class Indirect(torch.Tensor):
        def __dlpack__(self, **options):
            asked.append(options)
            return self.elements.__dlpack__(**options)

    asked = []
    x = torch.zeros(3).as_subclass(Indirect)
    x.elements = torch.full((3,), 4.0)
    assert ls.all_gather(x)[0].tolist() == [4, 4, 4] and asked


def test_a_tensor_of_another_library_with_names_of_torch():
    class Other:
        shape = (2,)

        def __init__(self):
            self.elements = torch.full((2,), 3.0)

        def __dlpack__(self, **options):
            return self.elements.__dlpack__(**options)

        def __dlpack_device__(self):
            return self.elements.__dlpack_device__()

        def is_neg(self):
            return False

    class Broken(Other):
        def is_neg(self):
            raise AttributeError("of something else")

    ls.all_reduce(Other())
    assert ls.all_gather(Other())[0].tolist() == [3, 3]
    with pytest.raises(AttributeError, match="of something else"):
        ls.all_reduce(Broken())


def test_what_a_signal_raises_in_a_call_is_raised():
    class Alarm(BaseException):
        pass

    def ring(*_):
        raise Alarm

    with torch.inference_mode():
        x = torch.ones(1)
    before = signal.signal(signal.SIGALRM, ring)
    try:
        for _ in range(30):
            with pytest.raises(Alarm):
                signal.setitimer(signal.ITIMER_REAL, 0.002)
                for _ in range(10**7):
                    ls.all_reduce(x)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_a_tensor_is_not_kept_after_the_call():
    def resident():
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

    before = resident()
    for _ in range(50):  # 1.6 GB, if they were
        x, y = torch.ones(1 << 22), torch.ones(1 << 22)
        ls.all_reduce(x)
        with pytest.raises(ls.UsageError, match="nothing"):
            ls.all_reduce(y, op="nothing")
    assert resident() - before < 400 << 20


@on_ranks(2)
def test_a_tensor_with_the_negative_bit(rank):
    for make in [lambda: torch._neg_view(torch.full((3,), 2.0)), lambda: torch.tensor([1 + 2j]).conj().imag,
                 lambda: torch.tensor(1 + 2j).conj().imag]:  # fmt: skip
        x = make()
        assert x.is_neg() and (x == -2).all()
        for parts in ls.all_gather(x), ls.gather(x, 1):
            assert len(parts) == (2 if parts or rank == 1 else 0)
            assert all((part == -2).all() and part.shape == x.shape for part in parts), parts
        both = [make(), x.clone()]
        ls.all_reduce_params(both)
        assert all((y == -4).all() for y in both), both
        one = make()
        ls.all_reduce_params([one])
        ls.all_reduce_params([y := make()], coalesce=False)
        assert (one == -4).all() and (y == -4).all()
        for write in [ls.all_reduce, lambda y: ls.all_reduce_dict({"y": y})]:
            y = make()
            with raises(ls.UsageError, "negative bit", "resolve_neg"):
                write(y)
            assert (y == -2).all()
    z = ls.all_gather_object(torch.tensor([1 + 2j]).conj())
    assert z[0].tolist() == [1 - 2j] == z[1].tolist()
    for verb in ls.all_reduce, ls.broadcast, ls.all_gather, ls.gather:  # complex: refused whatever the bits
        with raises(ls.UsageError, "complex64"):
            verb(torch.tensor([1 + 2j]).conj())


def test_devices_of_data_raise_what_mmengine_raises():
    with pytest.raises(ValueError):
        ls.get_data_device([torch.zeros(1), torch.zeros(1, device="meta")])
    for bad in [], "text", [1]:
        with pytest.raises(TypeError if bad else ValueError):
            ls.get_data_device(bad)
    for bad, out, error in [(1, None, TypeError), (torch.zeros(1), [torch.zeros(1)], TypeError),
                            ([torch.zeros(1)], [], ValueError), ({"a": torch.zeros(1)}, {"b": torch.zeros(1)}, ValueError)]:  # fmt: skip
        with pytest.raises(error) as caught:
            ls.cast_data_device(bad, "cpu", out)
        assert isinstance(caught.value, ls.UsageError)
