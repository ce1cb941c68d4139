#!/usr/bin/env python3
"""The mpi engine beside plain calls of that MPI, by turns in one program, for each MPI that is built: ./dev bench mpi.

FOLDER [--json]  all_reduce of two ranks of this host, with threads and without; --json: one line, ratios by MPI and bytes
FOLDER --hosts PAGE [--rate RATE] [HOSTSxRANKS ...]
    collectives between network namespaces that stand for hosts, as root; the table goes to PAGE; RATE (1gbit): what each
    host sends per second, in the syntax of tc's tbf
FOLDER holds the programs over-mpi-*.
"""
import argparse
import contextlib
import glob
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time

from growth import put, size

SIZES = ['4', '64', '1048576']
# What Open MPI wants beside it: the programs bind themselves.
FLAGS = {'openmpi': ['--allow-run-as-root', '--oversubscribe', '--bind-to', 'none'], 'mpich': []}
HOSTS_SIZES = [64, 1 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 8 << 20, 64 << 20]
OPERATIONS = ['all_reduce', 'all_gather', 'broadcast']
MOST_SECONDS = 600  # of one run, of all sizes
# Namespaces of one kernel are one host to UCX, which would call others on this one's loopback.
ENVIRONMENT = {**os.environ, 'UCX_NET_DEVICES': 'cable', 'UCX_TLS': 'tcp,self',
               'OMPI_ALLOW_RUN_AS_ROOT': '1', 'OMPI_ALLOW_RUN_AS_ROOT_CONFIRM': '1'}


def mpirun_of(folder, name):
    beside = os.path.join(folder, f'lockstep-peer-{name}.mpirun')
    # Its own name, for MPICH's mpirun looks for its parts beside the name it is called by.
    return os.path.realpath(beside) if os.path.exists(beside) else f'mpirun.{name}'


def rows_of(folder, name, mode):
    flags = FLAGS[name.removesuffix('-wheel')]
    command = [mpirun_of(folder, name), *flags, '-n', '2',
               os.path.join(folder, f'over-mpi-{name}'), *mode, *SIZES]
    try:
        ended = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=300)
    except subprocess.TimeoutExpired:
        sys.exit(f'over_mpi: {" ".join(command)}: not done in 300 s')
    if ended.returncode != 0:
        sys.exit(f'over_mpi: {" ".join(command)}: exit code {ended.returncode}')
    return [json.loads(line) for line in ended.stdout.splitlines() if line.startswith('{')]


def measure_here(folder, as_json):
    if len(os.sched_getaffinity(0)) < 2:
        sys.exit('over_mpi: two ranks want two cores')
    found = sorted(os.path.basename(path).removeprefix('over-mpi-')
                   for path in glob.glob(os.path.join(folder, 'over-mpi-*')))
    if not found:
        sys.exit(f'over_mpi: no MPI: there is no {folder}/over-mpi-*')
    ratios = {}
    if not as_json:
        print('| MPI | threads | bytes | plain, us | lockstep, us | ratio |\n|---|---|---|---|---|---|')
    for name in found:
        for threads, mode in [('multiple', []), ('single', ['--single'])]:
            rows = rows_of(folder, name, mode)
            ratios[f'{name} {threads}'] = {str(row['bytes']): round(row['ratio'], 3) for row in rows}
            for row in rows if not as_json else []:
                print(f"| {name} | {threads} | {row['bytes']} | {row['plain_us']:.2f} | "
                      f"{row['lockstep_us']:.2f} | {row['ratio']:.2f} |", flush=True)
    if as_json:
        print(json.dumps(ratios))


class Hosts:
    """Network namespaces on one switch, and a program that starts commands on them as ssh would."""

    def __init__(self, n, rate, folder):
        self.names = [f'lockstep-bench-{os.getpid()}-{i}' for i in range(n)]
        self.switch = f'lockstep-bench-{os.getpid()}-switch'
        self.addresses = [f'10.78.0.{i + 1}' for i in range(n)]
        self.agent = os.path.join(folder, 'agent')
        lines = [f'ip netns add {self.switch}', f'ip -n {self.switch} link add bridge type bridge',
                 f'ip -n {self.switch} link set bridge up']
        for i, (name, address) in enumerate(zip(self.names, self.addresses, strict=True)):
            lines += [f'ip netns add {name}', f'ip -n {name} link add cable type veth peer name '
                      f'port{i} netns {self.switch}',
                      f'ip -n {self.switch} link set port{i} master bridge up',
                      f'ip -n {name} addr add {address}/24 dev cable',
                      f'ip -n {name} link set cable up', f'ip -n {name} link set lo up',
                      f'tc -n {name} qdisc add dev cable root tbf rate {rate} burst 256kb '
                      'latency 100ms']
        starts = [f'{address}) exec {shlex.join(self.on(i))} "$@" ;;\n' for i, address in enumerate(self.addresses)]
        with open(self.agent, 'w') as file:
            file.write('#!/bin/sh\n[ "$1" != -x ] || shift\naddress=$1; shift\nset -- sh -c "$*"\n'
                       f'case $address in\n{"".join(starts)}esac\nexit 1\n')
        os.chmod(self.agent, 0o700)
        try:
            subprocess.run(['sh', '-ec', '; '.join(lines)], check=True)
        except BaseException:
            self.remove()
            raise

    def on(self, i):
        """The words before a command that host i runs; its process is that of the command."""
        return ['ip', 'netns', 'exec', self.names[i], 'unshare', '--uts', '--ipc', 'sh', '-c', f'hostname host{i}; exec "$@"', 'sh']

    def kill(self, i):
        """All processes of host i; more may start while they are found."""
        end = time.monotonic() + 10
        while time.monotonic() < end:
            pids = subprocess.run(['ip', 'netns', 'pids', self.names[i]], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
            if not pids.stdout:
                return
            for pid in pids.stdout.split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)

    def remove(self):
        for i in range(len(self.names)):
            self.kill(i)
        for name in [*self.names, self.switch]:
            subprocess.run(['ip', 'netns', 'del', name], stderr=subprocess.DEVNULL)


def command_of(mpi, hosts, n_ranks, program):
    slots = ','.join(f'{address}:{n_ranks}' for address in hosts.addresses)
    n = str(n_ranks * len(hosts.addresses))
    own = ['sh', hosts.agent, hosts.addresses[0]]  # mpirun itself runs on the first host
    if mpi == 'openmpi':
        # With as many cores as ranks a wait that yields would let other programs run first.
        yields = '1' if int(n) > len(os.sched_getaffinity(0)) else '0'
        return [*own, 'mpirun.openmpi', '--oversubscribe', '--bind-to', 'none', '--mca',
                'mpi_yield_when_idle', yields, '--mca', 'plm_rsh_agent', hosts.agent, '--mca',
                'btl_tcp_if_include', '10.78.0.0/24', '--mca', 'oob_tcp_if_include', '10.78.0.0/24',
                '-H', slots, '-n', n, *program]
    return [*own, 'mpiexec.mpich', '-launcher', 'ssh', '-launcher-exec', hosts.agent, '-iface',
            'cable', '-hosts', slots, '-n', n, *program]


def measure_hosts(folder, mpi, n_hosts, n_ranks, rate):
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        hosts = Hosts(n_hosts, rate, temporary)
        try:
            program = [os.path.abspath(os.path.join(folder, f'over-mpi-{mpi}')), '--hosts',
                       *map(str, HOSTS_SIZES)]
            process = subprocess.Popen(command_of(mpi, hosts, n_ranks, program), env=ENVIRONMENT,
                                       stdout=subprocess.PIPE, text=True, start_new_session=True)
            end = time.monotonic() + MOST_SECONDS
            # MPICH may not return from MPI_Finalize over UCX's TCP: its end is not waited for.
            while len(rows) < len(HOSTS_SIZES) * len(OPERATIONS) and time.monotonic() < end:
                line = process.stdout.readline()
                if not line:
                    break
                if line.startswith('{'):
                    rows.append(json.loads(line))
                    print(n_hosts, n_ranks, mpi, line.strip(), flush=True)
        finally:
            hosts.remove()
    return {(row['operation'], row['bytes']): row for row in rows}


def microseconds(value):
    return f'{value:.0f}' if value < 10e3 else f'{value / 1e3:.0f}k'


def table(results):
    """Cells: the MPI's time, lockstep's, in microseconds."""
    lines = ['| hosts x ranks | MPI | ' + ' | '.join(map(size, HOSTS_SIZES)) + ' |',
             '|---' * (len(HOSTS_SIZES) + 2) + '|']
    for operation in OPERATIONS:
        for (n_hosts, n_ranks, mpi), rows in results.items():
            cells = []
            for n_bytes in HOSTS_SIZES:
                row = rows.get((operation, n_bytes))
                text = row and f"{microseconds(row['plain_us'])}, {microseconds(row['lockstep_us'])}"
                cells.append('-' if not row else f'**{text}**' if row['ratio'] > 1.05 else text)
            lines.append(f'| {operation}, {n_hosts} x {n_ranks} | {mpi} | ' + ' | '.join(cells) + ' |')
    return '\n'.join(lines)


def measure_between_hosts(given):
    if os.geteuid() != 0:
        sys.exit('over_mpi: only root can make network namespaces')
    signal.signal(signal.SIGTERM, lambda *_: sys.exit('over_mpi: ended by SIGTERM'))
    results = {}
    for shape in given.shapes:
        n_hosts, n_ranks = map(int, shape.split('x'))
        for mpi in ('openmpi', 'mpich'):
            if os.path.exists(os.path.join(given.folder, f'over-mpi-{mpi}')):
                results[n_hosts, n_ranks, mpi] = measure_hosts(given.folder, mpi, n_hosts, n_ranks, given.rate)
    put('hosts_measured', table(results), given.hosts)


def main():
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    arguments.add_argument('folder')
    arguments.add_argument('--json', action='store_true')
    arguments.add_argument('--hosts', metavar='PAGE')
    arguments.add_argument('--rate', default='1gbit')
    arguments.add_argument('shapes', nargs='*', default=['2x1', '4x1', '2x2'])
    given = arguments.parse_intermixed_args()
    if given.hosts:
        measure_between_hosts(given)
    else:
        measure_here(given.folder, given.json)


if __name__ == '__main__':
    main()
