#!/usr/bin/env python3
"""Steps of training on clusters that SimGrid simulates, for docs/growth.md. ./dev bench growth calls it.

simulate PROGRAM MODULE LOG what steps take; what LOG has of this program already is kept
draw LOG PAGE               tables of that beside the alpha-beta bound, and a picture beside the page
check PROGRAM MODULE LOG    2 and 16 hosts only; fails where a step takes too long beside the bound
"""
import math
import os
import subprocess
import sys
import tempfile

from growth import CORE, HOSTS_PER_SWITCH, LINK, MESSAGE, model, put

HOSTS = [2, 16, 64, 256, 1024]
RANKS_PER_HOST = 8
GBITS = [25, 400]
ENGINES = ['direct', 'tree', 'halving', 'ring']
CASES = {'all alike': (1, 0), 'a slow host': (1.25, 0), 'a late rank': (1, 0.01)}  # times, seconds
PHASE, MEMORY = 1e-6, 200e9  # seconds, bytes/s, of steps.cpp
MOST_RING = 64               # hosts: 2 (N - 1) messages of each host, one after the other
MOST_SYNCHRONISED = 64       # hosts, but for one case: 106 exchanges in a step
MOST_ABOVE = 0.2             # of a step's time, beside the bound
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


def transformer(width=1024, n_tokens=1024):
    def linear(n_in, n_out):
        return n_in * n_out, [4 * n_in * n_out, 4 * n_out], 0
    norm = (0, [4 * width, 4 * width], 0)
    attention = (2 * n_tokens * width, [], 0)
    return [norm, linear(width, 3 * width), attention, linear(width, width), norm,
            linear(width, 4 * width), linear(4 * width, width)]


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
         'ResNet-50, SyncBatchNorm': step_of(resnet50(), 0.030, True),
         'transformer block': step_of(transformer(), 0.010, False)}
BY_LENGTH = [0, 2, 1]  # of their simulation


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


def modelled(engine):
    """The same of one algorithm, alone on the network: within hosts, then between them."""
    def seconds(n, gbits, n_bytes):
        if engine != 'tree':
            return in_memory(n_bytes) + model(n, gbits, engine, n_bytes)
        each = n_bytes / (gbits * 1e9 / 8)
        return in_memory(n_bytes) + 2 * latencies(n) + math.log2(n) * (2 * each + 3 * n_bytes / CORE)
    return seconds


def step_time(n, gbits, actions, slow=1, late=0, all_reduce=fastest):
    """Seconds of the slowest host: it computes and normalises, and averages beside that one bucket
    after the other. By default the bound."""
    now, averaged = late, 0
    for kind, value in actions:
        if kind == 'compute':
            now += slow * value
        elif kind == 'bucket':
            averaged = max(now, averaged) + all_reduce(n, gbits, value)
        else:
            now += all_reduce(n, gbits, value * (32 if kind == 'moments' else 8))
    return max(now, averaged)



# --- simulation -----------------------------------------------------------------------------------

def read(log):
    """(hosts, gbits, engine, step, case): seconds."""
    times = {}
    cases = {f'{slow:g} {late:g}': case for case, (slow, late) in CASES.items()}
    if os.path.exists(log):
        with open(log) as file:
            for line in file:
                n, gbits, engine, schedule, slow, late, seconds = line.split()
                step = list(STEPS)[int(schedule.removeprefix('step-'))]
                times[int(n), int(gbits), engine, step, cases[f'{slow} {late}']] = float(seconds)
    return times


def is_simulated(n, engine, step, case):
    """Not what takes the simulator hours."""
    is_synchronised = any(kind == 'moments' for kind, _ in STEPS[step])
    if engine == 'ring':
        return n <= MOST_RING and case == 'all alike'
    if is_synchronised and (engine != 'direct' or case != 'all alike'):
        return n <= MOST_SYNCHRONISED and (engine == 'direct' or case == 'all alike')
    return engine == 'direct' or case == 'all alike'


def simulate(program, module, log, hosts=tuple(HOSTS), engines=tuple(ENGINES)):
    program, module, log = map(os.path.abspath, (program, module, log))
    with tempfile.TemporaryDirectory() as folder:
        for i, actions in enumerate(STEPS.values()):
            with open(os.path.join(folder, f'step-{i}'), 'w') as file:
                file.writelines(f'{kind} {value}\n' for kind, value in actions)
        for i, n, gbits, engine in ((i, n, gbits, engine) for i in BY_LENGTH for n in hosts
                                    for gbits in GBITS for engine in engines):
            step, done = list(STEPS)[i], read(log)
            wanted = [f'step-{i}:{slow:g}:{late:g}' for case, (slow, late) in CASES.items()
                      if is_simulated(n, engine, step, case) and
                      (n, gbits, engine, step, case) not in done]
            if wanted:
                print(n, gbits, engine, step, flush=True)
                with open(log, 'a') as file:
                    subprocess.run([program, module, str(n), str(gbits), engine, *wanted],
                                   stdout=file, cwd=folder, check=True)


def check(program, module, log):
    simulate(program, module, log, [2, 16], ['direct'])
    times = read(log)
    if len(times) != 2 * len(GBITS) * len(STEPS) * len(CASES):
        sys.exit(f'growth_steps: only {len(times)} steps were simulated')
    above = {key: time / step_time(key[0], key[1], STEPS[key[3]], *CASES[key[4]]) - 1
             for key, time in times.items()}
    print(f'{len(above)} steps take {min(above.values()):+.1%} to {max(above.values()):+.1%} '
          'beside the alpha-beta bound.')
    wrong = {key: value for key, value in above.items() if not -0.001 < value < MOST_CHECKED}
    for key, value in wrong.items():
        print(*key, f'{value:+.1%}', file=sys.stderr)
    if wrong:
        sys.exit(f'growth_steps: {len(wrong)} steps are below the bound, or more than '
                 f'{MOST_CHECKED:.0%} above it')


# --- the page -------------------------------------------------------------------------------------

def draw(log, page):
    times = read(log)
    header = ' | '.join(f'{n * RANKS_PER_HOST} ranks' for n in HOSTS)
    lines = [f'| step | Gbit/s | hosts | {header} |', '|---' * (len(HOSTS) + 3) + '|']
    n_within = n_all = 0
    for step, actions in STEPS.items():
        for gbits in GBITS:
            for case, parameters in CASES.items():
                cells = []
                for n in HOSTS:
                    time = times.get((n, gbits, 'direct', step, case))
                    n_all += time is not None
                    text = '{:.1f}' if time else '({:.1f})'
                    time = time or step_time(n, gbits, actions, *parameters, modelled('direct'))
                    above = time / step_time(n, gbits, actions, *parameters) - 1
                    n_within += above <= MOST_ABOVE and '(' not in text
                    text = f'{text.format(time * 1e3)} {above:+.0%}'
                    cells.append(f'**{text}**' if above > MOST_ABOVE else text)
                lines.append(f'| {step} | {gbits} | {case} | ' + ' | '.join(cells) + ' |')
    put(page, 'steps', '\n'.join(lines))
    put(page, 'steps_within', f'{n_within} of {n_all} simulated steps are within '
        f'{MOST_ABOVE:.0%} of the bound.')
    lines = ['| step | Gbit/s | ranks | bound | ' + ' | '.join(ENGINES) + ' |',
             '|---' * (len(ENGINES) + 4) + '|']
    for step, actions in STEPS.items():
        for gbits in GBITS:
            for n in HOSTS:
                found = [times.get((n, gbits, engine, step, 'all alike')) for engine in ENGINES]
                best = min(filter(None, found), default=None)
                by_model = [step_time(n, gbits, actions, all_reduce=modelled(engine))
                            for engine in ENGINES]
                cells = [f'({m * 1e3:.1f})' if t is None else
                         f'**{t * 1e3:.1f}**' if t == best else f'{t * 1e3:.1f}'
                         for t, m in zip(found, by_model, strict=True)]
                lines.append(f'| {step} | {gbits} | {n * RANKS_PER_HOST} | '
                             f'{step_time(n, gbits, actions) * 1e3:.1f} | ' + ' | '.join(cells) + ' |')
    put(page, 'steps_beside', '\n'.join(lines))
    picture(times, os.path.join(os.path.dirname(page), 'images', 'growth_steps.svg'))


def picture(times, path):
    ranks = ', '.join(str(n * RANKS_PER_HOST) for n in HOSTS)
    script = ["set terminal svg size 1000,620 background rgb 'white' font 'sans-serif,12' noenhanced",
              f'set output "{path}"', 'set logscale x 2', 'set grid', 'set key bottom left',
              'set xrange [12:11000]', f'set xtics ({ranks}) font ",10"', 'set yrange [0:*]',
              "set multiplot layout 2,3 title 'A step of training, ms, by ranks (8 per host): points "
              "simulated, line the alpha-beta bound'"]
    for gbits in GBITS:
        for step, actions in STEPS.items():
            plots, data = ["'-' with lines lw 2 lc rgb 'black' notitle"], []
            data += [f'{n * RANKS_PER_HOST} {step_time(n, gbits, actions) * 1e3}' for n in HOSTS] + ['e']
            # The textbook tree is beyond the picture.
            for color, engine in enumerate(['direct', 'halving', 'ring']):
                title = {'direct': 'lockstep'}.get(engine, engine)
                shown = f"title '{title}'" if (gbits, step) == (25, 'ResNet-50') else 'notitle'
                plots.append(f"'-' with points lt {color + 1} pt {color + 5} ps 1 {shown}")
                data += [f'{n * RANKS_PER_HOST} {times[n, gbits, engine, step, "all alike"] * 1e3}'
                         for n in HOSTS if (n, gbits, engine, step, 'all alike') in times] + ['e']
            script += [f"set title '{step}, {gbits} Gbit/s'", 'plot ' + ', '.join(plots), *data]
    script.append('unset multiplot')
    subprocess.run(['gnuplot'], input='\n'.join(script) + '\n', text=True, check=True)


if __name__ == '__main__':
    commands = {'simulate': (simulate, 3), 'draw': (draw, 2), 'check': (check, 3)}
    function, n_arguments = commands.get(sys.argv[1] if len(sys.argv) > 1 else '', (None, 0))
    if function is None or len(sys.argv) != 2 + n_arguments:
        sys.exit(__doc__)
    function(*sys.argv[2:])
