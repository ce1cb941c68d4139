#!/usr/bin/env python3
"""What performance.py says of records and goals; ./dev lint runs it."""
import contextlib
import io
import json
import os
import tempfile
import unittest

import performance

GOALS = os.path.join(os.path.dirname(os.path.abspath(__file__)), '..', 'bench', 'goals.json')


def check(rows, goals):
    """The lines of `check`. goals: one goal, or the name of a file."""
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()) as out:
        record = os.path.join(folder, 'record.json')
        with open(record, 'w') as file:
            json.dump({'runs': {'small': {'rows': rows}}}, file)
        if isinstance(goals, dict):
            sizes = {} if 'rows' in goals else {'from': 4, 'to': 64}
            goals = [{'goal': 'the goal', 'run': 'small', **sizes, **goals}]
            path = os.path.join(folder, 'goals.json')
            with open(path, 'w') as file:
                json.dump(goals, file)
            goals = path
        performance.check(record, goals)
    return out.getvalue().splitlines()


def row(entrant, n_bytes, **medians):
    found = {'operation': 'all_reduce', 'bytes': n_bytes, 'entrant': entrant, 'family': entrant,
             'placements': {}}
    for placement, us in medians.items():
        found.update(placement=placement, p50_us=us)
        found['placements'][placement] = {'blocks': 5, 'p50_us': us}
    return found


class CheckTest(unittest.TestCase):
    def expect(self, line, word, part=''):
        self.assertEqual(line[:24].strip(), word, line)
        self.assertIn(part, line)

    def test_least_ratio_of_the_best_peer_counts(self):
        rows = [row('lockstep', 4, near=1), row('openmpi', 4, near=3), row('mpich', 4, near=4),
                row('floor', 4, near=0.1), row('lockstep', 64, near=1),
                row('openmpi', 64, near=9), row('mpich', 64, near=2.5)]
        lines = check(rows, {'must': 2, 'aim': 2.5})
        self.expect(lines[0], 'aim', '2.50x at 64 B')
        self.assertEqual(lines[1], '0 of 1 goals fall short')
        self.expect(check(rows, {'must': 2.6, 'aim': 3})[0], 'short')
        floor = {'against': 'floor', 'at_most': True, 'must': 11, 'aim': 9}
        self.expect(check(rows, floor)[0], 'must', '10.00x at 4 B (1 of 2 not seen)')

    def test_only_blocks_of_its_placement_count(self):
        rows = [row('lockstep', 4, far=2, near=1), row('mpich', 4, far=3, near=9)]
        far = {'placement': 'far', 'must': 2, 'aim': 3}
        near = {'must': 2, 'aim': 3}
        self.expect(check(rows, far)[0], 'short', '1.50x at 4 B')
        self.expect(check(rows, near)[0], 'aim', '9.00x at 4 B')
        rows.append(row('openmpi', 4, near=5))  # who may have been the best when far
        lines = check(rows, far)
        self.expect(lines[0], 'not seen in this record')
        self.assertEqual(lines[1], '0 of 1 goals fall short')
        # Whose blocks were all elsewhere than most has no figure of its own.
        rows[-1] = row('openmpi', 4, far=5)
        del rows[-1]['placement'], rows[-1]['p50_us']
        self.expect(check(rows, near)[0], 'not seen in this record')

    def test_programs_of_their_own(self):
        rows = [{'name': 'composed x', 'ratio': 0.1}, {'name': 'step: not hidden', 'ratio': 0.02},
                {'name': 'other step: not hidden', 'ratio': 0.031}]
        share = {'rows': '.*step.*', 'at_most': True, 'unit': '%', 'must': 0.03, 'aim': 0}
        line = check(rows, share)[0]
        self.expect(line, 'short', '3.1 % other step: not hidden')
        self.assertIn('must <= 3 %', line)
        self.expect(check(rows, {**share, 'rows': 'step.*'})[0], 'must')

    def test_every_goal_of_the_repository_is_judged(self):
        with open(GOALS) as file:
            n_goals = len(json.load(file))
        lines = check([], GOALS)
        self.assertEqual(len(lines), n_goals + 1)
        for line in lines[:-1]:
            self.expect(line, 'not measured')


if __name__ == '__main__':
    unittest.main()
