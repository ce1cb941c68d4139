#!/usr/bin/env python3
"""What performance.py says of records and goals; ./dev lint runs it."""
import contextlib
import io
import json
import os
import tempfile
import unittest
from pathlib import Path

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


def line(n_bytes, **medians):
    """Of one size, in the record; medians: of each library by placement."""
    return {'operation': 'all_reduce', 'bytes': n_bytes, 'placement': 'same L3', 'p50_us': medians}


def line_with(n_bytes):
    return line(n_bytes, lockstep={'same L3': 1}, mpich={'same L3': 2})


def candidate(name, **placements):
    """Of one size, in `compare.py --json`; placements: (us, ping-pong, foreign share) of each block."""
    return {'operation': 'all_reduce', 'bytes': 4, 'candidate': name, 'placements': {
        placement: {'p50_us': blocks[0][0], 'blocks': [
            {'p50_us': us, 'one_way_ns': one_way, 'foreign': foreign} for us, one_way, foreign in blocks]}
        for placement, blocks in placements.items()}}


class CheckTest(unittest.TestCase):
    def expect(self, line, word, part=''):
        self.assertEqual(line[:24].strip(), word, line)
        self.assertIn(part, line)

    def test_least_ratio_of_the_best_peer_counts(self):
        rows = [line(4, lockstep={'same L3': 1}, openmpi={'same L3': 3}, mpich={'same L3': 4}, minimum={'same L3': 0.1}),
                line(64, lockstep={'same L3': 1}, openmpi={'same L3': 9}, mpich={'same L3': 2.5})]
        lines = check(rows, {'must': 2, 'aim': 2.5})
        self.expect(lines[0], 'aim', '2.50x at 64 B')
        self.assertEqual(lines[1], '0 of 1 goals are missed')
        self.expect(check(rows, {'must': 2.6, 'aim': 3})[0], 'missed')
        floor = {'against': 'minimum', 'at_most': True, 'must': 11, 'aim': 9}
        self.expect(check(rows, floor)[0], 'must', '10.00x at 4 B (1 of 2 not seen)')

    def test_only_blocks_of_its_placement_count(self):
        rows = [line(4, lockstep={'other L3': 2, 'same L3': 1}, mpich={'other L3': 3, 'same L3': 9})]
        far = {'placement': 'other L3', 'must': 2, 'aim': 3}
        near = {'must': 2, 'aim': 3}
        self.expect(check(rows, far)[0], 'missed', '1.50x at 4 B')
        self.expect(check(rows, near)[0], 'aim', '9.00x at 4 B  ')
        rows[0]['p50_us']['openmpi'] = {'same L3': 5}  # which may have been the best when far
        lines = check(rows, far)
        self.expect(lines[0], 'not seen in this record')
        self.assertEqual(lines[1], '0 of 1 goals are missed')

    def test_where_its_placement_did_not_occur_another_stands_in_and_is_said(self):
        rows = [line(4, lockstep={'other L3': 2, 'same L3': 1}, mpich={'other L3': 3, 'same L3': 9}, openmpi={'other L3': 5})]
        self.expect(check(rows, {'must': 2, 'aim': 3})[0], 'missed', '1.50x at 4 B, other L3')
        rows[0]['p50_us']['minimum'] = {'other L3': 1.92}
        goal = {'must': 2, 'aim': 3, 'limit': 'minimum'}
        self.expect(check(rows, goal)[0], 'limit', '1.50x at 4 B, other L3; 4 B, other L3 at 96 % of the limit')
        for of_library in rows[0]['p50_us'].values():
            of_library['same core'] = 1
        rows[0]['p50_us']['minimum']['same core'] = 0.5
        self.expect(check(rows, goal)[0], 'missed', '1.00x at 4 B, same core')
        far = {**goal, 'placement': 'other L3'}
        del rows[0]['p50_us']['mpich']['other L3']
        self.expect(check(rows, far)[0], 'not seen in this record')

    def test_a_goal_is_reached_near_the_limit_too(self):
        goal = {'limit': 'minimum', 'must': 2, 'aim': 3}
        rows = [line(4, lockstep={'same L3': 1}, mpich={'same L3': 1.5}),
                line(64, lockstep={'same L3': 1}, mpich={'same L3': 2.1}, minimum={'same L3': 0.5})]
        self.expect(check(rows, goal)[0], 'missed', '1.50x at 4 B')
        rows[0]['p50_us'].update(minimum={'same L3': 0.96}, unchecked={'same L3': 0.5})
        self.expect(check(rows, goal)[0], 'must', '2.10x at 64 B; 4 B at 96 % of the limit, 0.960 us')
        lines = check(rows[:1], goal)
        self.expect(lines[0], 'limit', '1.50x at 4 B; 4 B at 96 % of the limit, 0.960 us')
        self.assertEqual(lines[1], '0 of 1 goals are missed')
        rows[0]['p50_us']['minimum']['same L3'] = 0.94
        self.expect(check(rows, goal)[0], 'missed', '1.50x at 4 B')

    def test_programs_of_their_own(self):
        rows = [{'name': 'composed x', 'ratio': 0.1}, {'name': 'step: not hidden', 'ratio': 0.02},
                {'name': 'other step: not hidden', 'ratio': 0.031}]
        share = {'rows': '.*step.*', 'at_most': True, 'unit': '%', 'must': 0.03, 'aim': 0}
        line = check(rows, share)[0]
        self.expect(line, 'missed', '3.1 % other step: not hidden')
        self.assertIn('must <= 3 %', line)
        self.expect(check(rows, {**share, 'rows': 'step.*'})[0], 'must')
        time = {'rows': 'a call', 'at_most': True, 'unit': 'us', 'must': 1.2, 'aim': 0.8}
        line = check([{'name': 'a call', 'ratio': 1.13}], time)[0]
        self.expect(line, 'must', '1.13 us a call')
        self.assertIn('must <= 1.2 us', line)

    def test_a_record_keeps_medians_one_line_for_each_size(self):
        rows = [candidate('lockstep', **{'same L3': [(1, 50, 0.02), (1, 60, 0)]}),
                candidate('openmpi, coll sm', **{'same L3': [(0.3 + 0.6, 70, 0.01)]}),
                {'operation': 'all_reduce', 'bytes': 4, 'candidate': 'mpich', 'error': 'failed'}]
        result = {'machine': {'cores': 2}, 'runs': {
            'small': {'command': 'bench/compare/compare.py', 'rows': performance.lines_of(rows)},
            'mpi': {'command': './dev bench mpi', 'rows': [{'name': 'openmpi 4 B', 'ratio': 1}]}}}
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, 'record.json')
            performance.save(result, path)
            with open(path) as file:
                text = file.read()
        self.assertEqual(json.loads(text), result)
        self.assertIn('{"operation": "all_reduce", "bytes": 4, "placement": "same L3", "p50_us": '
                      '{"lockstep": {"same L3": 1}, "openmpi, coll sm": {"same L3": 0.9}, "mpich": {}}, '
                      '"blocks": {"same L3": {"n": 3, "one_way_ns": [50, 60, 70], "foreign": 0.01}}}',
                      text)
        self.assertEqual(performance.by_size(result['runs']['small']),
                         {('all_reduce', 4): {'lockstep': 1, 'openmpi, coll sm': 0.9}})

    def test_a_record_has_no_figures_of_a_busy_machine(self):
        rows = [candidate('lockstep', **{'same L3': [(1, 50, 0.3)] * 9, 'other L3': [(2, 300, 0.0)]}),
                candidate('mpich', **{'same L3': [(4, 50, -0.01)], 'other L3': [(6, 300, 0.04)]})]
        line, = performance.lines_of(rows)
        self.assertEqual(line['p50_us'], {'lockstep': {'other L3': 2}, 'mpich': {'other L3': 6}})
        self.assertEqual(line['placement'], 'other L3')
        self.assertEqual(line['blocks']['same L3']['foreign'], 0.269)
        goal = {'must': 2, 'aim': 3}
        self.expect(check([line], goal)[0], 'aim', '3.00x at 4 B, other L3')
        self.expect(check([line], {**goal, 'placement': 'other L3'})[0], 'aim', '3.00x at 4 B  ')
        for row in rows:
            del row['placements']['other L3']
        line, = performance.lines_of(rows)
        self.assertIsNone(line['placement'])
        self.assertEqual(performance.by_size({'rows': [line]}), {('all_reduce', 4): {}})
        self.assertIn('| all_reduce 4 B | ', performance.table_of({'rows': [line, line_with(64)]}))

    def test_the_table_has_the_best_setting_and_the_limit(self):
        rows = [{**line(4, lockstep={'same L3': 1}, mpich={'same L3': 3}, minimum={'same L3': 0.8}), 'blocks': {}}]
        rows[0]['p50_us']['mpich, tuned'] = {'same L3': 2}
        self.assertEqual(performance.table_of({'rows': rows}).splitlines(), [
            '| | lockstep | mpich | minimum | best peer / lockstep | lockstep / minimum | placement |',
            '|---|---|---|---|---|---|---|',
            '| all_reduce 4 B | 1.000 | 2.000 | 0.800 | 2.00 | 1.25 | same L3 |'])

    def test_the_table_of_steps_has_ranks_beside_one_process(self):
        rates = {'lockstep, Python: net f32': 50.04, 'lockstep, Python: net f32, loss differs by': 9, 'Gloo: net f32': 20,
                 '1 process, Python: net f32': 100, 'lockstep, C++: net f32': 120, '1 process, C++: net f32': 100,
                 'lockstep, C++: other f32': 7}
        run = {'rows': [{'name': name, 'ratio': rate} for name, rate in rates.items()]}
        self.assertEqual(performance.steps_table(run).splitlines()[2:], [
            '| net f32, C++ | 100 | 120 | 1.20 | - |',
            '| net f32, Python | 100 | 50 | 0.50 | 20 |'])

    def test_each_ratio_of_the_overview_is_of_one_run(self):
        result = {'runs': {
            'small': {'rows': [
                {**line(4, lockstep={'same L3': 1, 'other L3': 5}, mpich={'same L3': 4, 'other L3': 6}, minimum={'same L3': 0.1}),
                 'placement': 'other L3'},
                line(64, **{'lockstep': {'same L3': 2}, 'lockstep threads': {'same L3': 1.5}, 'mpich, tuned': {'same L3': 3}}),
                {**line_with(0), 'operation': 'barrier'}]},
            'c10d': {'rows': [line(4, lockstep={'same L3': 2}, c10d={'same L3': 200})]}}}
        title, curves, table = performance.overview(result)
        self.assertEqual(title, 'all_reduce, 2 ranks, same L3')
        self.assertEqual(curves, {'lockstep': {('all_reduce', 4): 1, ('all_reduce', 64): 2},
                                  'lockstep threads': {('all_reduce', 64): 1.5},
                                  'best MPI': {('all_reduce', 4): 4, ('all_reduce', 64): 3}, 'Gloo': {('all_reduce', 4): 200}})
        self.assertEqual(table.splitlines(), ['| all_reduce, 2 ranks, same L3 | 4 B |', '|---|---|', '| lockstep, us | 1.000 |',
                                              '| best MPI, times as long | 4 |', '| Gloo, times as long | 100 |'])
        del result['runs']['c10d']
        self.assertEqual(performance.overview(result)[2].splitlines()[2:],
                         ['| lockstep, us | 1.000 | 2.000 |', '| best MPI, times as long | 4 | 1.5 |'])
        self.assertEqual(performance.overview({'runs': {}})[1], {})

    def test_a_table_goes_to_the_page_that_has_its_marks(self):
        with tempfile.TemporaryDirectory() as folder:
            pages = [os.path.join(folder, name) for name in ('a.md', 'b.md')]
            for page, name in zip(pages, ('first', 'second'), strict=True):
                with open(page, 'w') as file:
                    file.write(f'text\n<!-- {name} -->\nold\n<!-- end of {name} -->\nmore\n')
            performance.put('second', 'new', *pages)
            with self.assertRaisesRegex(SystemExit, 'no marks for third in .*a.md, .*b.md'):
                performance.put('third', 'new', *pages)
            texts = [Path(page).read_text() for page in pages]
        self.assertEqual(texts, ['text\n<!-- first -->\nold\n<!-- end of first -->\nmore\n',
                                 'text\n<!-- second -->\nnew\n<!-- end of second -->\nmore\n'])

    def test_the_pages_have_the_figures_of_the_newest_record(self):
        bench = Path(performance.BENCH).resolve()
        records = {path: json.loads(path.read_text()) for path in bench.glob('results/*.json')}
        newest = max(records, key=lambda path: max(run['date'] for run in records[path]['runs'].values()))
        texts = [(bench.parent / page).read_text() for page in ('docs/performance.md', 'bench/README.md')]
        for name, block in performance.blocks_of(records[newest], newest).items():
            marked = f'<!-- {name} -->\n{block}\n<!-- end of {name} -->'
            self.assertEqual(sum(marked in text for text in texts), 1, f'{name}: draw the pages from {newest}')

    def test_peers_that_are_built(self):
        with tempfile.TemporaryDirectory() as folder:
            lockstep = os.path.join(folder, 'src', 'cli', 'lockstep')
            os.makedirs(os.path.join(folder, 'bench'))

            def built(*names):
                for name in names:
                    open(os.path.join(folder, 'bench', f'lockstep-peer-{name}'), 'w').close()
                return performance.with_wheels(
                    ['--threads', '--peer', 'mpich', '--peer', 'intelmpi', '--min', '4'], lockstep)

            self.assertEqual(built(), ['--threads', '--peer', 'mpich', '--min', '4'])
            self.assertEqual(built('mpich-wheel', 'intelmpi'),
                             ['--threads', '--peer', 'mpich', '--peer', 'mpich-wheel', '--peer', 'intelmpi',
                              '--min', '4'])

    def test_every_goal_of_the_repository_is_judged(self):
        with open(GOALS) as file:
            n_goals = len(json.load(file))
        lines = check([], GOALS)
        self.assertEqual(len(lines), n_goals + 1)
        for line in lines[:-1]:
            self.expect(line, 'not measured')


if __name__ == '__main__':
    unittest.main()
