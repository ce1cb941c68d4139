"""Libraries that train over torch.distributed, over the backend lockstep."""

import pytest

pytest.importorskip("torch")
pytestmark = pytest.mark.nightly


def test_accelerate(run_torch):
    pytest.importorskip("accelerate")
    run_torch(
        2,
        """
        from accelerate import Accelerator
        accelerator = Accelerator(cpu=True)
        assert accelerator.num_processes == 2 and accelerator.process_index == rank
        torch.manual_seed(rank)
        model = torch.nn.Linear(4, 1)
        data = torch.utils.data.TensorDataset(torch.randn(16, 4))
        model, optimizer, loader = accelerator.prepare(
            model, torch.optim.SGD(model.parameters(), 0.1), torch.utils.data.DataLoader(data, batch_size=4)
        )
        for (x,) in loader:
            optimizer.zero_grad()
            accelerator.backward(model(x).square().mean())
            optimizer.step()
        weights = accelerator.gather(accelerator.unwrap_model(model).weight.detach().clone())
        assert torch.equal(weights[0], weights[1])
        """,
        prelude=(
            "import os; os.environ['ACCELERATE_USE_CPU'] = 'true'; import torch, torch.distributed as dist; "
            "dist.init_process_group('lockstep'); rank, size = dist.get_rank(), dist.get_world_size()\n"
        ),
    )


def test_lightning(run_torch):
    pytest.importorskip("lightning")
    run_torch(
        2,
        """
        import lightning
        from lightning.pytorch.strategies import DDPStrategy
        class Model(lightning.LightningModule):
            def __init__(self):
                super().__init__()
                self.layer = torch.nn.Linear(4, 1)
            def training_step(self, batch, index):
                loss = self.layer(batch[0]).square().mean()
                self.log("loss", loss, sync_dist=True)
                return loss
            def configure_optimizers(self):
                return torch.optim.SGD(self.parameters(), 0.1)
        torch.manual_seed(int(os.environ["RANK"]))
        model = Model()
        data = torch.utils.data.TensorDataset(torch.randn(16, 4))
        trainer = lightning.Trainer(
            accelerator="cpu", devices=2, strategy=DDPStrategy(process_group_backend="lockstep"), max_epochs=1,
            logger=False, enable_checkpointing=False, enable_progress_bar=False,
        )
        trainer.fit(model, torch.utils.data.DataLoader(data, batch_size=4))
        assert "lockstep" in str(dist.get_backend()) and dist.get_world_size() == 2
        parts = [torch.empty(1, 4) for _ in range(2)]
        dist.all_gather(parts, model.layer.weight.detach())
        assert torch.equal(parts[0], parts[1])
        """,
        prelude="import os, torch, torch.distributed as dist\n",
    )
