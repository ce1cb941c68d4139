#!/usr/bin/env python3
"""The counting behind docs/growth.md. ./dev bench growth calls it.

one_host PROGRAM PAGE       what a call costs on one host by its number of ranks, counted by valgrind
"""
import os
import re
import subprocess
import sys
import tempfile

RANKS = [2, 4, 8, 16, 32, 64]
# verb, bytes of a rank's result, calls beyond the first
COUNTED = [('barrier', 0, 50), ('all_reduce', 64, 50), ('all_reduce', 64 << 10, 4),
           ('all_reduce', 4 << 20, 1), ('broadcast', 64, 50), ('broadcast', 64 << 10, 4),
           ('all_gather', 64, 50), ('all_gather', 64 << 10, 4)]
TYPE_BYTES = {'I1': 1, 'I8': 1, 'I16': 2, 'I32': 4, 'I64': 8, 'I128': 16, 'F32': 4, 'F64': 8,
              'V128': 16, 'V256': 32}
# One core, so that ranks exceed cores from two on. glibc's memcpy by vector instructions: valgrind
# counts each byte of `rep movsb` as an instruction.
VALGRIND = ['taskset', '-c', str(min(os.sched_getaffinity(0))), 'valgrind', '--fair-sched=yes']
ENVIRONMENT = {**os.environ, 'GLIBC_TUNABLES': 'glibc.cpu.x86_rep_movsb_threshold=1000000000'}


def size(n_bytes):
    for unit, factor in (('MiB', 1 << 20), ('KiB', 1 << 10)):
        if n_bytes >= factor:
            return f'{n_bytes // factor} {unit}'
    return f'{n_bytes} B'


def number(value):
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
    for verb, n_bytes, n_calls in COUNTED:
        rows = {name: [] for name in tables}
        for n in RANKS:
            few = count(program, str(n), verb, str(n_bytes), '1')
            many = count(program, str(n), verb, str(n_bytes), str(1 + n_calls))
            each = [(b - a) / n_calls / n for a, b in zip(few, many)]
            rows['instructions'].append(number(each[0]))
            rows['messages'].append(f'{each[1]:g}')
            rows['bytes'].append(number(each[2]))
            print(verb, n_bytes, n, *(f'{value:.6g}' for value in each), flush=True)
        for name, cells in rows.items():
            tables[name].append(f"| {verb}{' ' + size(n_bytes) if n_bytes else ''} | " +
                                ' | '.join(cells) + ' |')
    for name, rows in tables.items():
        put(page, name, '\n'.join([f'| of one rank, by ranks |{header}', '|---|' + '---|' * len(RANKS),
                                   *rows]))


def put(page, name, text):
    """Between the page's marks of that name."""
    with open(page) as file:
        old = file.read()
    start, end = f'<!-- {name} -->\n', f'<!-- end of {name} -->'
    if start not in old or end not in old:
        sys.exit(f'{page} has no marks for {name}')
    with open(page, 'w') as file:
        file.write(old[:old.index(start) + len(start)] + text + '\n' + old[old.index(end):])


if __name__ == '__main__':
    verbs = {'one_host': one_host}
    if len(sys.argv) < 4 or sys.argv[1] not in verbs:
        sys.exit(__doc__)
    verbs[sys.argv[1]](*sys.argv[2:])
