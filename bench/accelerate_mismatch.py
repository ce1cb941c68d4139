"""A test of Accelerate in which, on CPUs, one rank has a batch more than the other.

usage: lockstep run -n 2 -- python accelerate_mismatch.py lockstep|gloo
"""

import os
import runpy
import sys

import torch

os.environ["ACCELERATE_USE_CPU"] = "true"
torch.distributed.init_process_group(sys.argv[1])
runpy.run_module("accelerate.test_utils.scripts.test_distributed_data_loop", run_name="__main__")
