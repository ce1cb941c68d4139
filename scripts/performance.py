#!/usr/bin/env python3
"""The comparison behind docs/performance.md. ./dev bench calls it.

measure LOCKSTEP OUT.json [RUN...]  runs `lockstep bench` beside its peers, some 10 minutes; with
                            names only those, and keeps the others of OUT.json. Peers of
                            `./dev setup peers` take part where they are built
draw OUT.json PAGE          pictures beside the page, and the tables between its marks
check OUT.json GOALS.json   which goals these figures reach; exit code 0 either way
diff A.json B.json          medians of B over those of A
"""
import datetime
import glob
import json
import os
import platform
import re
import subprocess
import sys
import tempfile

MPI = ['--peer', 'openmpi', '--peer', 'mpich']
RUNS = {
    'small': ['--threads', *MPI, '--verb', 'barrier', 'all_reduce', '--min', '4', '--max', '1KiB'],
    'medium': ['--threads', *MPI, '--min', '4KiB', '--max', '1MiB'],
    'large': [*MPI, '--min', '4MiB', '--max', '64MiB'],
    'allocated': ['--shared', '--mode', 'touch', *MPI, '--min', '16KiB', '--max', '64MiB'],
    # MPICH spins where ranks share a core: some 10 ms a call.
    'crowded_4': ['-n', '4', '--peer', 'openmpi', '--verb', 'barrier', 'all_reduce', '--min', '64',
                  '--max', '1MiB'],
    'crowded_8': ['-n', '8', '--peer', 'openmpi', '--verb', 'barrier', 'all_reduce', '--min', '64',
                  '--max', '1MiB'],
    'c10d': ['--peer', 'c10d', '--verb', 'barrier', 'all_reduce', '--min', '4', '--max', '64MiB',
             '--factor', '16'],
}
TITLES = {
    'small': '2 ranks on 2 cores, small messages',
    'medium': '2 ranks on 2 cores',
    'large': '2 ranks on 2 cores, large messages',
    'allocated': '2 ranks on 2 cores, ours in `allocate`d buffers, touched before each call',
    'crowded_4': '4 ranks on 2 cores',
    'crowded_8': '8 ranks on 2 cores',
    'c10d': '2 ranks on 2 cores, c10d',
}


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
        package, _, version = os.path.basename(stamp).partition('-')
        found[package + ' wheel'] = version
    return found


def with_wheels(arguments, lockstep):
    """The newer release of each peer behind it, where it is built."""
    built = os.path.join(os.path.dirname(lockstep), '..', '..', 'bench')
    words = []
    for word in arguments:
        words.append(word)
        if len(words) > 1 and words[-2] == '--peer':
            if os.path.exists(os.path.join(built, f'lockstep-peer-{word}-wheel')):
                words += ['--peer', f'{word}-wheel']
    return words


def measure(lockstep, out, *names):
    result = {'machine': machine(), 'runs': {}}
    if names and os.path.exists(out):
        kept = json.load(open(out))
        if kept['machine'] != result['machine']:
            sys.exit(f"{out} is of another machine, {kept['machine']}: measure into another file")
        result['runs'] = kept['runs']
    for name, arguments in RUNS.items():
        if names and name not in names:
            continue
        arguments = with_wheels(arguments, lockstep)
        with tempfile.NamedTemporaryFile(suffix='.json') as file:
            print('lockstep bench', *arguments, flush=True)
            ended = subprocess.run([lockstep, 'bench', *arguments, '--json', file.name],
                                   stderr=subprocess.PIPE, text=True)
            if ended.returncode != 0:
                print(f'left out: {ended.stderr.strip()}', flush=True)
                continue
            figures = json.load(open(file.name))
        result['runs'][name] = {'command': ' '.join(['lockstep bench', *arguments]),
                                'date': datetime.date.today().isoformat(),
                                'revision': revision(), 'peers': versions(), **figures}
    if not result['runs']:
        sys.exit('no run succeeded')
    with open(out, 'w') as file:
        json.dump(result, file, indent=1)
        file.write('\n')


def by_size(run):
    sizes = {}
    for row in run['rows']:
        if 'p50_us' in row:
            sizes.setdefault((row['verb'], row['bytes']), {})[row['entrant']] = row
    return sizes


def best_peer(rows):
    peers = [row['p50_us'] for row in rows.values() if row['family'] != 'lockstep']
    return min(peers) if peers else None


def bytes_text(n):
    for shift, unit in ((20, 'MiB'), (10, 'KiB')):
        if n >= 1 << shift:
            return f'{n >> shift} {unit}'
    return f'{n} B'


def time_text(us):
    return f'{us:.3f}' if us < 10 else f'{us:.1f}' if us < 1000 else f'{us:.0f}'


def columns(run):
    """name -> size -> median. Ours, and of each peer, at each size, its best settings."""
    table = {}
    for key, rows in by_size(run).items():
        for row in rows.values():
            name = row['entrant'] if row['family'] == 'lockstep' else row['family']
            sizes = table.setdefault(name, {})
            sizes[key] = min(row['p50_us'], sizes.get(key, row['p50_us']))
    return table


def table_of(run):
    table = columns(run)
    lines = ['| | ' + ' | '.join(table) + ' | best peer / lockstep | placement |',
             '|---' * (len(table) + 3) + '|']
    for key, rows in by_size(run).items():
        verb, n_bytes = key
        ours, peer = table['lockstep'].get(key), best_peer(rows)
        cells = [time_text(sizes[key]) if key in sizes else '-' for sizes in table.values()]
        ratio = f"{peer / ours:.2f}" if ours and peer else '-'
        name = verb if verb == 'barrier' else f'{verb} {bytes_text(n_bytes)}'
        placement = next(iter(rows.values()))['placement']
        lines.append(f'| {name} | ' + ' | '.join(cells) + f' | {ratio} | {placement} |')
    return '\n'.join(lines)


def picture_of(run, title, path):
    """Latencies over sizes, by gnuplot."""
    script = ["set terminal svg size 820,420 background rgb 'white' font 'sans-serif,12' noenhanced",
              f'set output "{path}"', 'set logscale x 2', 'set logscale y', 'set grid',
              "set ylabel 'median of a call, microseconds'", "set xlabel 'all_reduce, bytes'",
              "set format x '%.0b %BB'", 'set key outside right',
              'set title "' + title.replace('`', '') + '" noenhanced']
    plots, data = [], []
    for i, (name, sizes) in enumerate(columns(run).items()):
        width = 3 if name.startswith('lockstep') else 1
        plots.append(f"'-' with linespoints lw {width} lt {i + 1} title \"{name}\" noenhanced")
        data += [f'{n} {us}' for (verb, n), us in sizes.items() if verb == 'all_reduce']
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


def draw(result_path, page):
    result = json.load(open(result_path))
    text = open(page).read()
    images = os.path.join(os.path.dirname(page), 'images')
    blocks = {'machine': '{cpu}, {cores} cores, {memory_gib} GiB, Linux {kernel}; '.format(
        **result['machine']) + when(result) + '.\n\nPeers: ' + peers_text(result) + '.'}
    for name, run in result['runs'].items():
        blocks[name] = (f"### {TITLES[name]}\n\n    {run['command']}\n\n{table_of(run)}\n\n"
                        f"![{name}](images/performance_{name}.svg)")
        picture_of(run, TITLES[name], os.path.join(images, f'performance_{name}.svg'))
    goals = os.path.join(os.path.dirname(page), '..', 'bench', 'goals.json')
    blocks['goals'] = '\n'.join(['| goal | must | aim | here | |', '|---|---|---|---|---|'] + [
        f"| {g['goal']} | {g['must']}x | {g['aim']}x | {reached_text(value, at)} | {verdict(g, value)} |"
        for g, value, at in judge(result, json.load(open(goals)))])
    for name, block in blocks.items():
        begin, end = f'<!-- {name} -->', f'<!-- end of {name} -->'
        pattern = re.compile(re.escape(begin) + '.*?' + re.escape(end), re.S)
        if not pattern.search(text):
            sys.exit(f'{page} has no {begin} ... {end}')
        text = pattern.sub(lambda _: f'{begin}\n{block}\n{end}', text)
    with open(page, 'w') as file:
        file.write(text)


def judge(result, goals):
    """(goal, the least ratio over its sizes, where that is) of each goal; None without figures."""
    for goal in goals:
        least, at = None, None
        for (verb, n_bytes), rows in by_size(result['runs'].get(goal['run'], {'rows': []})).items():
            if verb != goal.get('verb', 'all_reduce'):
                continue
            if verb != 'barrier' and not goal['from'] <= n_bytes <= goal['to']:
                continue
            ours = rows.get('lockstep')
            if goal.get('against') == 'threads':
                ours, other = rows.get('lockstep threads'), ours and ours['p50_us']
            else:
                other = best_peer(rows)
            if ours and other and (least is None or other / ours['p50_us'] < least):
                least, at = other / ours['p50_us'], n_bytes
        yield goal, least, at


def reached_text(value, at):
    return '-' if value is None else f'{value:.2f}x at {bytes_text(at)}'


def verdict(goal, value):
    if value is None:
        return 'not measured'
    return 'aim' if value >= goal['aim'] else 'must' if value >= goal['must'] else '**short**'


def check(result_path, goals_path):
    n_short = 0
    for goal, value, at in judge(json.load(open(result_path)), json.load(open(goals_path))):
        word = verdict(goal, value).strip('*')
        n_short += word == 'short'
        print(f"{word:<13} {goal['goal']:<48} {reached_text(value, at):<20} "
              f"must {goal['must']}x, aim {goal['aim']}x")
    print(f'{n_short} goals fall short')


def diff(path_a, path_b):
    a, b = json.load(open(path_a)), json.load(open(path_b))
    for side, result in (('A', a), ('B', b)):
        print(f"{side}: {result['machine']['cpu']}, {when(result)}")
    for name in a['runs']:
        if name not in b['runs']:
            continue
        print(f'\n{name}')
        sizes_b = by_size(b['runs'][name])
        for key, rows in by_size(a['runs'][name]).items():
            for entrant, row in rows.items():
                other = sizes_b.get(key, {}).get(entrant)
                if not other:
                    continue
                moved = '' if row['placement'] == other['placement'] else '  placements differ'
                print(f"{key[0]:<12}{bytes_text(key[1]):>9} {entrant:<28}"
                      f"{time_text(row['p50_us']):>10}{time_text(other['p50_us']):>10}"
                      f"{other['p50_us'] / row['p50_us']:>7.2f}{moved}")


if __name__ == '__main__':
    verbs = {'measure': measure, 'draw': draw, 'check': check, 'diff': diff}
    n_arguments = len(sys.argv) - 2
    if n_arguments < 2 or sys.argv[1] not in verbs or (n_arguments > 2 and sys.argv[1] != 'measure'):
        sys.exit(__doc__)
    verbs[sys.argv[1]](*sys.argv[2:])
