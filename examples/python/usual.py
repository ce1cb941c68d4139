"""A usual training: SyncBatchNorm, Adam, a schedule, workers, clipping, validation, a checkpoint, and a log of rank 0.

    lockstep run -n 4 -- python usual.py

usual_elastic.py is this program, going on after lost ranks.
"""

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import lockstep.nn

torch.manual_seed(1)  # the same data, and the same network, on all ranks
inputs = torch.randn(1024, 12, dtype=torch.float64)
data, unseen = torch.utils.data.random_split(TensorDataset(inputs, (inputs.sum(1) > 0).long()), [768, 256])
dist.init_process_group("lockstep")
network = torch.nn.Sequential(torch.nn.Linear(12, 16), torch.nn.BatchNorm1d(16), torch.nn.ReLU(), torch.nn.Linear(16, 2))
model = lockstep.nn.convert_sync_batchnorm(network.double())
optimizer = torch.optim.Adam(model.parameters(), 0.01)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
sampler = DistributedSampler(data, seed=0)


def validate():
    model.eval()
    n_right = torch.zeros((), dtype=torch.int64)
    part = range(dist.get_rank(), len(unseen), dist.get_world_size())
    with torch.no_grad():
        for images, labels in DataLoader(unseen, batch_size=64, sampler=part):
            n_right += (model(images).argmax(1) == labels).sum()
    dist.all_reduce(n_right)
    model.train()
    return n_right.item() / len(unseen)


def train():
    ddp = DistributedDataParallel(model)
    loader = DataLoader(data, batch_size=64 // dist.get_world_size(), sampler=sampler, num_workers=1)
    for epoch in range(6):
        sampler.set_epoch(epoch)
        for images, labels in loader:
            loss = cross_entropy(ddp(images), labels)
            optimizer.zero_grad()
            loss.backward()
            clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        schedule.step()
        accuracy = validate()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: accuracy {accuracy:.4f}", flush=True)
            torch.save(model.state_dict(), "usual.pt")


train()
