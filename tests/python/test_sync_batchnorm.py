"""lockstep.sync_batchnorm: the layers of Synchronized-BatchNorm-PyTorch over ranks, and its names."""

import copy
import subprocess
import sys

import pytest
from ranks import close, join, on_worlds, raises

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import lockstep as ls  # noqa: E402
import lockstep.nn  # noqa: E402
from lockstep import sync_batchnorm as sbn  # noqa: E402

KINDS = [
    (nn.BatchNorm1d, sbn.SynchronizedBatchNorm1d, (4,)),
    (nn.BatchNorm1d, sbn.SynchronizedBatchNorm1d, (4, 9)),
    (nn.BatchNorm2d, sbn.SynchronizedBatchNorm2d, (4, 5, 3)),
    (nn.BatchNorm3d, sbn.SynchronizedBatchNorm3d, (4, 2, 3, 4)),
]


@pytest.mark.parametrize("mode", ["clamp", "plus"])
@pytest.mark.parametrize("plain_type, sync_type, shape", KINDS)
def test_alone_it_is_batch_norm(plain_type, sync_type, shape, mode):
    sbn.set_sbn_eps_mode(mode)
    try:
        plain, layer = plain_type(4).double(), sync_type(4).double()
        for is_training in True, False:
            plain.train(is_training), layer.train(is_training)
            a = torch.randn(6, *shape, dtype=torch.float64).requires_grad_()
            b = a.detach().clone().requires_grad_()
            plain(a).pow(3).sum().backward(), layer(b).pow(3).sum().backward()
            torch.testing.assert_close(b.grad, a.grad, rtol=1e-9, atol=1e-9)
            torch.testing.assert_close(layer.state_dict(), plain.state_dict(), rtol=1e-12, atol=1e-12)
    finally:
        sbn.set_sbn_eps_mode("clamp")


@on_worlds(3)
def test_plus_over_ranks_is_batch_norm_over_all(world):
    ranks = join(world)
    sbn.set_sbn_eps_mode("plus")
    try:
        for plain_type, sync_type, shape in KINDS:
            for counts in [4, 4, 4], [5, 0, 2]:
                plain = plain_type(4).double()
                for layer in sync_type(4).double(), sbn.convert_model(copy.deepcopy(plain)):
                    assert type(layer) is sync_type
                    ranks.compare(copy.deepcopy(plain), layer, counts, *shape)
    finally:
        sbn.set_sbn_eps_mode("clamp")


class Clamping(nn.BatchNorm2d):
    """What the layers are over several ranks by default, with the whole batch."""

    def forward(self, x):
        if not self.training:
            return super().forward(x)
        mean, var = x.mean((0, 2, 3)), x.var((0, 2, 3), unbiased=False)
        with torch.no_grad():
            super().forward(x)  # running statistics
        scale = self.weight * var.clamp(min=self.eps).rsqrt()
        return (x - mean[:, None, None]) * scale[:, None, None] + self.bias[:, None, None]


@on_worlds(2)
def test_clamp_over_ranks(world):
    ranks = join(world)
    for eps in 1e-5, 1e9:  # above the variances, which then have no gradient
        ranks.compare(Clamping(4, eps=eps).double(), sbn.SynchronizedBatchNorm2d(4, eps=eps).double(), [3, 2], 4, 5, 3)
    x = torch.full((3, 4, 2, 2), 7.0)  # no variance at all
    layer = sbn.SynchronizedBatchNorm2d(4, eps=0.25)
    close(layer(x + ranks.rank), (x * 0 + ranks.rank - 0.5) / 0.5, 1e-6, "variance and eps are equal")
    layer.eval()
    close(layer(x), (x - layer.running_mean[:, None, None]) / (layer.running_var + 0.25).sqrt()[:, None, None], 1e-6, "eval")


def test_modes():
    with raises(AssertionError, "mode is 'add'; it must be 'clamp' or 'plus'"):
        sbn.set_sbn_eps_mode("add")


def model():
    shared = nn.BatchNorm2d(3)
    inner = nn.Sequential(shared, nn.BatchNorm3d(2))
    return nn.Sequential(nn.Conv2d(3, 3, 1), shared, inner, nn.BatchNorm1d(2).eval(), nn.SyncBatchNorm(2))


def test_convert_model():
    net = model()
    before, parameters, types = net.state_dict(), dict(net.named_parameters()), [type(each) for each in net.modules()]
    assert sbn.convert_model(net) is net
    assert type(net[1]) is sbn.SynchronizedBatchNorm2d and net[2][0] is net[1]
    assert type(net[2][1]) is sbn.SynchronizedBatchNorm3d and type(net[3]) is sbn.SynchronizedBatchNorm1d
    assert type(net[4]) is ls.nn.SyncBatchNorm and not net[3].training
    assert all(parameter is parameters[name] for name, parameter in net.named_parameters())
    torch.testing.assert_close(net.state_dict(), before)
    assert sbn.convert_model(net) is net and type(net[1]) is sbn.SynchronizedBatchNorm2d  # again
    ls.nn.revert_sync_batchnorm(net)
    assert [type(each) for each in net.modules()] == [*types[:-1], ls.nn.BatchNorm]
    assert type(ls.nn.revert_sync_batchnorm(sbn.SynchronizedBatchNorm3d(2))) is nn.BatchNorm3d
    assert type(sbn.convert_model(nn.BatchNorm1d(2))) is sbn.SynchronizedBatchNorm1d
    parallel = sbn.convert_model(nn.DataParallel(model()))
    assert type(parallel) is sbn.DataParallelWithCallback and type(parallel.module[1]) is sbn.SynchronizedBatchNorm2d

    class Own(nn.BatchNorm2d):
        def forward(self, input):
            return input

    with raises(ls.UsageError, "convert_model: these layers cannot be replaced: '0' (Own): it has a forward of its own"):
        sbn.convert_model(nn.Sequential(Own(2)))


def test_patch_sync_batchnorm():
    plain = nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d
    with sbn.patch_sync_batchnorm():
        assert [type(getattr(nn, f"BatchNorm{n}d")(2)).__name__ for n in (1, 2, 3)] == [
            f"SynchronizedBatchNorm{n}d" for n in (1, 2, 3)
        ]
    with raises(ZeroDivisionError), sbn.patch_sync_batchnorm():
        1 / 0  # noqa: B018
    assert (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d) == plain


def test_dimensions_are_checked():
    for n, good in (1, (2, 3)), (2, (4,)), (3, (5,)):
        layer = getattr(sbn, f"SynchronizedBatchNorm{n}d")(2)
        for n_dims in range(2, 6):
            x = torch.randn(2, 2, *[2] * (n_dims - 2))
            for is_training in True, False:
                layer.train(is_training)
                if n_dims in good:
                    layer(x)
                    continue
                with raises(ValueError, f"(got {n_dims}D input)"):
                    layer(x)
    with raises(ls.UsageError, "SynchronizedBatchNorm2d: expected 4D input (got 2D input)"):
        sbn.SynchronizedBatchNorm2d(2)(torch.ones(3, 2))


def test_layers_can_be_compiled_and_copied():
    layer = sbn.SynchronizedBatchNorm2d(2)
    x = torch.randn(3, 2, 4, 4)
    for make in torch.jit.script, copy.deepcopy, lambda each: torch.compile(each, backend="eager"), copy.copy:
        other = make(copy.deepcopy(layer))
        torch.testing.assert_close(other(x), nn.BatchNorm2d(2)(x))
        torch.testing.assert_close(other.running_mean, 0.1 * x.mean((0, 2, 3)))
    assert repr(layer).startswith("SynchronizedBatchNorm2d(2, eps=1e-05")


class Told(nn.Module):
    def __init__(self):
        super().__init__()
        self.calls = []

    def __data_parallel_replicate__(self, ctx, copy_id):
        assert isinstance(ctx, sbn.CallbackContext)
        if copy_id == 0:
            ctx.first = self
        self.calls = [(ctx.first, copy_id)]

    def forward(self, x):
        return x


class Copying(nn.DataParallel):
    """Replicates without GPUs."""

    def replicate(self, module, device_ids):
        return [copy.deepcopy(module) for _ in device_ids]


def test_replication_callbacks():
    copies = [nn.Sequential(Told(), nn.Linear(1, 1), Told()) for _ in range(3)]
    sbn.execute_replication_callbacks(copies)
    for i in 0, 2:
        assert [each[i].calls for each in copies] == [[(copies[0][i], copy_id)] for copy_id in range(3)]
    parallel = Copying(Told())
    sbn.patch_replication_callback(parallel)
    assert [each.calls[0][1] for each in parallel.replicate(parallel.module, [0, 1])] == [0, 1]
    with raises(AssertionError, "data_parallel is Linear; it must be a torch.nn.DataParallel"):
        sbn.patch_replication_callback(nn.Linear(1, 1))
    parallel = Copying(sbn.SynchronizedBatchNorm1d(2))
    sbn.patch_replication_callback(parallel)
    parallel.replicate(parallel.module, [0])
    with raises(ls.UsageError, "SynchronizedBatchNorm1d is synchronised over processes", "start a process for each device"):
        parallel.replicate(parallel.module, [0, 1])


def test_without_gpus_data_parallel_calls_its_module():
    if torch.accelerator.is_available():
        pytest.skip("there is one")
    layer = sbn.DataParallelWithCallback(sbn.SynchronizedBatchNorm1d(2), device_ids=[0, 1])
    x = torch.randn(5, 2)
    torch.testing.assert_close(layer(x), nn.BatchNorm1d(2)(x))


def test_programs_import_it_by_its_name():
    program = """if True:
    import sys, lockstep.sync_batchnorm
    sys.modules["sync_batchnorm"] = lockstep.sync_batchnorm
    from sync_batchnorm import SynchronizedBatchNorm1d, SynchronizedBatchNorm2d, SynchronizedBatchNorm3d
    from sync_batchnorm import DataParallelWithCallback, convert_model, patch_replication_callback, patch_sync_batchnorm
    from sync_batchnorm import set_sbn_eps_mode
    assert SynchronizedBatchNorm2d(2)._check_input_dim is not None
    """
    subprocess.run([sys.executable, "-c", program], check=True, timeout=240)
