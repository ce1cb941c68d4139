"""Trains a classifier of digits with BatchNorm over any number of ranks, to the numbers of one rank.

    python train.py
    lockstep run -n 4 -- python train.py
    torchrun --nproc-per-node 4 train.py
"""

import argparse
import gzip
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import lockstep.nn

DIGITS = Path(__file__).resolve().parent.parent / "data" / "digits"


def read(name, n_header_bytes):
    data = gzip.decompress((DIGITS / f"{name}-ubyte.gz").read_bytes())
    return torch.frombuffer(bytearray(data), dtype=torch.uint8, offset=n_header_bytes)


def read_images(prefix, dtype):
    images = read(f"{prefix}-images-idx3", 16).view(-1, 1, 28, 28).to(dtype) / 255
    return images, read(f"{prefix}-labels-idx1", 8).long()


def make_model():
    layers, channels = [], 1
    for width in 16, 32, 64:
        layers += [nn.Conv2d(channels, width, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
        channels = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", default="lockstep", help="of torch.distributed: gloo works too")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch", type=int, default=72, help="of all ranks together")
    parser.add_argument("--learning-rate", type=float, default=0.1)
    parser.add_argument("--precision", choices=["float32", "float64"], default="float32")
    parser.add_argument("--save", type=Path, help="where rank 0 writes the network's state_dict")
    options = parser.parse_args()

    if "RANK" in os.environ:
        dist.init_process_group(options.backend)
    else:
        dist.init_process_group(options.backend, store=dist.HashStore(), rank=0, world_size=1)
    rank, n_ranks = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // n_ranks))

    dtype = getattr(torch, options.precision)
    images, labels = read_images("train", dtype)
    torch.manual_seed(1)  # the same network and the same order on all ranks
    network = lockstep.nn.convert_sync_batchnorm(make_model().to(dtype))
    model = DistributedDataParallel(network)
    optimizer = torch.optim.SGD(model.parameters(), lr=options.learning_rate, momentum=0.9)

    for epoch in range(options.epochs):
        model.train()
        for batch in torch.randperm(len(images)).split(options.batch):
            mine = batch.tensor_split(n_ranks)[rank]  # parts may differ by one image
            loss = cross_entropy(model(images[mine]), labels[mine], reduction="sum") / len(batch)
            optimizer.zero_grad()
            (loss * n_ranks).backward()  # DDP divides the sum of the ranks' gradients by their number
            optimizer.step()

        model.eval()
        test_images, test_labels = (part.tensor_split(n_ranks)[rank] for part in read_images("t10k", dtype))
        with torch.no_grad():
            counts = torch.tensor([(network(test_images).argmax(1) == test_labels).sum(), len(test_labels)])
        dist.all_reduce(counts)
        if rank == 0:
            print(f"epoch {epoch + 1}: {counts[0] / counts[1]:.1%} of the test images", flush=True)

    if rank == 0 and options.save:
        torch.save(network.state_dict(), options.save)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
