#!/usr/bin/env python3
"""The counting behind docs/growth.md. ./dev bench growth calls it.

one_host PROGRAM PAGE       what a call costs on one host by its number of ranks, counted by valgrind
messages PROGRAM PAGE       messages and bytes of a call by the number of hosts
simulate PROGRAM MODULE LOG what all_reduce takes on clusters that SimGrid simulates; what LOG has
                            of this program already is kept
draw LOG PAGE               tables of that beside the alpha-beta model, and a picture beside the page
check PROGRAM MODULE LOG    the smallest of these clusters only; fails where the model says otherwise
"""
import math
import os
import re
import subprocess
import sys
import tempfile

RANKS = [2, 4, 8, 16, 32, 64]
# operation, bytes of a rank's result, calls beyond the first
COUNTED = [('barrier', 0, 50), ('all_reduce', 64, 50), ('all_reduce', 64 << 10, 4),
           ('all_reduce', 4 << 20, 1), ('broadcast', 64, 50), ('broadcast', 64 << 10, 4),
           ('all_gather', 64, 50), ('all_gather', 64 << 10, 4)]
TYPE_BYTES = {'I1': 1, 'I8': 1, 'I16': 2, 'I32': 4, 'I64': 8, 'I128': 16, 'F32': 4, 'F64': 8,
              'V128': 16, 'V256': 32}
# One core, so that ranks exceed cores from two on. glibc's memcpy by vector instructions: valgrind
# counts each byte of `rep movsb` as an instruction. It shows programs a CPU of its own, with less
# cache than those we measured: their chunks.
VALGRIND = ['taskset', '-c', str(min(os.sched_getaffinity(0))), 'valgrind', '--fair-sched=yes']
ENVIRONMENT = {**os.environ, 'GLIBC_TUNABLES': 'glibc.cpu.x86_rep_movsb_threshold=1000000000',
               'LOCKSTEP_TUNE': 'chunk=65536'}


def size(n_bytes):
    for unit, factor in (('MiB', 1 << 20), ('KiB', 1 << 10)):
        if n_bytes >= factor:
            return f'{n_bytes // factor} {unit}'
    return f'{n_bytes} B'


def number(value):
    value = float(f'{value:.3g}')  # 999.6 is 1.00 k
    for unit, factor in ((' M', 1e6), (' k', 1e3)):
        if value >= factor:
            return f'{value / factor:.{max(0, 2 - len(str(int(value / factor))) + 1)}f}{unit}'
    return f'{value:.0f}'


def run(tool, *program):
    ended = subprocess.run([*VALGRIND, *tool, *program], env=ENVIRONMENT, stderr=subprocess.PIPE,
                           text=True)
    if ended.returncode != 0:
        sys.exit(f"{' '.join(program)} under {tool[0]}: {ended.stderr.strip()}")
    return ended.stderr


def count(*program):
    """Instructions, messages, and bytes that instructions load and store, of all ranks."""
    with tempfile.NamedTemporaryFile(suffix='.callgrind') as file:
        run(['--tool=callgrind', f'--callgrind-out-file={file.name}'], *program)
        text = file.read().decode()
    instructions = int(re.search(r'^(?:summary|totals): (\d+)', text, re.M).group(1))
    turn = re.search(r'\((\d+)\) lockstep::shared::Channel::turn\(', text).group(1)
    messages = sum(map(int, re.findall(rf'^cfn=\({turn}\).*\ncalls=(\d+)', text, re.M)))
    table = run(['--tool=lackey', '--basic-counts=no', '--detailed-counts=yes'], *program)
    moved = 0
    for name, loads, stores in re.findall(r'==\s+([IFV]\d+)\s+([\d,]+)\s+([\d,]+)', table):
        moved += TYPE_BYTES.get(name, 0) * (int(loads.replace(',', '')) +
                                            int(stores.replace(',', '')))
    return instructions, messages, moved


def one_host(program, page):
    header = ''.join(f' {n} |' for n in RANKS)
    tables = {'messages': [], 'bytes': [], 'instructions': []}
    for operation, n_bytes, n_calls in COUNTED:
        rows = {name: [] for name in tables}
        for n in RANKS:
            few = count(program, str(n), operation, str(n_bytes), '1')
            many = count(program, str(n), operation, str(n_bytes), str(1 + n_calls))
            each = [(b - a) / n_calls / n for a, b in zip(few, many, strict=True)]
            rows['instructions'].append(number(each[0]))
            rows['messages'].append(f'{each[1]:g}')
            rows['bytes'].append(number(each[2]))
            print(operation, n_bytes, n, *(f'{value:.6g}' for value in each), flush=True)
        for name, cells in rows.items():
            tables[name].append(f"| {operation}{' ' + size(n_bytes) if n_bytes else ''} | " +
                                ' | '.join(cells) + ' |')
    for name, rows in tables.items():
        put(page, name, '\n'.join([f'| of one rank, by ranks |{header}', '|---|' + '---|' * len(RANKS),
                                   *rows]))


def messages(program, page):
    """Of the mpi engine, of one whose ranks all send to all (too many messages at 1,024), and with
    four ranks per host."""
    for mode, hosts in (('rounds', [2, 4, 8, 16, 64, 256, 1024]), ('direct', [16, 64, 256]),
                        ('flat', [2, 4, 8, 16]), ('levels', [2, 4, 8, 16])):
        ended = subprocess.run([program, mode, *map(str, hosts)], stdout=subprocess.PIPE, text=True,
                               check=True)
        lines = ['| of one host, by hosts |' + ''.join(f' {n} |' for n in hosts),
                 '|---' * (len(hosts) + 1) + '|']
        for line in ended.stdout.splitlines():
            operation, n_bytes, *counts = line.split()
            name = (operation if operation == 'barrier' else 'statistics of 64 channels'
                    if operation == 'statistics' else f'{operation} {size(int(n_bytes))}')
            cells = ''.join(f' {m}, {number(int(b))}B |' for m, b in zip(counts[::2], counts[1::2], strict=True))
            lines.append(f'| {name} |{cells}')
        put(page, f'host_messages_{mode}', '\n'.join(lines))


def put(page, name, text):
    """Between the page's marks of that name."""
    with open(page) as file:
        old = file.read()
    start, end = f'<!-- {name} -->\n', f'<!-- end of {name} -->'
    if start not in old or end not in old:
        sys.exit(f'{page} has no marks for {name}')
    with open(page, 'w') as file:
        file.write(old[:old.index(start) + len(start)] + text + '\n' + old[old.index(end):])


# --- hosts: what hosts.cpp simulates, and the alpha-beta model with its constants -----------------

SIZES = [4, 64 << 10, 16 << 20, 256 << 20]
HOSTS = [16, 64, 256, 1024]
GBITS = [25, 400]
ALGORITHMS = ['direct', 'doubling', 'halving', 'ring']
LINK, MESSAGE, CORE = 0.5e-6, 0.25e-6, 10e9  # seconds, seconds, bytes/s
HOSTS_PER_SWITCH = 16
FIRST, RIDING, FLAT = 128, 64, 16 << 10  # bytes, of message_engine.cpp and collectives.cpp
MOST_DIRECT, HEAD = 8, 80  # ranks, bytes, of message_channel.hpp and rounds.cpp
MOST_SECONDS, MOST_KIB = 600, 8 << 20    # of one simulation
MOST_ERROR = 0.05                        # of the model


def simulations(hosts):
    for n in hosts:
        for gbits in GBITS:
            for algorithm in ALGORITHMS:
                # A million messages at once, or two million one after the other, take too long.
                few = n <= 256 or algorithm in ('doubling', 'halving')
                sizes = SIZES if few else SIZES[:2] if algorithm == 'direct' else []
                if sizes:
                    yield n, gbits, algorithm, sizes
    yield 16, 25, 'flat', SIZES


def simulate(program, module, log, hosts=HOSTS):
    done = set(read(log)) if os.path.exists(log) else set()
    for n, gbits, algorithm, sizes in simulations(hosts):
        if all((n, gbits, algorithm, size) in done for size in sizes):
            continue
        command = [program, module, str(n), str(gbits), algorithm, *map(str, sizes)]
        print(' '.join(command[2:]), flush=True)
        try:
            ended = subprocess.run(['sh', '-c', f'ulimit -v {MOST_KIB}; exec "$@"', 'sh', *command],
                                   stdout=subprocess.PIPE, text=True, timeout=MOST_SECONDS)
        except subprocess.TimeoutExpired:
            print(f'left out: more than {MOST_SECONDS} s', flush=True)
            continue
        if ended.returncode != 0:
            print(f'left out: exit code {ended.returncode}', flush=True)
            continue
        with open(log, 'a') as file:
            file.write(ended.stdout)


def read(log):
    """(hosts, gbits, algorithm, bytes): seconds of the call, and between hosts."""
    times = {}
    with open(log) as file:
        for line in file:
            words = line.split()
            if len(words) == 6 and words[0] != '#':
                key = (int(words[0]), int(words[1]), words[2], int(words[3]))
                times[key] = float(words[4]), float(words[5])
    return times


def rounds(n, gbits, bytes_of):
    """Seconds until the last of n ranks has sent to the rank d ahead, for d = 1, 2, 4, ..."""
    def latency(r, distance):
        return (2 if r // HOSTS_PER_SWITCH == (r - distance) % n // HOSTS_PER_SWITCH else 4) * LINK

    ready = [0.0] * n
    distance = 1
    while distance < n:
        each = 2 * MESSAGE + bytes_of(distance) / (gbits * 1e9 / 8)
        ready = [max(ready[r], ready[r - distance]) + each + latency(r, distance) for r in range(n)]
        distance *= 2
    return max(ready)


def model_of_rounds(n, gbits, n_bytes):
    """None where the engine sends from each to each after it has compared calls."""
    slot = min(RIDING, max(8, 2**int(math.log2((8 << 10) / n))))
    compare = rounds(n, gbits, lambda d: HEAD + min(d, n - d) * slot)
    def all_gather(part):
        return rounds(n, gbits, lambda d: min(d, n - d) * part)
    if n_bytes <= slot:
        return compare, (n + 1) * n_bytes / CORE
    n_rounds = (n - 1).bit_length()  # microseconds, of collectives.cpp
    if n_bytes * (n - 0.5 * n_rounds - 1) * 0.32e-3 < 1.75 * n_rounds:
        return compare, all_gather(n_bytes) + (n + 1) * n_bytes / CORE
    if 2 * (1.75 * n_rounds - 0.5 * (n - 1)) + n_bytes * (0.5 * n_rounds - 1) * 0.32e-3 >= 0:
        return compare, None
    part = math.ceil(n_bytes / n)
    slices = rounds(n, gbits, lambda d: sum(1 for i in range(n) if i & d) * part)
    return compare, slices + (n + 1) * part / CORE + all_gather(part)


def model(n, gbits, algorithm, n_bytes):
    """Seconds between n hosts, of which one rank each takes part."""
    bandwidth = gbits * 1e9 / 8
    far = (4 if n > HOSTS_PER_SWITCH else 2) * LINK
    if algorithm == 'direct':  # of the mpi engine
        def exchange(each):
            return 2 * (n - 1) * MESSAGE + far + (n - 1) * each / bandwidth
        compare = exchange(FIRST)
        if n > MOST_DIRECT:
            compare, seconds = model_of_rounds(n, gbits, n_bytes)
            if seconds is not None:
                return compare + seconds
        elif n_bytes <= RIDING:
            return compare + (n + 1) * n_bytes / CORE
        elif n_bytes <= FLAT:
            return compare + exchange(n_bytes) + (n + 1) * n_bytes / CORE
        return compare + 2 * exchange(n_bytes / n) + (n + 1) * n_bytes / n / CORE
    if algorithm == 'ring':
        # Whoever sends to another switch takes longer, and all wait for their neighbours.
        step = 2 * MESSAGE + far + n_bytes / n / bandwidth
        return (n - 1) * (2 * step + 3 * n_bytes / n / CORE)
    seconds = 0
    for i in range(int(math.log2(n))):
        alpha = 2 * MESSAGE + (2 * LINK if 2**i < HOSTS_PER_SWITCH else far)
        if algorithm == 'doubling':
            seconds += alpha + n_bytes / bandwidth + 3 * n_bytes / CORE
        else:
            part = n_bytes / 2**(int(math.log2(n)) - i)
            seconds += 2 * (alpha + part / bandwidth) + 3 * part / CORE
    return seconds


def errors(times):
    return [times[n, gbits, name, n_bytes][1] / model(n, gbits, name, n_bytes) - 1
            for n, gbits, name, n_bytes in times if name in ALGORITHMS]


def beside_model(times):
    found = errors(times)
    return (f'{len(found)} simulated times are {min(found) * 100:+.1f} % to '
            f'{max(found) * 100:+.1f} % beside the model.')


def check(program, module, log):
    simulate(program, module, log, HOSTS[:1])
    times = read(log)
    n_expected = len(GBITS) * len(ALGORITHMS) * len(SIZES)
    if len(errors(times)) != n_expected:
        sys.exit(f'{len(errors(times))} of {n_expected} times were simulated')
    print(beside_model(times))
    if max(map(abs, errors(times))) > MOST_ERROR:
        sys.exit(f'growth: more than {MOST_ERROR:.0%} beside the model')


def microseconds(seconds):
    us = seconds * 1e6
    return f'{us:.1f}' if us < 1000 else f'{us:.0f}'


def draw(log, page):
    times = read(log)
    for gbits in GBITS:
        lines = ['| all_reduce | hosts | ' + ' | '.join(ALGORITHMS) + ' | inside hosts |',
                 '|---' * (len(ALGORITHMS) + 3) + '|']
        for n_bytes in SIZES:
            for n in HOSTS:
                cells = []
                best = min(model(n, gbits, name, n_bytes) for name in ALGORITHMS)
                for name in ALGORITHMS:
                    expected = model(n, gbits, name, n_bytes)
                    found = times.get((n, gbits, name, n_bytes))
                    cell = f'{microseconds(found[1])}' if found else '-'
                    cell += f' ({microseconds(expected)})'
                    cells.append(f'**{cell}**' if expected == best else cell)
                inside = [times[key][0] - times[key][1] for name in ALGORITHMS
                          if (key := (n, gbits, name, n_bytes)) in times]
                lines.append(f'| {size(n_bytes)} | {n} | ' + ' | '.join(cells) +
                             f" | {microseconds(min(inside)) if inside else '-'} |")
        put(page, f'hosts_{gbits}', '\n'.join(lines))
    put(page, 'model', beside_model(times))
    flat = [f"{size(n_bytes)} in {microseconds(times[16, 25, 'flat', n_bytes][0])} us (two levels: "
            f"{microseconds(times[16, 25, 'direct', n_bytes][0])})"
            for n_bytes in SIZES if (16, 25, 'flat', n_bytes) in times]
    put(page, 'flat', ', '.join(flat) or 'not simulated')
    put(page, 'wins', '\n'.join(wins()))
    picture(times, os.path.join(os.path.dirname(page), 'images', 'growth_hosts.svg'))


def wins():
    """Up to how many hosts which algorithm is the model's best."""
    lines = ['| all_reduce | 25 Gbit/s | 400 Gbit/s |', '|---|---|---|']
    for n_bytes in [4, 1 << 10, 64 << 10, 1 << 20, 16 << 20, 256 << 20]:
        cells = []
        for gbits in GBITS:
            ranges = []
            for n in [2**i for i in range(1, 11)]:
                best = min(ALGORITHMS, key=lambda name: model(n, gbits, name, n_bytes))
                if ranges and ranges[-1][0] == best:
                    ranges[-1][1] = n
                else:
                    ranges.append([best, n])
            cells.append(', '.join(f'{name} to {n}' for name, n in ranges))
        lines.append(f'| {size(n_bytes)} | ' + ' | '.join(cells) + ' |')
    return lines


def picture(times, path, gbits=25):
    script = ["set terminal svg size 900,640 background rgb 'white' font 'sans-serif,12' noenhanced",
              f'set output "{path}"', 'set logscale x 2', 'set logscale y', 'set grid',
              'set key top left', 'set xrange [12:1400]', "set format y '%.0s %cs'",
              'set xtics (16, 64, 256, 1024)',
              f"set multiplot layout 2,2 title 'all_reduce between hosts, {gbits} Gbit/s fat tree: "
              "by hosts; points simulated, lines by the alpha-beta model'"]
    for panel, n_bytes in enumerate(SIZES):
        plots, data = [], []
        for color, name in enumerate(ALGORITHMS):
            plots.append(f"'-' with lines lt {color + 1} lw {3 if name == 'direct' else 1} notitle")
            data += [f'{n} {model(n, gbits, name, n_bytes)}' for n in HOSTS] + ['e']
            title = {'direct': 'direct: the mpi engine'}.get(name, name)
            shown = f"title '{title}'" if panel == 2 else 'notitle'
            plots.append(f"'-' with points lt {color + 1} pt {color + 5} ps 1 {shown}")
            data += [f'{n} {times[n, gbits, name, n_bytes][1]}' for n in HOSTS
                     if (n, gbits, name, n_bytes) in times] + ['e']
        script += [f"set title '{size(n_bytes)}'", 'plot ' + ', '.join(plots), *data]
    script.append('unset multiplot')
    subprocess.run(['gnuplot'], input='\n'.join(script) + '\n', text=True, check=True)


if __name__ == '__main__':
    commands = {'one_host': (one_host, 2), 'messages': (messages, 2),
                'simulate': (simulate, 3), 'draw': (draw, 2),
                'check': (check, 3)}
    function, n_arguments = commands.get(sys.argv[1] if len(sys.argv) > 1 else '', (None, 0))
    if function is None or len(sys.argv) != 2 + n_arguments:
        sys.exit(__doc__)
    function(*sys.argv[2:])
