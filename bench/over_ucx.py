"""over_ucx.py BUILD [BLOCKS]: messages between two network namespaces, one rank in each: UCX alone (ucx_perftest), and the
ucx engine over it, in alternating blocks, as root. Prints half a round trip in microseconds, the tenth percentile, the best of
the blocks, and the engine's over UCX's: where ranks compare their calls (LOCKSTEP_CHECK=light), which takes a message each way,
and where they do not (off).
over_ucx.py BUILD --engines PYTHON [BLOCKS]: all_reduce of f32 between the two ranks over each engine between hosts, a median
in microseconds, the best of alternating blocks. PYTHON has the packages of lockstep, for Gloo is torch's."""
import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), '../scripts'))
from growth import size
from over_mpi import Hosts, command_of

SUMS = {64: 1000, 1024: 1000, 16384: 500, 65536: 300, 1 << 20: 60, 8 << 20: 20}  # bytes: calls
TORCHS = {'gloo, of torch.distributed': 'lockstep', 'Gloo itself': 'gloo'}
TIMES = {1: 1500, 1024: 1500, 16384: 1500, 65536: 400, 1 << 20: 60}
ENVIRONMENT = {**os.environ, 'UCX_NET_DEVICES': 'cable', 'UCX_TLS': 'tcp', 'GLOO_SOCKET_IFNAME': 'cable'}


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


def of_engine(hosts, build, python, backend):
    program = [python, os.path.abspath(__file__), '--rank', backend]
    if backend == 'mpi':
        variables = {**ENVIRONMENT, 'LOCKSTEP_MPI': os.path.join(build, 'src/engines/mpi/module/liblockstep-mpi-mpich.so')}
        ended = subprocess.run(command_of('mpich', hosts, 1, program), env=variables, stdout=subprocess.PIPE, text=True, timeout=300)
        return json.loads(ended.stdout)
    return of_launchers(hosts, build, program, {'LOCKSTEP_UCX': 'off'} if backend in TORCHS else {})


def of_lockstep(hosts, build, check):
    return of_launchers(hosts, build, [os.path.join(build, 'bench/over_ucx/over-ucx'), 'ucx'], {'LOCKSTEP_CHECK': check})


def of_launchers(hosts, build, program, variables):
    run = [os.path.join(build, 'src/cli/lockstep'), 'run', '--nnodes', '2', '--rdzv', f'{hosts.addresses[0]}:29400', '-n', '1']
    variables = {**ENVIRONMENT, 'LOCKSTEP_UCX': os.path.join(build, 'src/engines/ucx/module/liblockstep-ucx.so'), **variables}
    nodes = [subprocess.Popen(['ip', 'netns', 'exec', name, *run, '--node-rank', str(node), '--', *program],
                              env=variables, stdout=subprocess.PIPE, text=True) for node, name in enumerate(hosts.names)]
    said = [node.communicate(timeout=120)[0] for node in nodes]
    return json.loads(said[0])


def be_rank(backend):
    """Torch's: the backend of torch.distributed, and its tensors."""
    if backend in TORCHS:
        import torch
        import torch.distributed as dist
        dist.init_process_group(TORCHS[backend])
        rank, ones, all_reduce = dist.get_rank(), torch.ones, dist.all_reduce
    else:
        import numpy

        import lockstep
        lockstep.init_dist(backend=backend)
        rank, all_reduce = lockstep.get_rank(), lockstep.all_reduce
        ones = functools.partial(numpy.ones, dtype=numpy.float32)
    medians = {}
    for n_bytes, n_times in SUMS.items():
        data, times = ones(n_bytes // 4), []
        for _ in range(n_times):
            began = time.perf_counter()
            all_reduce(data)
            times.append((time.perf_counter() - began) * 1e6)
            data[:] = 1
        medians[n_bytes] = statistics.median(times)
    if rank == 0:
        print(json.dumps(medians), flush=True)
    all_reduce(data)
    os._exit(0)  # ~ProcessGroupGloo may wait for a thread that waits for the GIL


def compare_engines(hosts, build, python, n_blocks):
    blocks = {backend: [] for backend in ('ucx', 'mpi', *TORCHS)}
    for _ in range(n_blocks):
        for backend, of_backend in blocks.items():
            of_backend.append(of_engine(hosts, build, python, backend))
    print('| all_reduce, us | ' + ' | '.join(size(n_bytes) for n_bytes in SUMS) + ' |\n|---' + '|---' * len(SUMS) + '|')
    for backend, of_backend in blocks.items():
        best = (min(block[str(n_bytes)] for block in of_backend) for n_bytes in SUMS)
        print(f'| {backend} | ' + ' | '.join(f'{us:.3g}' for us in best) + ' |')


def main():
    if sys.argv[1] == '--rank':
        return be_rank(sys.argv[2])
    build, python, rest = os.path.abspath(sys.argv[1]), None, sys.argv[2:]
    if rest[:1] == ['--engines']:
        python, *rest = rest[1:]
    n_blocks = int(rest[0]) if rest else 5
    blocks = {'UCX': [], 'light': [], 'off': []}
    with tempfile.TemporaryDirectory() as folder:
        hosts = Hosts(2, '10gbit', folder)
        try:
            if python:
                return compare_engines(hosts, build, python, n_blocks)
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


sys.exit(main())
