#!/usr/bin/env python3
"""The counting behind docs/scaling.md. ./dev bench growth calls it.

one_host PROGRAM PAGE       what a call costs on one host by its number of ranks, counted by valgrind
messages PROGRAM PAGE       messages and bytes of a call by the number of hosts
simulate PROGRAM MODULE LOG what all_reduce takes on clusters that SimGrid simulates; what LOG has
                            of this program already is kept
draw LOG PAGE               a table of that
check PROGRAM MODULE LOG    16 and 64 hosts only; fails where a call takes too long
"""
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
               'LOCKSTEP_TUNE': 'inline=248,chunk=65536'}


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
        put(name, '\n'.join([f'| of one rank, by ranks |{header}', '|---|' + '---|' * len(RANKS), *rows]), page)


def messages(program, page):
    """Of the mpi engine, and with four ranks per host."""
    for mode, hosts in (('mpi', [2, 4, 8, 16, 64, 256, 1024]), ('hierarchical', [2, 4, 8, 16])):
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
        put(f'host_messages_{mode}', '\n'.join(lines), page)


def put(name, text, *pages):
    """Between the marks of that name, which one of the pages has."""
    start, end = f'<!-- {name} -->\n', f'<!-- end of {name} -->'
    for page in pages:
        with open(page) as file:
            old = file.read()
        if start in old and end in old:
            with open(page, 'w') as file:
                file.write(old[:old.index(start) + len(start)] + text + '\n' + old[old.index(end):])
            return
    sys.exit(f"no marks for {name} in {', '.join(pages)}")


# --- hosts: what hosts.cpp simulates ---------------------------------------------------------------

SIZES = [4, 1 << 10, 64 << 10, 16 << 20]
HOSTS = [16, 64, 256, 1024]
GBITS = [25, 400]
MOST_SECONDS, MOST_KIB = 600, 8 << 20  # of one simulation
# What ./dev bench growth --hosts --check accepts: hosts, Gbit/s, bytes: microseconds between hosts.
MOST = {(16, 25, 4): 10, (16, 25, 1 << 10): 17, (16, 25, 64 << 10): 80, (16, 25, 16 << 20): 12500,
        (64, 25, 4): 14.5, (64, 25, 1 << 10): 24, (64, 25, 64 << 10): 140}


def simulate(program, module, log, hosts=HOSTS):
    """Seconds of an all_reduce; a million messages at once, of long data between 1,024, are left out."""
    done = set(read(log)) if os.path.exists(log) else set()
    for n, gbits in ((n, gbits) for n in hosts for gbits in GBITS):
        sizes = [size for size in (SIZES if n <= 256 else SIZES[:3]) if (n, gbits, size) not in done]
        if not sizes:
            continue
        command = [program, module, str(n), str(gbits), *map(str, sizes)]
        print(' '.join(command[2:]), flush=True)
        try:
            ended = subprocess.run(['sh', '-c', f'ulimit -v {MOST_KIB}; exec "$@"', 'sh', *command],
                                   stdout=subprocess.PIPE, text=True, timeout=MOST_SECONDS)
        except subprocess.TimeoutExpired:
            print(f'left out: more than {MOST_SECONDS} s', flush=True)
            continue
        if ended.returncode != 0:
            print(f'left out: exit code {ended.returncode}', flush=True)
        with open(log, 'a') as file:
            file.write(ended.stdout)


def read(log):
    """(hosts, gbits, bytes): seconds of the call, and between hosts."""
    times = {}
    with open(log) as file:
        for line in file:
            n, gbits, n_bytes, whole, between = line.split()
            times[int(n), int(gbits), int(n_bytes)] = float(whole), float(between)
    return times


def check(program, module, log):
    simulate(program, module, log, HOSTS[:2])
    times = read(log)
    wrong = 0
    for key, most in MOST.items():
        found = times[key][1] * 1e6
        print(*key, f'{found:.1f} us between hosts, {most} at most')
        wrong += found > most
    if wrong:
        sys.exit(f'growth: {wrong} simulated calls take too long')


def microseconds(seconds):
    us = seconds * 1e6
    return f'{us:.1f}' if us < 1000 else f'{us:.0f}'


def draw(log, page):
    times = read(log)
    lines = ['| all_reduce | Gbit/s | ' + ' | '.join(f'{n} hosts' for n in HOSTS) + ' | inside hosts |',
             '|---' * (len(HOSTS) + 3) + '|']
    for n_bytes in SIZES:
        for gbits in GBITS:
            found = [times.get((n, gbits, n_bytes)) for n in HOSTS]
            cells = [microseconds(time[1]) if time else '-' for time in found]
            inside = min(whole - between for whole, between in filter(None, found))
            lines.append(f'| {size(n_bytes)} | {gbits} | ' + ' | '.join(cells) +
                         f' | {microseconds(inside)} |')
    put('hosts', '\n'.join(lines), page)


if __name__ == '__main__':
    commands = {'one_host': (one_host, 2), 'messages': (messages, 2),
                'simulate': (simulate, 3), 'draw': (draw, 2),
                'check': (check, 3)}
    function, n_arguments = commands.get(sys.argv[1] if len(sys.argv) > 1 else '', (None, 0))
    if function is None or len(sys.argv) != 2 + n_arguments:
        sys.exit(__doc__)
    function(*sys.argv[2:])
