"""Trains with BatchNorm, loses a rank on the way, and ends with the numbers of one rank.

    python elastic.py
    lockstep run -n 4 --elastic 2 -- python elastic.py
"""

import os
import signal

import torch
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import lockstep.nn

torch.manual_seed(1)  # the same data on all ranks
images = torch.randn(256, 12, dtype=torch.float64)
data = TensorDataset(images, (images.sum(1) > 0).long())
# [train]
model = torch.nn.Sequential(torch.nn.Linear(12, 16), torch.nn.BatchNorm1d(16), torch.nn.Linear(16, 2)).double()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5)
state = lockstep.nn.ElasticState([model, optimizer, schedule])  # what training changes
sampler = lockstep.nn.ElasticBatchSampler(data, 64, state, drop_last=True)


def train():
    ddp = DistributedDataParallel(model)  # a new one for each generation
    with lockstep.nn.SyncBatchNormScope():
        for _ in state.epochs(sampler, 10):
            for images, labels in DataLoader(data, batch_sampler=sampler):
                if (lockstep.get_rank(), lockstep.get_world_size(), state.step) == (1, 4, 12):
                    os.kill(os.getpid(), signal.SIGKILL)
                loss = cross_entropy(ddp(images), labels) * state.scale(len(labels))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                state.step_done()
            schedule.step()  # the end of the epoch


lockstep.nn.run_elastic(state, train)
# [train]
if lockstep.is_main_process():
    print(f"step {state.step}: the sum of the parameters is {sum(p.sum().item() for p in model.parameters()):.12f}")
