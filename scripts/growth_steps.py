#!/usr/bin/env python3
"""Steps of training on clusters that SimGrid simulates, for docs/scaling.md. ./dev bench growth calls it.

simulate PROGRAM MODULE LOG what steps take; what LOG has of this program already is kept
draw LOG PAGE               a table of that beside the alpha-beta bound
check PROGRAM MODULE LOG    2 and 16 hosts only; fails where a step takes too long beside the bound
"""
import math
import os
import subprocess
import sys
import tempfile

from growth import put

HOSTS = [2, 16, 64]
RANKS_PER_HOST = 8
GBITS = [25, 400]
CASES = {'all alike': 1, 'a slow host': 1.25}  # times that it computes
LINK, MESSAGE, CORE = 0.5e-6, 0.25e-6, 10e9  # seconds, seconds, bytes/s, of cluster.hpp
HOSTS_PER_SWITCH = 16
PHASE, MEMORY = 1e-6, 200e9  # seconds, bytes/s, of steps.cpp
MOST_CHECKED = 0.25          # between 16 hosts at most
MIB = 1 << 20
FIRST_BUCKET, BUCKET = 1 * MIB, 25 * MIB


# --- what a step does -----------------------------------------------------------------------------

def resnet50():
    """Layers in the order of forward: multiplications, parameters' bytes, channels to normalise."""
    layers = []

    def convolution(n_in, n_out, kernel, side):
        layers.append((n_in * n_out * kernel**2 * side**2, [4 * n_in * n_out * kernel**2], 0))
        layers.append((0, [4 * n_out, 4 * n_out], n_out))

    convolution(3, 64, 7, 112)
    n_in = 64
    for n_blocks, width, side in ((3, 64, 56), (4, 128, 28), (6, 256, 14), (3, 512, 7)):
        for block in range(n_blocks):
            # The 3 x 3 convolution has the stride, after the first at twice the side.
            before = side * 2 if block == 0 and width > 64 else side
            convolution(n_in, width, 1, before)
            convolution(width, width, 3, side)
            convolution(width, 4 * width, 1, side)
            if block == 0:
                convolution(n_in, 4 * width, 1, side)
            n_in = 4 * width
    layers.append((2048 * 1000, [4 * 2048 * 1000, 4 * 1000], 0))
    return layers


def step_of(layers, forward, is_synchronised):
    """The schedule of a step whose forward computes for so many seconds, and backward for twice."""
    total = sum(work for work, _, _ in layers)
    actions, buckets, filled = [], 0, 0
    for work, _, n_channels in layers:
        actions.append(('compute', forward * work / total))
        if is_synchronised and n_channels:
            actions.append(('moments', n_channels))
    for work, parameters, n_channels in reversed(layers):
        actions.append(('compute', 2 * forward * work / total))
        if is_synchronised and n_channels:
            actions.append(('sums', 2 * n_channels))
        for n_bytes in reversed(parameters):
            filled += n_bytes
            if filled >= (BUCKET if buckets else FIRST_BUCKET):
                actions.append(('bucket', filled))
                buckets, filled = buckets + 1, 0
    if filled:
        actions.append(('bucket', filled))
    return [action for action in actions if action[1]]


STEPS = {'ResNet-50': step_of(resnet50(), 0.030, False),
         'ResNet-50, SyncBatchNorm': step_of(resnet50(), 0.030, True)}


# --- the bound ------------------------------------------------------------------------------------

def in_memory(n_bytes):
    return 2 * PHASE + (RANKS_PER_HOST + 1 + 2 * (RANKS_PER_HOST - 1)) * n_bytes / MEMORY


def latencies(n):
    return sum(2 * MESSAGE + (2 if 2**i < HOSTS_PER_SWITCH else 4) * LINK
               for i in range(math.ceil(math.log2(n))))


def fastest(n, gbits, n_bytes):
    """Seconds of an all_reduce: the latencies, and the longest of what the memory, the network and
    one core do with the bytes, as if these overlapped entirely."""
    return latencies(n) + max(in_memory(n_bytes), 2 * (n - 1) / n * n_bytes / (gbits * 1e9 / 8),
                              (n + 1) / n * n_bytes / CORE)


def bound(n, gbits, actions, slow):
    """Seconds of the slowest host: it computes and normalises, and averages beside that one bucket
    after the other."""
    now, averaged = 0, 0
    for kind, value in actions:
        if kind == 'compute':
            now += slow * value
        elif kind == 'bucket':
            averaged = max(now, averaged) + fastest(n, gbits, value)
        else:
            now += fastest(n, gbits, value * (32 if kind == 'moments' else 8))
    return max(now, averaged)


# --- simulation -----------------------------------------------------------------------------------

def read(log):
    """(hosts, gbits, step, case): seconds."""
    times = {}
    cases = {f'{slow:g}': case for case, slow in CASES.items()}
    if os.path.exists(log):
        with open(log) as file:
            for line in file:
                n, gbits, schedule, slow, seconds = line.split()
                step = list(STEPS)[int(schedule.removeprefix('step-'))]
                times[int(n), int(gbits), step, cases[slow]] = float(seconds)
    return times


def simulate(program, module, log, hosts=tuple(HOSTS)):
    program, module, log = map(os.path.abspath, (program, module, log))
    with tempfile.TemporaryDirectory() as folder:
        for i, actions in enumerate(STEPS.values()):
            with open(os.path.join(folder, f'step-{i}'), 'w') as file:
                file.writelines(f'{kind} {value}\n' for kind, value in actions)
        for i, n, gbits in ((i, n, gbits) for i in range(len(STEPS)) for n in hosts for gbits in GBITS):
            step, done = list(STEPS)[i], read(log)
            wanted = [f'step-{i}:{slow:g}' for case, slow in CASES.items()
                      if (n, gbits, step, case) not in done]
            if wanted:
                print(n, gbits, step, flush=True)
                with open(log, 'a') as file:
                    subprocess.run([program, module, str(n), str(gbits), *wanted], stdout=file,
                                   cwd=folder, check=True)


def above_bound(times):
    return {(n, gbits, step, case): time / bound(n, gbits, STEPS[step], CASES[case]) - 1
            for (n, gbits, step, case), time in times.items()}


def check(program, module, log):
    simulate(program, module, log, [2, 16])
    above = above_bound(read(log))
    if len(above) != 2 * len(GBITS) * len(STEPS) * len(CASES):
        sys.exit(f'growth_steps: only {len(above)} steps were simulated')
    print(f'{len(above)} steps take {min(above.values()):+.1%} to {max(above.values()):+.1%} '
          'beside the alpha-beta bound.')
    wrong = {key: value for key, value in above.items() if not -0.001 < value < MOST_CHECKED}
    for key, value in wrong.items():
        print(*key, f'{value:+.1%}', file=sys.stderr)
    if wrong:
        sys.exit(f'growth_steps: {len(wrong)} steps are below the bound, or more than '
                 f'{MOST_CHECKED:.0%} above it')


def draw(log, page):
    times = read(log)
    above = above_bound(times)
    header = ' | '.join(f'{n * RANKS_PER_HOST} ranks' for n in HOSTS)
    lines = [f'| step | Gbit/s | hosts | {header} |', '|---' * (len(HOSTS) + 3) + '|']
    for step in STEPS:
        for gbits in GBITS:
            for case in CASES:
                cells = [f'{times[key] * 1e3:.1f} {above[key]:+.0%}' if key in times else '-'
                         for key in ((n, gbits, step, case) for n in HOSTS)]
                lines.append(f'| {step} | {gbits} | {case} | ' + ' | '.join(cells) + ' |')
    put('steps', '\n'.join(lines), page)


if __name__ == '__main__':
    commands = {'simulate': (simulate, 3), 'draw': (draw, 2), 'check': (check, 3)}
    function, n_arguments = commands.get(sys.argv[1] if len(sys.argv) > 1 else '', (None, 0))
    if function is None or len(sys.argv) != 2 + n_arguments:
        sys.exit(__doc__)
    function(*sys.argv[2:])
