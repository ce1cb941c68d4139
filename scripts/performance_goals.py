"""Which goals of bench/goals.json the figures of a record reach: for performance.py."""
import glob
import json
import os
import re
from pathlib import Path

LIMITS = ['minimum', 'unchecked']  # candidates of bench/compare that are no peers
PLACEMENTS = ['same L3', 'same core', 'other L3']  # of the two cores, in the order in which they stand in for one another
AT_THE_LIMIT = 0.95  # of the limit's speed: then a goal is reached too


def library_of(candidate):
    """The library: 'lockstep' of 'lockstep threads', 'openmpi' of 'openmpi, coll sm'."""
    return re.split('[ ,]', candidate)[0]


def bytes_text(n):
    for shift, unit in ((20, 'MiB'), (10, 'KiB')):
        if n >= 1 << shift:
            return f'{n >> shift} {unit}'
    return f'{n} B'


def time_text(us):
    return f'{us:.3f}' if us < 10 else f'{us:.1f}' if us < 1000 else f'{us:.0f}'


def goals_table(result_path, bench):
    """Of this result, and of the records beside it."""
    goals = json.loads(Path(bench, 'goals.json').read_text())
    paths = [result_path] + [path for path in sorted(glob.glob(os.path.join(bench, 'results', '*.json')))
                             if not os.path.samefile(path, result_path)]
    names = [os.path.basename(path).removesuffix('.json') for path in paths]
    lines = ['| goal | must | aim | ' + ' | '.join(names) + ' | command |',
             '|---' * (4 + len(paths)) + '|']
    verdicts = [judge(json.loads(Path(path).read_text()), goals) for path in paths]
    for goal, *columns in zip(goals, *verdicts, strict=True):
        cells = [f'{text}, {word}' if text != '-' else word for _, text, word in columns]
        lines.append(f"| {goal['goal']} | {bound(goal, 'must')} | {bound(goal, 'aim')} | "
                     f"{' | '.join(cells)} | `./dev bench --only {','.join(runs_of(goal))}` |")
    return '\n'.join(lines)


def runs_of(goal):
    return goal['run'] if isinstance(goal['run'], list) else [goal['run']]


def times_of(goal, medians):
    """Of one size: the placement in which a goal is judged, and the times by candidate. That is the goal's own, else the
    nearest in which the machine was for all candidates; None and no times if there is none."""
    own = goal.get('placement', PLACEMENTS[0])
    for placement in PLACEMENTS[PLACEMENTS.index(own):]:
        times = {name: by_placement.get(placement) for name, by_placement in medians.items()}
        if times and all(times.values()):
            return placement, times
    return None, {}


def ratio_of(goal, times):
    against = goal.get('against')
    others = [us for name, us in times.items() if library_of(name) == against or
              against is None and library_of(name) not in ('lockstep', *LIMITS)]
    ours = times.get('lockstep')
    if against == 'threads':
        ours, others = times.get('lockstep threads'), [ours] if ours else []
    if not ours or not others:
        return None
    return ours / min(others) if goal.get('at_most') else min(others) / ours


def ratios_of(goal, run):
    """Where -> ratio."""
    if 'rows' in goal:
        return {row['name']: row['ratio'] for row in run['rows']
                if re.fullmatch(goal['rows'], row['name'])}
    return {where: ratio_of(goal, times) for where, times in sizes_of(goal, run)}


def sizes_of(goal, run):
    """(where, times by candidate) of each size of the goal. A placement that is not the goal's is said."""
    operation = goal.get('operation', 'all_reduce')
    for row in run['rows']:
        if row['operation'] != operation or operation != 'barrier' and not goal['from'] <= row['bytes'] <= goal['to']:
            continue
        placement, times = times_of(goal, row['p50_us'])
        where = '' if operation == 'barrier' else f"at {bytes_text(row['bytes'])}"
        other = placement if placement != goal.get('placement', PLACEMENTS[0]) else None
        yield ', '.join(filter(None, (where, other))), times


def limits_of(goal, run):
    """Where -> the limit's time over ours, and the limit's in us, where it was measured beside ours."""
    limits = {}
    for where, times in sizes_of(goal, run) if 'limit' in goal else []:
        if {'lockstep', goal['limit']} <= times.keys():
            limits[where] = times[goal['limit']] / times['lockstep'], times[goal['limit']]
    return limits


def value_text(goal, value, digits):
    if goal.get('unit') == '%':
        return f'{100 * value:{digits}} %'
    return f'{value:{digits}}' + (' us' if goal.get('unit') == 'us' else 'x')


def bound(goal, which):
    return ('<= ' if goal.get('at_most') else '') + value_text(goal, goal[which], 'g')


def judge(result, goals):
    """(goal, what was reached, the verdict) of each."""
    for goal in goals:
        found, limits = {}, {}
        for name in runs_of(goal):
            if name in result['runs']:
                found.update(ratios_of(goal, result['runs'][name]))
                limits.update(limits_of(goal, result['runs'][name]))
        seen = {where: ratio for where, ratio in found.items() if ratio is not None}
        if not seen:
            yield goal, '-', 'not seen in this record' if found else 'not measured'
            continue
        sign = -1 if goal.get('at_most') else 1
        at_limit = [where for where in seen if sign * seen[where] < sign * goal['must'] and
                    where in limits and limits[where][0] >= AT_THE_LIMIT]
        # The worst of the others.
        where = min([where for where in seen if where not in at_limit] or seen,
                    key=lambda where: sign * seen[where])
        text = f"{value_text(goal, seen[where], '.3g' if goal.get('unit') else '.2f')} {where}".strip()
        for size in at_limit:
            share, us = limits[size]
            text += f"; {size.removeprefix('at ')} at {100 * share:.0f} % of the limit, {time_text(us)} us"
        if len(seen) < len(found):
            text += f' ({len(found) - len(seen)} of {len(found)} not seen)'
        reached = [word for word in ('aim', 'must') if sign * seen[where] >= sign * goal[word]]
        yield goal, text, reached[0] if reached else 'limit' if where in at_limit else '**missed**'
