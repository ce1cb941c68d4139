"""What torch builds on torch.distributed, over the backend lockstep."""

import os

import pytest
from ranks import compare_training, on_torch_ranks, sgd

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402


def make_model():
    return torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Tanh(), torch.nn.Linear(5, 2)).double()


def read_ddp(model):
    return model.module.state_dict()


def trains(wrap, optimizer=None, tolerance=1e-9, read=read_ddp):
    """Two ranks with half of the data each come to the weights of one with all of it."""
    torch.manual_seed(0)
    first, batch = make_model(), torch.randn(8, 6, dtype=torch.float64)
    compare_training(first, wrap, 3 * [batch], optimizer, tolerance=tolerance, read=read)


@on_torch_ranks(2)
def test_distributed_data_parallel(rank):
    # Its first broadcast makes the ranks alike.
    trains(lambda model: DistributedDataParallel(make_model() if rank else model))


@on_torch_ranks(2)
def test_ddp_names_the_backend_in_its_logging_data():
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
    assert model._get_ddp_logging_data()["backend_name"] == "lockstep"


@pytest.mark.parametrize("hook, tolerance", [("allreduce_hook", 1e-9), ("fp16_compress_hook", 1e-3)])
@on_torch_ranks(2)
def test_communication_hooks(hook, tolerance):
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    def wrap(model):
        ddp = DistributedDataParallel(model)
        ddp.register_comm_hook(None, getattr(default_hooks, hook))
        return ddp

    trains(wrap, tolerance=tolerance)


@on_torch_ranks(2)
def test_power_sgd(size):
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power

    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(20, 20))
    state = power.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
    model.register_comm_hook(state, power.powerSGD_hook)
    for _ in range(4):
        model.zero_grad()
        model(torch.randn(4, 20)).square().mean().backward()
        parts = [torch.empty_like(model.module.weight) for _ in range(size)]
        dist.all_gather(parts, model.module.weight.grad)
        assert torch.equal(parts[0], parts[1])


@on_torch_ranks(2)
def test_zero_redundancy_optimizer():
    from torch.distributed.optim import ZeroRedundancyOptimizer

    trains(
        DistributedDataParallel,
        lambda model: ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9),
    )


@on_torch_ranks(2)
def test_local_sgd(rank):
    from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as local
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
    from torch.distributed.optim import PostLocalSGDOptimizer

    def wrap(model):
        ddp = DistributedDataParallel(model)
        state = local.PostLocalSGDState(None, dist.new_group([rank], use_local_synchronization=True), 1)
        ddp.register_comm_hook(state, local.post_localSGD_hook)
        return ddp

    trains(wrap, lambda model: PostLocalSGDOptimizer(sgd(model), PeriodicModelAverager(period=1, warmup_steps=0)))


def fully_shard(model):
    from torch.distributed import fsdp
    from torch.distributed.device_mesh import init_device_mesh

    return fsdp.fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))


@on_torch_ranks(2)
def test_fully_sharded():
    trains(fully_shard, read=lambda model: {name: value.full_tensor() for name, value in model.state_dict().items()})


@on_torch_ranks(2)
def test_checkpoint_of_a_sharded_model():
    import torch.distributed.checkpoint as checkpoint

    torch.manual_seed(0)
    model = fully_shard(torch.nn.Linear(6, 5))
    before = model.weight.full_tensor().detach().clone()
    checkpoint.save(model.state_dict(), checkpoint_id="saved")
    with torch.no_grad():
        model.weight.zero_()
    state = model.state_dict()
    checkpoint.load(state, checkpoint_id="saved")
    model.load_state_dict(state)
    assert torch.equal(model.weight.full_tensor(), before)
    work = checkpoint.async_save(model.state_dict(), checkpoint_id="saved_beside")
    work.result()
    assert os.path.exists("saved_beside/.metadata")


@on_torch_ranks(2)
def test_distributed_tensor(rank, size):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (size,))
    whole = torch.arange(12.0).reshape(4, 3)
    rows = distribute_tensor(whole, mesh, [Shard(0)])
    columns = rows.redistribute(mesh, [Shard(1)])
    assert columns.to_local().shape == (4, 2 - rank) and torch.equal(columns.full_tensor(), whole)
    assert rows.sum().full_tensor().item() == 66
    square = distribute_tensor(whole.t(), mesh, [Replicate()])
    assert torch.equal((rows @ square).full_tensor(), whole @ whole.t())

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.ReLU(), torch.nn.Linear(6, 2))
    x = torch.randn(3, 4)
    expected = model(x)
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    actual = model(x)
    actual.sum().backward()
    assert torch.allclose(actual, expected, atol=1e-6)


@on_torch_ranks(2, shares=False)
def test_collectives_with_gradients(rank):
    """torch.distributed.nn.functional: a loss over the rows of all ranks, on each of them."""
    from torch.distributed.nn import functional

    batch = torch.randn(6, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    whole = batch.clone().requires_grad_()
    (whole @ whole.T).pow(2).sum().backward()
    mine = batch[3 * rank : 3 * rank + 3].clone().requires_grad_()
    rows = torch.cat(functional.all_gather(mine))
    (rows @ rows.T).pow(2).sum().backward()
    torch.testing.assert_close(mine.grad, 2 * whole.grad[3 * rank : 3 * rank + 3])
    mine.grad = None
    functional.all_reduce(mine.pow(2)).sum().backward()
    torch.testing.assert_close(mine.grad, 4 * mine.detach())
