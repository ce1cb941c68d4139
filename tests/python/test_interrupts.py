"""A handler of a signal that raises, in each phase of a call: what the rank gets, what the others get, and what is then."""

import pytest
from conftest import WORLDS

pytest.importorskip("torch")

# Signals in C, so that no Python code runs, and with it the handler, before the call of C that follows.
KICK = """
import ctypes, functools
kick = ctypes.CDLL(None)["raise"]
kick.restype = float
torch.Tensor._as_parameter_ = 0  # hooks call it with a tensor more
def stop(*_): raise ZeroDivisionError("stopped")
if rank == 0:
    signal.signal(signal.SIGUSR1, stop)
in_a_gradient = functools.partial(ctypes.CDLL(None)["raise"], signal.SIGUSR1)
in_a_gradient.func.restype = None
class AtRead:
    __float__ = functools.partial(kick, signal.SIGUSR1)
"""

PHASES = {
    "forward": """
layer.eps = AtRead() if rank == 0 else layer.eps
act = lambda: layer(x)
""",
    "backward": """
y = layer(x)
if rank == 0:
    y.register_hook(in_a_gradient)
act = lambda: y.sum().backward()
""",
    "second backward": """
gradient, = torch.autograd.grad(layer(x).pow(2).sum(), x, create_graph=True)
if rank == 0:
    gradient.register_hook(in_a_gradient)
act = lambda: gradient.pow(2).sum().backward()
""",
}


@pytest.mark.parametrize("phase", PHASES)
def test_before_a_message_of_a_layer(run_layers, world, phase):
    """Over Gloo, whose waits no signal ends, the handler runs when the layer has done its part."""
    run_layers(
        2,
        KICK
        + f"""
layer = ls.nn.SyncBatchNorm(3, dtype=torch.float64)
x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
layer(x).sum().backward()
again = ls.nn.SyncBatchNorm(3, dtype=torch.float64)
{PHASES[phase]}
if {world!r} == "gloo":
    if rank == 0:
        with raises(ZeroDivisionError, "stopped"): act()
    else:
        act()
    again(x).sum().backward()
elif rank == 0:
    with raises(ZeroDivisionError, "stopped"): act()
    with raises(ls.Error, "ZeroDivisionError: stopped"): again(x)
else:
    with raises(ls.Error, "rank 0", "ZeroDivisionError: stopped"): act()
    with raises(ls.Error, "ZeroDivisionError: stopped"): again(x)
""",
    )


CALLS = {
    "all_reduce": "pg.allreduce, [torch.ones(1)], blocking(dist.AllreduceOptions())",
    "barrier": "pg.barrier, blocking(dist.BarrierOptions())",
}


@pytest.mark.parametrize("call", CALLS)
def test_before_a_call_that_blocks(run_torch, call):
    """It is a refused call: the group goes on if the others refuse theirs, and they learn of it if not."""
    run_torch(
        2,
        KICK
        + f"""
import collections, lockstep as ls
from torch.distributed import distributed_c10d as dist
def blocking(options):
    options.asyncOp = False
    return options
pg = dist.group.WORLD
dist.barrier()
call = functools.partial({CALLS[call]})
if rank == 0:
    steps = [functools.partial(kick, signal.SIGUSR1), call]
    with raises(ZeroDivisionError, "stopped"):
        collections.deque(map(functools.partial.__call__, steps), 0)
    with raises(ls.MismatchError, "ZeroDivisionError: stopped"): dist.barrier()
else:
    with raises(ls.MismatchError, "refused {call}", "ZeroDivisionError: stopped"): call()
""",
    )


def test_before_a_wait(run_torch):
    """The call goes on, and so does the group."""
    run_torch(
        2,
        KICK
        + """
import collections
x = torch.ones(1)
if rank == 0:
    work = dist.all_reduce(x, async_op=True)
    steps = [functools.partial(kick, signal.SIGUSR1), work.wait]
    with raises(ZeroDivisionError, "stopped"):
        collections.deque(map(operator_call, steps), 0)
    open("interrupted", "w").close()
    work.wait()
else:
    while not os.path.exists("interrupted"): time.sleep(0.01)
    dist.all_reduce(x)
assert x.item() == 2
dist.barrier()
""".replace("operator_call, steps", "functools.partial.__call__, map(functools.partial, steps)"),
    )


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("world", [world for world in WORLDS if world != "gloo"])
def test_ctrl_c_ends_the_wait_of_a_layer(run_layers, phase):
    run_layers(
        2,
        KICK
        + f"""
layer = ls.nn.SyncBatchNorm(3, dtype=torch.float64)
x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
{PHASES[phase].replace("rank == 0", "False")}
if rank == 0:
    open("pid.new", "w").write(str(os.getpid()))
    os.rename("pid.new", "pid")
    with raises(KeyboardInterrupt):
        act()
    open("interrupted", "w").close()
else:
    while not os.path.exists("pid"): time.sleep(0.01)
    pid = int(open("pid").read())
    while open(f"/proc/{{pid}}/wchan").read() == "0": time.sleep(0.01)
    os.kill(pid, signal.SIGINT)
    while not os.path.exists("interrupted"): time.sleep(0.01)
    with raises(ls.PeerFailed, "rank 0 failed: KeyboardInterrupt"): act()
with raises(ls.PeerFailed, "rank 0 failed: KeyboardInterrupt"): layer(x)
""",
    )
