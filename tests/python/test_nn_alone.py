"""lockstep.nn in a process of its own: the world is one rank."""

import contextlib
import copy
import io
import pickle
import threading

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

import lockstep  # noqa: E402
import lockstep.nn  # noqa: E402
from lockstep.nn import SyncBatchNorm, convert_sync_batchnorm, revert_sync_batchnorm  # noqa: E402


def trained(layer, *shape):
    layer(torch.randn(*shape))
    return layer


def test_state_dict_is_that_of_torch():
    mine = trained(SyncBatchNorm(4), 3, 4, 5, 5)
    for other in nn.SyncBatchNorm(4), nn.BatchNorm2d(4), nn.BatchNorm1d(4):
        other.load_state_dict(mine.state_dict())
        again = SyncBatchNorm(4)
        again.load_state_dict(other.state_dict())
        for name, value in mine.state_dict().items():
            assert torch.equal(again.state_dict()[name], value)
    assert isinstance(mine, nn.SyncBatchNorm) and repr(mine) == repr(nn.SyncBatchNorm(4))
    assert SyncBatchNorm(4, 0.1, 0.2, False, False, None, "cpu", torch.float64).running_mean is None


def test_same_results_as_batch_norm():
    for layout, shape in [(torch.contiguous_format, (3, 4, 5, 6)), (torch.channels_last, (3, 4, 5, 6))]:
        plain = nn.BatchNorm2d(4).double()
        mine = convert_sync_batchnorm(copy.deepcopy(plain))
        x = torch.randn(shape, dtype=torch.float64).contiguous(memory_format=layout)
        for mode in True, False:
            plain.train(mode), mine.train(mode)
            a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
            plain(a).pow(3).sum().backward(), mine(b).pow(3).sum().backward()
            torch.testing.assert_close(b.grad, a.grad, rtol=1e-9, atol=1e-9)
            torch.testing.assert_close(mine.state_dict(), plain.state_dict(), rtol=1e-12, atol=1e-12)
    without_bias = SyncBatchNorm(4, bias=False) if "bias" in SyncBatchNorm.__init__.__kwdefaults__ else SyncBatchNorm(4)
    trained(without_bias, 3, 4).weight.sum().backward()


def test_one_of_two_statistics_modules_is_left_alone():
    layer = SyncBatchNorm(4)
    layer.track_running_stats = False  # after the buffers were made: torch then leaves them as they are
    before = copy.deepcopy(layer.state_dict())
    trained(layer, 3, 4)
    torch.testing.assert_close(layer.state_dict(), before)


calls = []


def count(*_):
    calls.append(1)


def test_converting_and_reverting_keeps_everything():
    shared = nn.BatchNorm1d(3)
    model = nn.Sequential(
        nn.Linear(3, 3), nn.BatchNorm1d(3, eps=0.1, momentum=None), shared, nn.ModuleDict({"x": nn.Sequential(shared)}),
        nn.SyncBatchNorm(3),
    )  # fmt: skip
    model[1].eval()
    model[1].weight.requires_grad_(False)
    model[1].note = "kept"
    model[1].register_forward_hook(count)
    parameters, buffers = list(model.parameters()), list(model.buffers())
    assert convert_sync_batchnorm(model) is model
    first = model[1]
    assert type(first) is SyncBatchNorm and (first.eps, first.momentum, first.note) == (0.1, None, "kept")
    assert not first.training and model[2].training and type(model[4]) is SyncBatchNorm
    assert model[2] is model[3]["x"][0]
    same = lambda: all(a is b for a, b in zip([*parameters, *buffers], [*model.parameters(), *model.buffers()], strict=True))  # noqa: E731
    assert same() and not first.weight.requires_grad
    n_before = len(calls)
    first(torch.randn(2, 3))
    assert len(calls) == n_before + 1
    assert convert_sync_batchnorm(model)[1] is not first  # over another group perhaps

    copied = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    assert type(copied[1]) is SyncBatchNorm
    assert revert_sync_batchnorm(model) is model
    assert [type(m) for m in model] == [nn.Linear, nn.BatchNorm1d, nn.BatchNorm1d, nn.ModuleDict, lockstep.nn.BatchNorm]
    assert same() and model[2] is model[3]["x"][0] and not hasattr(model[2], "process_group")
    assert type(convert_sync_batchnorm(shared)) is SyncBatchNorm and type(shared) is nn.BatchNorm1d


def test_hooks_are_removed_by_their_handles():
    kinds = ["forward_hook", "forward_pre_hook", "full_backward_hook", "full_backward_pre_hook", "state_dict_post_hook"]
    for convert in convert_sync_batchnorm, lambda model: revert_sync_batchnorm(convert_sync_batchnorm(model)), copy.copy:
        for kind in kinds:
            layer = nn.BatchNorm1d(3)
            handle = getattr(layer, f"register_{kind}")(count)
            layer = convert(layer)
            handle.remove()
            calls.clear()
            layer.eval()(torch.randn(2, 3, requires_grad=True)).sum().backward()
            layer.state_dict()
            assert not calls, (convert, kind)


def test_a_scope_that_cannot_begin_has_not_begun(monkeypatch):
    def refuse(_):
        raise RuntimeError("no stance")

    layer = nn.BatchNorm1d(3)
    x = torch.randn(4, 3, requires_grad=True)
    node = lambda: layer(x).grad_fn.name()  # noqa: E731
    plain = node()
    monkeypatch.setattr(torch.compiler, "set_stance", refuse)
    with pytest.raises(RuntimeError, match="no stance"), lockstep.nn.SyncBatchNormScope():
        raise AssertionError
    assert node() == plain
    monkeypatch.undo()
    with lockstep.nn.SyncBatchNormScope():
        assert node() != plain
    assert node() == plain


class WithActivation(nn.BatchNorm2d):
    def forward(self, x):
        return super().forward(x).relu()


class Renamed(nn.BatchNorm2d):
    pass


def test_what_cannot_be_converted_is_named_and_nothing_is_changed():
    parametrised = nn.utils.parametrizations.weight_norm(nn.Linear(3, 3))
    lazy = nn.LazyBatchNorm2d()
    model = nn.ModuleDict({"a": nn.BatchNorm2d(3), "b": WithActivation(3), "c": lazy, "d": Renamed(3), "e": parametrised})
    with pytest.raises(lockstep.UsageError) as caught:
        convert_sync_batchnorm(model)
    for text in "'b' (WithActivation): it has a forward of its own", "'c' (LazyBatchNorm2d): it is lazy", "SyncBatchNormScope":
        assert text in str(caught.value)
    assert type(model["a"]) is nn.BatchNorm2d
    del model["b"], model["c"]
    assert type(convert_sync_batchnorm(model)["d"]) is SyncBatchNorm
    assert type(revert_sync_batchnorm(model)["d"]) is Renamed


def test_what_a_copy_would_keep_of_the_old_layer_is_named():
    replaced = nn.BatchNorm1d(3)
    replaced.forward = replaced.forward
    compiled = nn.BatchNorm1d(3)
    compiled.compile(backend="eager")
    for layer, text in [(replaced, "'0' .*its forward is replaced on the instance"), (compiled, "'0' .*compile method")]:
        model = nn.Sequential(layer)
        with pytest.raises(lockstep.UsageError, match=text):
            convert_sync_batchnorm(model)
        assert model[0] is layer


def test_refusals():
    layer = SyncBatchNorm(4)
    for bad, text in [
        (torch.randn(3, 5), "expected 4 channels"),
        (torch.zeros(3, 4, dtype=torch.int64), "float64, float32, bfloat16 or float16"),
        (torch.randn(3, 4, dtype=torch.float64), "as the input"),
        (torch.randn(1, 4), "Expected more than 1 value per channel"),
        (torch.randn(4), "2 or more dimensions, got 1D"),
        (torch.randn(3, 4, device="meta"), "CPU or CUDA"),
    ]:
        with pytest.raises(lockstep.UsageError, match=text) as caught:
            layer(bad)
        assert "SyncBatchNorm(4)" in str(caught.value) and "test_nn_alone.py" in str(caught.value)
    assert layer.num_batches_tracked == 0
    x = torch.randn(3, 4, requires_grad=True)
    first = torch.autograd.grad(layer(x).pow(3).sum(), x, create_graph=True)[0]
    with pytest.raises(RuntimeError, match=r"second backward of SyncBatchNorm\(4\).*third gradients are not supported"):
        torch.autograd.grad(first.pow(2).sum(), x, create_graph=True)


def test_a_compiled_model():
    model = convert_sync_batchnorm(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU()))
    expected = copy.deepcopy(model)
    x = torch.randn(5, 3)
    compiled = torch.compile(model, backend="aot_eager")
    compiled(x).sum().backward()
    expected(x).sum().backward()
    for a, b in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)
    torch.testing.assert_close(model.state_dict(), expected.state_dict())
    with pytest.raises(Exception, match="_train"):  # it breaks the graph, and whoever forbids that is told
        torch.compile(copy.deepcopy(expected), backend="eager", fullgraph=True)(x)
    torch._dynamo.reset()
    in_eval = torch.compile(expected.eval(), backend="eager", fullgraph=True)
    torch.testing.assert_close(in_eval(x), expected(x))


def test_a_scripted_model(tmp_path):
    model = convert_sync_batchnorm(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)))
    expected = copy.deepcopy(model)
    scripted = torch.jit.script(model)
    x = torch.randn(5, 3)
    scripted(x).sum().backward()
    expected(x).sum().backward()
    torch.testing.assert_close(model[1].bias.grad, expected[1].bias.grad)
    torch.testing.assert_close(scripted.state_dict(), expected.state_dict())
    torch.testing.assert_close(scripted.eval()(x), expected.eval()(x))
    with pytest.raises(Exception, match="_train"):  # a file has no Python: revert_sync_batchnorm first
        scripted.save(str(tmp_path / "model.pt"))
    torch.jit.script(revert_sync_batchnorm(model)).save(str(tmp_path / "model.pt"))
    made = SyncBatchNorm(3)
    torch.testing.assert_close(torch.jit.script(made)(x), copy.deepcopy(made)(x))


def test_a_scope_leaves_the_model_and_other_batch_norms_alone():
    layer = nn.BatchNorm2d(4)
    x = torch.randn(3, 4, 5, 5)
    expected = copy.deepcopy(layer)(x)
    with lockstep.nn.SyncBatchNormScope() as scope, scope:  # nested
        torch.testing.assert_close(layer(x), expected)
        with pytest.raises(RuntimeError, match="batch_norm #2 of a SyncBatchNormScope.* expected weight to be"):
            layer(x.double())
        torch.testing.assert_close(layer.eval()(x), copy.deepcopy(layer)(x))
    with pytest.raises(RuntimeError, match="type"):
        layer.train()(x.double())


def in_a_scope():
    with lockstep.nn.SyncBatchNormScope():
        yield 1
        yield 2


def assert_no_scope():
    """Errors of a batch_norm in one name it."""
    with pytest.raises(RuntimeError) as caught:
        nn.BatchNorm2d(4)(torch.randn(3, 4, 5, 5).double())
    assert "SyncBatchNormScope" not in str(caught.value)
    assert torch._dynamo.eval_frame._stance.stance == "default"


def test_scopes_that_end_in_another_order():
    for _ in zip(in_a_scope(), in_a_scope(), strict=False):
        pass
    assert_no_scope()
    first, second = in_a_scope(), in_a_scope()
    next(first), next(second)
    first.close()
    with pytest.raises(lockstep.UsageError, match="SyncBatchNormScope"):  # the second holds
        nn.BatchNorm2d(4)(torch.randn(3, 4, 5, 5).double())
    second.close()
    assert_no_scope()


def test_a_scope_that_is_left_on_another_thread():
    generator, caught = in_a_scope(), []
    next(generator)

    def close():
        try:
            generator.close()
        except lockstep.UsageError as error:
            caught.append(str(error))

    thread = threading.Thread(target=close)
    thread.start()
    thread.join()
    assert len(caught) == 1 and "another thread" in caught[0]
    assert_no_scope()


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_forward_that_backward_repeats_needs_the_scope(use_reentrant):
    def loss(layer):
        x = torch.randn(5, 4, requires_grad=True)
        return checkpoint(layer, x, use_reentrant=use_reentrant).pow(2).sum()

    layer = nn.BatchNorm1d(4)
    with lockstep.nn.SyncBatchNormScope():
        loss(layer).backward()
        late = loss(layer)
    before = layer.running_mean.clone()
    with pytest.raises(lockstep.UsageError, match="call backward inside the scope"):
        late.backward()
    assert torch.equal(layer.running_mean, before)
    loss(nn.BatchNorm1d(4)).backward()  # never in a scope
    loss(layer).backward()  # no longer in one


def test_ddp_takes_ours_and_refuses_those_of_torch():
    dist = torch.distributed
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
        ddp = nn.parallel.DistributedDataParallel(convert_sync_batchnorm(copy.deepcopy(model)))
        ddp(torch.randn(5, 3)).sum().backward()
        with pytest.raises(ValueError, match="SyncBatchNorm layers only work with GPU modules"):
            nn.parallel.DistributedDataParallel(nn.SyncBatchNorm.convert_sync_batchnorm(model))
    finally:
        dist.destroy_process_group()


def test_a_symbolic_trace_has_the_layer_as_a_leaf():
    model = convert_sync_batchnorm(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU()))
    traced = torch.fx.symbolic_trace(model)
    assert [node.target for node in traced.graph.nodes if node.op == "call_module"] == ["0", "1", "2"]
    x = torch.randn(5, 3)
    copied = copy.deepcopy(model)
    torch.testing.assert_close(traced(x), copied(x))
    traced(x).sum().backward()
    inner = torch.fx.symbolic_trace(nn.Sequential(nn.Sequential(SyncBatchNorm(4))))
    assert [node.target for node in inner.graph.nodes if node.op == "call_module"] == ["0.0"]


@pytest.mark.parametrize("kind", ["meta", "fake"])
def test_tensors_without_values_get_their_shapes(kind):
    model = convert_sync_batchnorm(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)))
    for scope in contextlib.nullcontext(), lockstep.nn.SyncBatchNormScope():
        for n, size in (2, 8), (1, 3):  # one value for each channel, as one of several ranks may have
            with scope if n == 2 else contextlib.nullcontext():
                if kind == "meta":
                    out = copy.deepcopy(model).to("meta")(torch.empty(n, 3, size, size, device="meta"))
                else:
                    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
                        out = model(torch.empty(n, 3, size, size))
            assert out.shape == (n, 4, size - 2, size - 2)
    assert model[1].num_batches_tracked == 0


def test_a_recorded_graph_is_refused_in_training():
    model = convert_sync_batchnorm(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)))
    x = torch.randn(5, 3)
    with pytest.raises(lockstep.UsageError, match="SyncBatchNorm '1': torch.export and make_fx cannot trace a layer in training"):
        torch.export.export(model, (x,))
    with pytest.raises(lockstep.UsageError, match="would not exchange statistics"):
        torch.fx.experimental.proxy_tensor.make_fx(model)(x)
    model(x)  # which is not recorded
    model.eval()
    torch.testing.assert_close(torch.export.export(model, (x,)).module()(x), model(x))


def test_copies_of_a_layer_with_a_group():
    group = lockstep.default_group().duplicate()
    model = convert_sync_batchnorm(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)), group)
    for copied in copy.deepcopy(model), torch.optim.swa_utils.AveragedModel(model).module, copy.copy(model[1]):
        layer = copied if isinstance(copied, SyncBatchNorm) else copied[1]
        assert layer.process_group == group and type(layer) is SyncBatchNorm
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for loaded in pickle.loads(pickle.dumps(model)), torch.load(file, weights_only=False):
        assert type(loaded[1]) is SyncBatchNorm and loaded[1].process_group is None
        torch.testing.assert_close(loaded.state_dict(), model.state_dict())
    assert model[1].process_group == group
    assert copy.deepcopy(group) == group and copy.copy(group) == group
    with pytest.raises(TypeError, match="cannot pickle.*Group"):
        pickle.dumps(group)
