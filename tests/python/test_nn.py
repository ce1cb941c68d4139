"""lockstep.nn over several ranks: each compares itself with one rank that has the whole batch."""

import copy

import pytest
from ranks import WORLDS, here, join, on_worlds, own_group, raises, survives

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402

import lockstep as ls  # noqa: E402
import lockstep.nn  # noqa: E402
from lockstep.nn import SyncBatchNorm, SyncBatchNormScope, convert_sync_batchnorm  # noqa: E402


def converted(plain):
    return convert_sync_batchnorm(copy.deepcopy(plain))


@on_worlds(3)
def test_results_are_those_of_one_rank(world):
    ranks = join(world)
    compare = ranks.compare
    equal, uneven, few = [4, 4, 4], [5, 0, 2], [1, 0, 1]
    for kind, shape in [(nn.BatchNorm1d, ()), (nn.BatchNorm1d, (9,)), (nn.BatchNorm2d, (5, 3)),
                        (nn.BatchNorm2d, (17, 16)), (nn.BatchNorm3d, (2, 3, 4))]:  # fmt: skip
        for counts in equal, uneven, few:
            plain = kind(4).double()
            compare(plain, converted(plain), counts, 4, *shape)
    for options in [{"momentum": None}, {"affine": False}, {"track_running_stats": False}, {"eps": 0.5, "momentum": 0.7}]:
        plain = nn.BatchNorm2d(4, **options, dtype=torch.float64)
        compare(plain, converted(plain), uneven, 4, 5, 3)
    for counts in equal, uneven:
        plain = nn.BatchNorm2d(4).double()
        compare(plain, converted(plain), counts, 4, 5, 3, layout=torch.channels_last)
        plain = nn.BatchNorm2d(4)
        compare(plain, converted(plain), counts, 4, 5, 3, tolerance=1e-5, dtype=torch.float32)
        for dtype in torch.bfloat16, torch.float16:
            plain = nn.BatchNorm2d(4)
            compare(plain, converted(plain), counts, 4, 5, 3, tolerance=3e-2, dtype=dtype)

    layer = converted(nn.BatchNorm2d(4).double())
    assert isinstance(layer, torch.nn.SyncBatchNorm)
    with torch.no_grad():  # collective all the same
        layer(torch.full((1, 4, 1, 1), float(ranks.rank), dtype=torch.float64))
    assert torch.allclose(layer.running_mean, torch.full((4,), 0.1, dtype=torch.float64))
    layer.eval()
    if ranks.rank == 0:
        layer(torch.zeros(1, 4, 1, 1, dtype=torch.float64))  # not collective


class Functional(nn.BatchNorm2d):
    def forward(self, x):
        return nn.functional.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, True)


@on_worlds(2)
def test_scope(world):
    ranks = join(world)

    def compare_in_scope(plain, layer, run=None):
        def call(x):
            with SyncBatchNormScope():
                return (layer if run is None else run)(x)

        ranks.compare(plain, layer, [3, 2], 4, 5, 3, run=call)

    for kind in nn.BatchNorm2d, Functional:
        plain = kind(4).double()
        if kind is Functional:
            plain.num_batches_tracked = None
        compare_in_scope(plain, copy.deepcopy(plain))
    plain = nn.BatchNorm2d(4).double()
    layer = copy.deepcopy(plain)
    compare_in_scope(plain, layer, torch.jit.script(layer))
    plain = nn.BatchNorm2d(4).double()
    layer = copy.deepcopy(plain)
    compiled = torch.compile(layer, backend="eager")
    compiled(torch.randn(2, 4, 5, 3).double())  # so that there is something compiled
    layer.load_state_dict(plain.state_dict())
    compare_in_scope(plain, layer, compiled)
    layer(torch.randn(2, 4, 5, 3).double() * (ranks.rank + 1))  # outside: on its own
    total = layer.running_mean.clone()
    ranks.sum_over_ranks(total)
    assert not torch.allclose(total, 2 * layer.running_mean)


@on_worlds(4)
def test_groups(world):
    rank = join(world).rank
    own = own_group([0, 1], [2, 3])
    layer = SyncBatchNorm(3, process_group=own, momentum=1.0, dtype=torch.float64)
    layer(torch.full((2, 3), float(rank), dtype=torch.float64))
    assert torch.allclose(layer.running_mean, torch.full((3,), rank // 2 * 2 + 0.5, dtype=torch.float64)), layer.running_mean
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).double()
    model = SyncBatchNorm.convert_sync_batchnorm(model, own)
    assert model[1].process_group is own
    with SyncBatchNormScope(own):
        plain = nn.BatchNorm1d(3, momentum=1.0).double()
        plain(torch.full((2, 3), float(rank), dtype=torch.float64))
    assert torch.allclose(plain.running_mean, layer.running_mean)
    if dist.is_initialized():
        first = dist.new_group([0])
        if rank:
            with raises(ls.UsageError, "this rank is not in the process group"):
                SyncBatchNorm(3, process_group=first)(torch.ones(2, 3))


def on_two_lines(group):
    a = SyncBatchNorm(3, process_group=group)
    return a, SyncBatchNorm(3, process_group=group)


def on_one_line(group):
    return SyncBatchNorm(3, process_group=group), SyncBatchNorm(3, process_group=group)


def in_a_model(group):
    return convert_sync_batchnorm(nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm1d(3)), group)


def beside_a_scope(group):
    plain = nn.BatchNorm1d(3)

    def in_a_scope(x):
        with SyncBatchNormScope(group):
            return plain(x)

    return in_a_scope, SyncBatchNorm(3, process_group=group)


@on_worlds(2)
def test_layers_in_another_order_on_one_rank(world):
    """In forward, and in backward: gradients of two losses that one rank takes in another order."""
    rank = join(world).rank
    for make in on_two_lines, on_one_line, in_a_model, beside_a_scope:
        a, b = make(own_group([0, 1]))
        x, z = (torch.rand(2, 3, requires_grad=True) for _ in range(2))
        losses = [a(x).sum(), b(z).sum()]
        with raises(ls.MismatchError, "layer", "different layers" if world == "gloo" else "of the line that made it"):
            for loss in losses if rank == 0 else reversed(losses):
                loss.backward()
        a, b = make(own_group([0, 1]))
        n_named = 1 if make is beside_a_scope else 2
        with raises(ls.MismatchError, lambda error: str(error).count(", layer ") + str(error).count(": layer ") == n_named):  # noqa: B023
            for layer in (a, b) if rank == 0 else (b, a):
                layer(torch.rand(2, 3))


@on_worlds(2, ["lockstep"])
def test_calls_of_layers_and_of_the_program_keep_its_order(world):
    rank = join(world).rank
    layer = SyncBatchNorm(3, momentum=1.0)
    x = torch.full((1 << 20,), float(rank))
    works = [dist.all_reduce(x, async_op=True) for _ in range(3)]
    layer(torch.full((2, 3), float(rank)))
    assert torch.equal(layer.running_mean, torch.full((3,), 0.5))
    for work in works:
        work.wait()
    assert x.eq(4).all()


@on_worlds(2)
def test_eval_without_running_statistics_is_of_one_rank(world):
    ranks = join(world)
    layer = convert_sync_batchnorm(nn.BatchNorm1d(3, track_running_stats=False)).eval()
    x = torch.randn(4, 3) * (ranks.rank + 1)
    expected = nn.functional.batch_norm(x, None, None, layer.weight, layer.bias, True)
    plain = nn.BatchNorm1d(3, track_running_stats=False)
    with SyncBatchNormScope():
        synchronised = plain(x)
        plain.eval()
        if ranks.rank == 0:
            assert torch.allclose(layer(x), expected)
            assert torch.allclose(plain(x), expected)
            with raises(ValueError, "Expected more than 1 value per channel"):
                plain(x[:1])
        ranks.barrier()
        plain.train()
        assert torch.equal(plain(x), synchronised) and not torch.allclose(synchronised, expected)


@on_worlds(2)
def test_errors_name_the_layer_and_the_line(world):
    ranks = join(world)
    model = convert_sync_batchnorm(nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.BatchNorm1d(3))))
    with raises(ls.UsageError, "Expected more than 1 value per channel", "SyncBatchNorm '1.0'", here(1)):
        model(torch.randn(1 - ranks.rank, 3))
    if world == "gloo":  # which compares no calls
        return
    with raises(ls.MismatchError, here(2), here(4), "forward of SyncBatchNorm '1.0'" if ranks.rank == 0 else ""):
        if ranks.rank == 0:
            model(torch.randn(2, 3))
        else:
            ranks.barrier()


def in_forward(x):
    layer = SyncBatchNorm(3)
    return lambda: layer(x), here(0)


def in_backward(x):
    with SyncBatchNormScope():
        y = nn.BatchNorm1d(3)(x)
    return lambda: y.square().sum().backward(), here(-2)


def in_second_backward(x):
    dx = torch.autograd.grad(converted(nn.BatchNorm1d(3))(x).square().sum(), x, create_graph=True)[0]
    return lambda: dx.square().sum().backward(), here(-1)


PHASES = {"forward": in_forward, "backward": in_backward, "second backward": in_second_backward}


@pytest.mark.parametrize("phase", PHASES)
@on_worlds(2, code=1, returned=1)
def test_a_rank_fails_while_another_is_in_a_layer(world, phase):
    """The others get its exception, or over Gloo, which knows no other, the end of its connections."""
    ranks = join(world)
    x = (torch.tensor([[1.0, 2, 3], [4, 5, 7]]) * (ranks.rank + 1)).requires_grad_()
    act, of_forward = PHASES[phase](x)
    ranks.barrier()
    error, said = (ls.PeerLost, "by peer") if world == "gloo" else (ls.PeerFailed, "rank 1 failed: ValueError: bad batch")
    with survives(error, said, f"{phase} of ", of_forward):
        if ranks.rank == 1:
            raise ValueError("bad batch")
        act()


@on_worlds(2)
def test_a_scope_raises_the_errors_of_lockstep_in_forward(world):
    rank = join(world).rank
    with raises(ls.UsageError, lambda error: "expected weight to be" in error.text and error.rank == rank, here(1)):
        with SyncBatchNormScope():
            nn.functional.batch_norm(torch.ones(2, 3), None, None, torch.ones(4), training=True)


REFUSED = [
    lambda layer: layer(None),
    lambda layer: layer([1]),
    lambda layer: layer(torch.rand(3, 1)),
    lambda layer: SyncBatchNorm(2, momentum="x", process_group=layer.process_group)(torch.rand(3, 2)),
]


@on_worlds(2)
def test_by_all_ranks_refused(world):
    ranks = join(world)
    layer = SyncBatchNorm(2)
    for refuse in REFUSED:
        for _ in range(2):
            with raises(ls.UsageError):
                refuse(layer)
            layer(torch.rand(3, 2))
    x = torch.ones(1)
    ranks.sum_over_ranks(x)
    assert x.item() == 2


@on_worlds(2, [world for world in WORLDS if world != "gloo"])
def test_by_one_rank_refused(world):
    """Over another's backend the others wait for it: c10d has no way to tell them."""
    rank = join(world).rank
    for refuse in REFUSED:
        layer = SyncBatchNorm(2, process_group=own_group([0, 1]))
        layer(torch.rand(3, 2))
        if rank == 1:
            with raises(ls.UsageError):
                refuse(layer)
        with raises(ls.MismatchError, "refused SyncBatchNorm(2) #"):
            layer(torch.rand(3, 2))


@on_worlds(2)
def test_gradients_of_gradients(world):
    """Of what the ranks compute together, as a function of the whole batch, which each of them has."""
    ranks = join(world)

    class Replicate(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            return Sum.apply(gradient)

    class Sum(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            total = x.contiguous().clone()
            ranks.sum_over_ranks(total)
            return total

        @staticmethod
        def backward(ctx, gradient):
            return Replicate.apply(gradient)

    def whole(layer, own):
        def f(x, weight, bias):
            state = {"weight": Replicate.apply(weight), "bias": Replicate.apply(bias)}
            y = torch.func.functional_call(layer, state, Replicate.apply(x)[own])
            return Sum.apply(torch.zeros_like(x).index_put((torch.tensor(own),), y))

        return f

    torch.manual_seed(0)
    for plain, shape in (nn.BatchNorm1d(2), ()), (nn.BatchNorm2d(2, affine=True), (2, 2)):
        x = torch.randn(5, 2, *shape, dtype=torch.float64, requires_grad=True)
        weight = torch.randn(2, dtype=torch.float64, requires_grad=True)
        bias = torch.randn(2, dtype=torch.float64, requires_grad=True)
        f = whole(converted(plain.double()), [0, 1, 2] if ranks.rank == 0 else [3, 4])
        assert torch.autograd.gradcheck(f, (x, weight, bias))
        assert torch.autograd.gradgradcheck(f, (x, weight, bias))
