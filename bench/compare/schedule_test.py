#!/usr/bin/env python3
"""Which blocks schedule.py gives to whom; ./dev lint runs it."""
import collections
import unittest

from schedule import Occurrences, Schedule


class ScheduleTest(unittest.TestCase):
    def take_blocks(self, schedule, times, placement_at):
        """Takes blocks as compare.py does; the machine's placement in turn t is placement_at(t).
        Candidate i takes times[i]. Returns blocks by candidate and placement."""
        n_blocks = collections.Counter()
        found = Occurrences()
        for turn in range(1000):
            placement = placement_at(turn)
            found.add(placement)
            if schedule.is_done(found):
                return n_blocks
            candidate = schedule.next(placement)
            if candidate is not None:
                schedule.add(candidate, placement, times[candidate])
                n_blocks[candidate, placement] += 1
        self.fail('not done after 1000 turns')

    def test_candidates_alternate(self):
        schedule = Schedule(['lockstep', 'openmpi', 'mpich'], n_blocks=2)
        for turn in range(6):
            candidate = schedule.next('same L3')
            self.assertEqual(candidate, turn % 3)
            schedule.add(candidate, 'same L3', 1)
        self.assertIsNone(schedule.next('same L3'))

    def test_each_has_enough_blocks_in_every_placement_that_occurs(self):
        n_blocks = self.take_blocks(Schedule(['lockstep', 'openmpi', 'mpich'], n_blocks=5), [1, 2, 3],
                                    lambda turn: 'same L3' if turn // 7 % 2 == 0 else 'other L3')
        self.assertEqual(n_blocks, {(i, placement): 5 for i in range(3) for placement in ('same L3', 'other L3')})

    def test_a_rare_placement_is_not_waited_for(self):
        n_blocks = self.take_blocks(Schedule(['lockstep', 'openmpi'], n_blocks=5), [1, 2],
                                    lambda turn: 'other L3' if turn == 3 else 'same L3')
        self.assertEqual([n_blocks[i, 'same L3'] for i in range(2)], [5, 5])

    def test_a_clearly_slower_setting_has_a_trial_only(self):
        n_blocks = self.take_blocks(Schedule(['lockstep', 'lockstep', 'mpich', 'mpich', 'mpich'], n_blocks=5),
                                    [1, 10, 4, 2, 2.5], lambda turn: 'same L3')
        # Lockstep with ranks as threads is not an alternative setting.
        self.assertEqual([n_blocks[i, 'same L3'] for i in range(5)], [5, 5, 2, 5, 5])

    def test_one_whose_blocks_never_count_leaves_the_others_their_turns(self):
        """Its turns count, or it would have every turn."""
        schedule = Schedule(['lockstep', 'openmpi'], n_blocks=3)
        n_of_other = 0
        for _ in range(6):
            candidate = schedule.next('same L3')
            if candidate == 1:
                schedule.add(1, 'same L3', 1)
                n_of_other += 1
        self.assertEqual(n_of_other, 3)

    def test_one_that_failed_is_not_waited_for(self):
        schedule = Schedule(['lockstep', 'openmpi'], n_blocks=1)
        schedule.fail(1)
        found = Occurrences()
        found.add('same L3')
        self.assertEqual(schedule.next('same L3'), 0)
        self.assertFalse(schedule.is_done(found))
        schedule.add(0, 'same L3', 1)
        self.assertTrue(schedule.is_done(found))


if __name__ == '__main__':
    unittest.main()
