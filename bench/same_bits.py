#!/usr/bin/env python3
"""Whether a sum has the same bits whatever the size of the message.

usage: lockstep run -n 4 -- python bench/same_bits.py [lockstep|gloo]

All_reduces a million random floats in one message and in messages of 1,000 and of 100,000, and counts the values that
differ.
"""

import sys

import torch
import torch.distributed as dist

backend = sys.argv[1] if len(sys.argv) > 1 else "lockstep"
dist.init_process_group(backend)
torch.manual_seed(dist.get_rank())
values = torch.randn(1_000_000)
whole = values.clone()
dist.all_reduce(whole)
for size in 1_000, 100_000:
    parts = values.clone()
    for part in parts.split(size):
        dist.all_reduce(part)
    if dist.get_rank() == 0:
        n_other = (parts.view(torch.int32) != whole.view(torch.int32)).sum()
        print(f"{backend}: of {len(values):,} values, {n_other:,} have other bits in messages of {size:,} than in one")
dist.destroy_process_group()
