"""over_nodes.py NODES ARGUMENTS...: `lockstep run ARGUMENTS` once for each of so many nodes, which meet on this machine.

The launchers count as hosts of their own: what ranks of two of them say goes over UCX. Ends with the code of node 0, when
all have ended.
"""

import socket
import subprocess
import sys
from pathlib import Path

COMMAND = str(Path(sys.executable).parent / "lockstep")


def main():
    n_nodes = int(sys.argv[1])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        rendezvous = f"127.0.0.1:{free.getsockname()[1]}"
    launchers = []
    for node in range(n_nodes):
        nodes = ["--nnodes", str(n_nodes), "--node-rank", str(node), "--rdzv", rendezvous]
        launchers.append(subprocess.Popen([COMMAND, "run", *nodes, *sys.argv[2:]]))
    codes = [launcher.wait() for launcher in launchers]
    sys.exit(codes[0] if codes[0] >= 0 else 128 - codes[0])


if __name__ == "__main__":
    main()
