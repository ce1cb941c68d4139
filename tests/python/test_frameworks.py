"""Libraries that train over torch.distributed, over the backend lockstep: the programs of docs/howto/frameworks.md."""

import re
from pathlib import Path

import pytest
from ranks import raises

pytest.importorskip("torch")
pytestmark = pytest.mark.nightly

PAGE = (Path(__file__).parents[2] / "docs/howto/frameworks.md").read_text()
PROGRAMS = dict(re.findall(r"^## (\w+)\n.*?^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE))

ON_THE_CPU = {"ACCELERATE_USE_CPU": "true"}
# What the ranks have in the end.
SAME_WEIGHTS = """
own = [p.detach() for p in model.parameters()]
parts = [torch.empty_like(own[0]) for _ in range(2)]
dist.all_gather(parts, own[0].contiguous())
assert torch.equal(parts[0], parts[1]) and not torch.equal(parts[0], before)
"""
CHECKS = {
    "Accelerate": ("accelerate", SAME_WEIGHTS),
    "Transformers": ("transformers", SAME_WEIGHTS),
    "Lightning": ("lightning", SAME_WEIGHTS),
    "Ignite": ("ignite", "assert idist.backend() == 'lockstep' and idist.get_world_size() == 2\n"),
    "TorchMetrics": ("torchmetrics", "assert abs(mean - 2 / 3) < 1e-6, mean\n"),
}


@pytest.mark.parametrize("framework", CHECKS)
def test_the_program_of_the_page(run_ranks, framework):
    module, check = CHECKS[framework]
    pytest.importorskip(module)
    # Ranks begin with other parameters: equal ones in the end are those of a training over both.
    program = PROGRAMS[framework].replace("model = Model()\n", "model = Model()\nbefore = model.layer.weight.detach().clone()\n", 1)
    program = program.replace(
        "model = torch.nn.Linear(4, 1)\n", "model = torch.nn.Linear(4, 1)\nbefore = model.weight.detach().clone()\n", 1
    )
    start = "import os, torch, torch.distributed as dist\ntorch.manual_seed(int(os.environ['RANK']))\n"
    end = "assert 'lockstep' in str(dist.get_backend()) and dist.get_world_size() == 2\n"
    run_ranks(2, start + program + check + end, env=ON_THE_CPU)


def accelerate_by_name():
    from accelerate import Accelerator, InitProcessGroupKwargs

    with raises(ValueError, "not available"):
        Accelerator(cpu=True, kwargs_handlers=[InitProcessGroupKwargs(backend="lockstep")])


def ignite_by_name():
    from ignite.distributed import Parallel

    with raises(ValueError, "Unknown backend"):
        Parallel(backend="lockstep")


@pytest.mark.parametrize("module, body", [("accelerate", accelerate_by_name), ("ignite.distributed", ignite_by_name)])
def test_what_refuses_the_name(run_ranks, module, body):
    """The page says so; where it is accepted one day, the page is to change."""
    pytest.importorskip(module)
    run_ranks(2, body, init=None, env=ON_THE_CPU)


def test_the_mismatch_of_a_released_program(run_ranks):
    """What docs/comparison.md shows."""
    pytest.importorskip("accelerate")
    program = (Path(__file__).parents[2] / "bench/accelerate_mismatch.py").read_text()
    table = ["MismatchError: barrier on group 'world'", "broadcast       i32   3", "barrier         -     -"]
    run_ranks(2, program.replace("sys.argv[1]", "'lockstep'"), code=1, says=table)
