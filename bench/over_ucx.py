"""over_ucx.py BUILD [BLOCKS]: messages between two network namespaces, one rank in each: UCX alone (ucx_perftest), and the
ucx engine over it, in alternating blocks, as root. Prints half a round trip in microseconds, the tenth percentile, the best of
the blocks, and the engine's over UCX's: where ranks compare their calls (LOCKSTEP_CHECK=light), which takes a message each way,
and where they do not (off)."""
import json
import os
import subprocess
import sys
import tempfile

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), '../scripts'))
from over_mpi import Hosts

TIMES = {1: 1500, 1024: 1500, 16384: 1500, 65536: 400, 1 << 20: 60}
ENVIRONMENT = {**os.environ, 'UCX_NET_DEVICES': 'cable', 'UCX_TLS': 'tcp'}


def of_ucx(hosts):
    halves = {}
    for n_bytes, n_times in TIMES.items():
        test = ['ucx_perftest', '-t', 'tag_lat', '-R', '10', '-s', str(n_bytes), '-n', str(n_times), '-w', '100', '-f', '-v']
        on = [['ip', 'netns', 'exec', name] for name in hosts.names]
        server = subprocess.Popen([*on[0], *test], env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            for _ in range(100):
                client = subprocess.run([*on[1], *test, hosts.addresses[0]], env=ENVIRONMENT, text=True,
                                        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=60)
                if client.returncode == 0:
                    break
        finally:
            server.wait(timeout=60)
        # Iterations, then the percentile of half a round trip.
        halves[str(n_bytes)] = float(client.stdout.splitlines()[-1].split(',')[1])
    return halves


def of_lockstep(hosts, build, check):
    run = [os.path.join(build, 'src/cli/lockstep'), 'run', '--nnodes', '2', '--rdzv', f'{hosts.addresses[0]}:29400', '-n', '1']
    variables = {**ENVIRONMENT, 'LOCKSTEP_CHECK': check, 'LOCKSTEP_UCX': os.path.join(build, 'src/engines/ucx/module/liblockstep-ucx.so')}
    nodes = [subprocess.Popen(['ip', 'netns', 'exec', name, *run, '--node-rank', str(node), '--',
                               os.path.join(build, 'bench/over_ucx/over-ucx'), 'ucx'],
                              env=variables, stdout=subprocess.PIPE, text=True) for node, name in enumerate(hosts.names)]
    said = [node.communicate(timeout=120)[0] for node in nodes]
    return json.loads(said[0])


def main():
    build, n_blocks = os.path.abspath(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 5
    blocks = {'UCX': [], 'light': [], 'off': []}
    with tempfile.TemporaryDirectory() as folder:
        hosts = Hosts(2, '10gbit', folder)
        try:
            for _ in range(n_blocks):
                blocks['UCX'].append(of_ucx(hosts))
                for check in 'light', 'off':
                    blocks[check].append(of_lockstep(hosts, build, check))
        finally:
            hosts.remove()
    print('| bytes | UCX, us | light, us | off, us | light : UCX | off : UCX |\n|---|---|---|---|---|---|')
    for n_bytes in TIMES:
        ucx, light, off = (min(block[str(n_bytes)] for block in blocks[name]) for name in blocks)
        print(f'| {n_bytes} | {ucx:.1f} | {light:.1f} | {off:.1f} | {light / ucx:.2f} | {off / ucx:.2f} |')


main()
