#!/usr/bin/env python3
"""all_reduce over the mpi engine beside plain MPI_Allreduce, by turns in one program, for each MPI
that is built. ./dev bench mpi calls it.

FOLDER [--json]   FOLDER holds the programs over-mpi-*; --json: one line, ratios by MPI and bytes
"""
import glob
import json
import os
import subprocess
import sys

SIZES = ['4', '64', '1048576']
# What Open MPI wants beside it: the programs bind themselves.
FLAGS = {'openmpi': ['--allow-run-as-root', '--oversubscribe', '--bind-to', 'none'], 'mpich': []}


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


def main():
    folder, as_json = sys.argv[1], '--json' in sys.argv[2:]
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


if __name__ == '__main__':
    main()
