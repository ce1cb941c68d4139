"""Which candidate of compare.py has the next block, and whether there are enough."""
import collections
import statistics

TRIAL_BLOCKS = 2
CLEARLY_SLOWER = 1.3


class Occurrences:
    """How often each placement was found in a run, over all its sizes."""

    def __init__(self):
        self.counts = collections.Counter()

    def add(self, placement):
        self.counts[placement] += 1

    def frequent(self):
        """Those of a tenth of the looks: a placement that is rarer is not waited for."""
        return [placement for placement, n in self.counts.items() if 10 * n >= self.counts.total()]


class Schedule:
    """Of one size: each candidate is to have n_blocks in every placement that occurs. Of several
    settings of one library only the fastest counts, so a setting that is clearly slower in a
    placement has only TRIAL_BLOCKS there."""

    def __init__(self, libraries, n_blocks):
        """libraries: that of each candidate."""
        self.libraries = libraries
        self.n_blocks = n_blocks
        self.failed = set()
        self.n_turns = collections.Counter()
        self.times = collections.defaultdict(list)  # by candidate and placement

    def next(self, placement):
        """The candidate that needs a block in this placement and has had the fewest turns there;
        None if there are enough."""
        needy = [i for i in range(len(self.libraries)) if self.needs(i, placement)]
        best = min(needy, key=lambda i: self.n_turns[i, placement], default=None)
        if best is not None:
            self.n_turns[best, placement] += 1
        return best

    def add(self, candidate, placement, us):
        """Its block's time per call. A block during which the placement changed is not added."""
        self.times[candidate, placement].append(us)

    def fail(self, candidate):
        """It gets no more blocks."""
        self.failed.add(candidate)

    def is_done(self, occurrences):
        return not any(self.needs(i, placement) for placement in occurrences.frequent()
                       for i in range(len(self.libraries)))

    def median_of(self, candidate, placement):
        """None before the trial's end."""
        times = self.times[candidate, placement]
        return statistics.median_low(times) if len(times) >= TRIAL_BLOCKS else None

    def needs(self, candidate, placement):
        if candidate in self.failed or len(self.times[candidate, placement]) >= self.n_blocks:
            return False
        own = self.median_of(candidate, placement)
        if own is None or self.libraries[candidate] == 'lockstep':  # lockstep's are not alternative settings
            return True
        others = [self.median_of(i, placement) for i, library in enumerate(self.libraries)
                  if i != candidate and i not in self.failed and library == self.libraries[candidate]]
        return not any(other and own > CLEARLY_SLOWER * other for other in others)
