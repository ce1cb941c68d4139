"""Libraries that train over torch.distributed, over the backend lockstep: the programs of docs/howto/frameworks.md."""

import re
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytestmark = pytest.mark.nightly

PAGE = (Path(__file__).parents[2] / "docs/howto/frameworks.md").read_text()
PROGRAMS = dict(re.findall(r"^## (\w+)\n.*?^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE))

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
def test_the_program_of_the_page(run_torch, framework):
    module, check = CHECKS[framework]
    pytest.importorskip(module)
    # Ranks begin with other parameters: equal ones in the end are those of a training over both.
    program = PROGRAMS[framework].replace("model = Model()\n", "model = Model()\nbefore = model.layer.weight.detach().clone()\n", 1)
    program = program.replace(
        "model = torch.nn.Linear(4, 1)\n", "model = torch.nn.Linear(4, 1)\nbefore = model.weight.detach().clone()\n", 1
    )
    run_torch(
        2,
        program + check + "assert 'lockstep' in str(dist.get_backend()) and dist.get_world_size() == 2\n",
        prelude=(
            "import os; os.environ['ACCELERATE_USE_CPU'] = 'true'; import torch, torch.distributed as dist; "
            "torch.manual_seed(int(os.environ['RANK']))\n"
        ),
    )


@pytest.mark.parametrize(
    "module, call, text",
    [
        (
            "accelerate",
            "accelerate.Accelerator(cpu=True, kwargs_handlers=[accelerate.InitProcessGroupKwargs(backend='lockstep')])",
            "not available",
        ),
        ("ignite.distributed", "ignite.distributed.Parallel(backend='lockstep')", "Unknown backend"),
    ],
)
def test_what_refuses_the_name(run_torch, module, call, text):
    """The page says so; where it is accepted one day, the page is to change."""
    pytest.importorskip(module)
    run_torch(
        2,
        f"""
        import {module}
        from ranks import raises
        with raises(ValueError, {text!r}):
            {call}
        """,
        prelude="import os; os.environ['ACCELERATE_USE_CPU'] = 'true'\n",
    )
