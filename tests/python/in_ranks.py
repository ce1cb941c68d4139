"""What `run_ranks` starts as each rank. A task is a function of a test module, pickled, with its arguments.

in_ranks.py FILE     runs the task of FILE
in_ranks.py SOCKET   runs tasks, each in a folder of its own, until the other end closes
"""

import faulthandler
import os
import pickle
import signal
import sys
from multiprocessing.connection import Client
from pathlib import Path


def run(path):
    with open(path, "rb") as file:
        body, init, arguments = pickle.load(file)
    body = getattr(body, "__wrapped__", body)  # of a test that on_ranks made
    names = body.__code__.co_varnames[: body.__code__.co_argcount]
    arguments.update(init() if init else {})
    body(**{name: arguments[name] for name in names if name in arguments})
    with open("returned", "a") as file:
        file.write("x")


def leave_world():
    import lockstep

    if torch_distributed := sys.modules.get("torch.distributed"):
        if torch_distributed.is_initialized():
            torch_distributed.destroy_process_group()
        # It also counts an init_process_group that failed: the next default group would have another name on that rank only.
        torch_distributed.distributed_c10d._world.group_count = 0
    lockstep.destroy_dist()


def run_tasks(tasks):
    environment, handlers = dict(os.environ), {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    output, hook = os.dup(1), sys.excepthook
    while True:
        faulthandler.unregister(signal.SIGUSR1), faulthandler.register(signal.SIGUSR1)  # the test before may have set its own
        try:
            folder, port = tasks.recv()
        except EOFError:
            return
        os.chdir(folder)
        os.environ["MASTER_PORT"] = port  # the store of the world before may still have its own
        with open("output", "ab", buffering=0) as file:
            os.dup2(file.fileno(), 1), os.dup2(file.fileno(), 2)
        run("body")
        leave_world()
        sys.stdout.flush()
        os.dup2(output, 1), os.dup2(output, 2)
        sys.excepthook = hook  # which torch wraps in each world
        os.environ.clear()
        os.environ.update(environment)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        tasks.send("done")


# The launcher starts a rank that fails eight times: a test that has seen enough of them has written this file, with the
# exit code of the others, which need not import torch first.
FURTHER_REPLACEMENTS = Path("further-replacements")

if __name__ == "__main__":
    if os.environ.get("LOCKSTEP_SEGMENT", "").endswith(":next") and FURTHER_REPLACEMENTS.exists():
        sys.exit(int(FURTHER_REPLACEMENTS.read_text()))
    if Path(sys.argv[1]).is_socket():
        run_tasks(Client(sys.argv[1]))
    else:
        run(sys.argv[1])
