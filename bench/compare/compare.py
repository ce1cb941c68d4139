#!/usr/bin/env python3
"""Measures lockstep's collectives beside those of other libraries. `./dev bench` runs it.

Candidates alternate block by block; results are checked before they are timed. Each block lies
between two probes of the distance between the cores. Blocks are taken until each candidate has
enough in every placement that occurs, within a bound; the table has the most frequent one, --json
all, with every block's probes and the share of the cores that other programs took. Operations,
types, modes and sizes are those of `lockstep bench`.
"""
import argparse
import collections
import json
import math
import os
import re
import statistics
import struct
import subprocess
import sys
import time

import candidates
from job import Job, JobError, cpu_seconds
from schedule import Occurrences, Schedule

sys.path.append(os.path.join(os.path.dirname(os.path.realpath(__file__)), '..', '..', 'scripts'))
import performance

FOLDER = os.path.dirname(os.path.realpath(__file__))
# The enums of src/cli/bench/meter.hpp and lockstep/types.hpp.
OPERATIONS = ['barrier', 'all_reduce', 'broadcast', 'all_gather', 'reduce_scatter', 'all_to_all']
MODES = ['warm', 'touch', 'fresh']
TYPES = {'u8': (0, 1), 'i32': (2, 4), 'i64': (3, 8), 'f16': (4, 2), 'bf16': (5, 2), 'f32': (6, 4),
         'f64': (7, 8)}  # value, bytes
REQUEST = struct.Struct('IBIIQdd')  # as in meter.hpp
# A size is left after as many rounds as this for each block of a candidate, and returned to once.
MOST_ROUNDS = 3
VISITS = 2
# Or, because on a busy machine blocks take longer, after this many times the time of these blocks.
MOST_DELAY = 3
PROBE_S = 0.01
# Geometric means between the three clusters observed: 25-29, 50-70 and 230-460 ns.
SAME_CORE_NS, SAME_L3_NS = 38, 127
TICK_S = 1 / os.sysconf('SC_CLK_TCK')


def quantile(values, q):
    return sorted(values)[int(q * (len(values) - 1))]


def used_seconds(cores):
    """CPU time that all programs have used of these cores, and that the host has withheld from them."""
    total = 0
    with open('/proc/stat') as file:
        for line in file:
            name, *ticks = line.split()
            if name in [f'cpu{core}' for core in cores]:
                user, nice, system, _, _, irq, softirq, steal = map(int, ticks[:8])
                total += (user + nice + system + irq + softirq + steal) * TICK_S
    return total


class Probe:
    """Ping-pong between two cores."""

    def __init__(self, programs, cores):
        self.process = None
        if len(cores) > 1:
            self.process = subprocess.Popen(
                [os.path.join(programs, 'bench_probe'), *map(str, cores[:2])],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)

    def __call__(self):
        """(ns of a cache line from one core to the other, placement)."""
        if not self.process:
            return 0, 'same L3'
        self.process.stdin.write('\n')
        ns = float(self.process.stdout.readline())
        return ns, 'same core' if ns < SAME_CORE_NS else 'same L3' if ns < SAME_L3_NS else 'other L3'

    def cpu_seconds(self):
        return cpu_seconds(self.process.pid) if self.process else 0

    def end(self):
        if self.process:
            self.process.communicate()


class Track:
    """One candidate at one size."""

    def __init__(self, job):
        self.job = job
        self.ns_per_call = self.block_s = self.n_moved = 0
        self.samples = collections.defaultdict(list)  # by placement
        self.error = None


class Point:
    """One size of one operation."""

    def __init__(self, operation, n_bytes, tracks, n_blocks):
        self.operation, self.n_bytes, self.tracks = operation, n_bytes, tracks
        self.schedule = Schedule([track.job.candidate.library for track in tracks], n_blocks)

    def placement(self):
        """Of most blocks."""
        counts = collections.Counter()
        for track in self.tracks:
            counts.update({placement: len(samples) for placement, samples in track.samples.items()})
        return max(counts, key=counts.get, default='same L3')

    def rows(self):
        for track in self.tracks:
            row = {'operation': self.operation, 'bytes': self.n_bytes,
                   'candidate': track.job.candidate.name, 'library': track.job.candidate.library}
            placements = {placement: {**{key: quantile([block[key] for block in blocks], 0.5)
                                         for key in ('p50_us', 'p99_us')}, 'blocks': blocks}
                          for placement, blocks in track.samples.items()}
            error = track.error
            if found := placements.get(self.placement()):
                row.update(p50_us=found['p50_us'], p99_us=found['p99_us'], placement=self.placement())
            elif not error:
                error = 'the core placement changed during every block'
            if placements:
                row['placements'] = placements
            if track.n_moved:
                row['moved'] = track.n_moved
            yield {**row, 'error': error} if error else row


class Measurement:
    def __init__(self, options, cores, jobs, probe):
        self.options, self.jobs, self.probe = options, jobs, probe
        self.cores = cores[:max(options.n_ranks, 2)]  # of the ranks and the probes
        self.found = Occurrences()

    def run(self, track, point, block_s):
        """Times of a block that takes so long; 0: of a few calls."""
        options = self.options
        return track.job.run(REQUEST.pack(
            OPERATIONS.index(point.operation), TYPES[options.type][0], MODES.index(options.mode), options.shared,
            point.n_bytes, block_s * 1e9, track.ns_per_call))

    def guarded(self, point, i, call):
        """Ends the job if the call fails."""
        track = point.tracks[i]
        try:
            call(track)
        except JobError as error:
            track.error = str(error)
            point.schedule.fail(i)
            self.jobs.remove(track.job)
            track.job.end()

    def start(self, operation, n_bytes):
        """A point with the lengths of its calls."""
        point = Point(operation, n_bytes, [Track(job) for job in self.jobs], self.options.blocks)

        def find_length(track):
            self.run(track, point, 0)  # warms up
            track.ns_per_call = quantile(self.run(track, point, 0), 0.5)
            track.block_s = max(self.options.block_ms / 1e3, 3e-9 * track.ns_per_call)

        for i in range(len(point.tracks)):
            self.guarded(point, i, find_length)
        return point

    def visit(self, point):
        """Takes blocks until there are enough, within a bound."""
        for i, track in enumerate(point.tracks):
            if track.job not in self.jobs:  # it failed at another size
                point.schedule.fail(i)
        n = len(point.tracks)
        n_rounds = MOST_ROUNDS * self.options.blocks
        round_s = n * PROBE_S + sum(track.block_s for track in point.tracks)
        begin = time.monotonic()
        now = self.probe()
        for turn in range(n * n_rounds):
            if turn >= n and time.monotonic() - begin > round_s * n_rounds * MOST_DELAY:
                return
            self.found.add(now[1])
            if point.schedule.is_done(self.found):
                return
            i = point.schedule.next(now[1])
            if i is None:
                time.sleep(self.options.block_ms / 1e3)
                now = self.probe()
            else:
                now = self.run_block(point, i, now)

    def run_block(self, point, i, before):
        """Returns the probe after it, which is the one before the next block."""
        after = before

        def measure(track):
            nonlocal after
            begin, all_before, own_before = time.monotonic(), used_seconds(self.cores), self.own_seconds(track.job)
            times = self.run(track, point, self.options.block_ms / 1e3)
            after = self.probe()
            if before[1] != after[1]:
                track.n_moved += 1  # belongs to neither
                return
            foreign = 0
            if self.cores:  # below 0 by a clock tick at most
                others = used_seconds(self.cores) - all_before - (self.own_seconds(track.job) - own_before)
                foreign = others / ((time.monotonic() - begin) * len(self.cores))
            p50_us, p99_us = quantile(times, 0.5) / 1e3, quantile(times, 0.99) / 1e3
            track.samples[after[1]].append({'p50_us': p50_us, 'p99_us': p99_us,
                                            'one_way_ns': (before[0] + after[0]) / 2, 'foreign': foreign})
            point.schedule.add(i, after[1], p50_us)

        self.guarded(point, i, measure)
        return after

    def own_seconds(self, job):
        return job.cpu_seconds() + self.probe.cpu_seconds() + time.process_time()

    def rows(self, progress):
        points = []
        for operation in self.options.operations:
            for n_bytes in self.options.sizes[:1] if operation == 'barrier' else self.options.sizes:
                points.append(self.start(operation, n_bytes))
                self.visit(points[-1])
                progress(points[-1])
        for _ in range(VISITS - 1):  # a placement that was found later, or too seldom the first time
            for point in points:
                self.visit(point)
                progress(point)
        return [row for point in points for row in point.rows()]


def n_bytes_of(text):
    found = re.fullmatch(r'(\d+) ?(|k|m|g)(i?b)?', text.lower())
    if not found:
        raise argparse.ArgumentTypeError(f"got '{text}', expected a size, as 4, 4KiB or 1MiB")
    return int(found.group(1)) << {'': 0, 'k': 10, 'm': 20, 'g': 30}[found.group(2)]


def more_than(least, number):
    def parse(text):
        try:
            value = number(text)
        except ValueError:
            value = math.nan
        if not least < value < math.inf:
            raise argparse.ArgumentTypeError(f"got '{text}', expected a number above {least}")
        return value

    return parse


def new_file(path):
    folder = os.path.dirname(path) or '.'
    if not os.path.isdir(folder):
        raise argparse.ArgumentTypeError(f"there is no folder '{folder}' for '{path}'")
    return path


def options_of(arguments):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add('-n', dest='n_ranks', type=more_than(0, int), default=2, help='ranks (default 2)')
    add('--operation', dest='operations', nargs='+', choices=OPERATIONS, default=['all_reduce'])
    add('--min', type=n_bytes_of, default=4, help='smallest buffer (default 4)')
    add('--max', type=n_bytes_of, default=16 << 20, help='largest buffer (default 16MiB)')
    add('--factor', type=int, default=4, help='between sizes (default 4)')
    add('--type', choices=TYPES, default='f32')
    add('--mode', choices=MODES, default='warm')
    add('--shared', action='store_true', help="buffers of Group::allocate for lockstep's processes")
    add('--threads', action='store_true', help='also measure ranks as threads of one process')
    add('--no-processes', action='store_true', help="not lockstep's ranks as processes")
    add('--unpinned', action='store_true', help='do not bind ranks to cores')
    add('--peer', dest='peers', action='append', choices=candidates.PEERS, default=[],
        help='packages of the system, newer releases (-wheel, and intelmpi), and limits for all_reduce of f32 '
        'and barrier: minimum, two processes that only exchange flags and data; unchecked, the shared engine '
        'without checks, timeouts and records')
    add('--blocks', type=more_than(0, int), default=5, help='of each candidate, size and placement (default 5)')
    add('--block-ms', type=more_than(0, float), default=25, help='length of a block (default 25)')
    add('--json', type=new_file, help='write all figures to this file')
    add('--svg', type=new_file, help='draw the latencies of all_reduce to this file (gnuplot)')
    add('--programs', default=os.path.join(FOLDER, '..', '..', 'build', 'release', 'bench'),
        help='folder of the built programs (default build/release/bench)')
    options = parser.parse_args(arguments)
    if options.factor < 2 or not TYPES[options.type][1] <= options.min <= options.max <= 4 << 30:
        parser.error('sizes are from one element to 4 GiB, --min not above --max, --factor at least 2')
    if options.no_processes and not options.threads and not options.peers:
        parser.error('nothing is left to measure: leave --no-processes out, or give --threads or --peer')
    n_sizes = int(math.log(options.max / options.min, options.factor) + 1e-9) + 1
    options.sizes = [options.min * options.factor**i for i in range(n_sizes)]
    options.programs = os.path.realpath(options.programs)
    if not os.path.exists(os.path.join(options.programs, 'bench_probe')):
        parser.error(f'{options.programs} has no programs; `./dev build release bench/all` builds those of build/release')
    return options


def candidates_of(options):
    """None if one is missing."""
    every = candidates.ours(options.programs, options.n_ranks, not options.no_processes, options.threads)
    is_complete = True
    for peer in options.peers:
        try:
            every += candidates.of_peer(options.programs, peer, options.n_ranks)
        except candidates.Missing as missing:
            print(f'compare: {missing}', file=sys.stderr)
            is_complete = False
    return every if is_complete else None


def report(options, rows):
    lines = {'rows': performance.lines_of(rows, most_foreign=math.inf)}
    print(f'{options.n_ranks} ranks, {options.type}, {options.mode} buffers'
          f'{" in shared memory" if options.shared else ""}; median us of a call\n')
    print(performance.table_of(lines))
    shares = [block['foreign'] for row in rows for figures in row.get('placements', {}).values()
              for block in figures['blocks']]
    if shares and statistics.mean(shares) > 0.05:
        print(f"\nother programs, or the host, took {100 * statistics.mean(shares):.0f} % of the cores' time")
    for row in rows:
        if 'error' in row:
            print(f"\n{row['candidate']} {row['operation']} {row['bytes']} B: {row['error']}")
    if options.json:
        with open(options.json, 'w') as file:
            json.dump({'ranks': options.n_ranks, 'type': options.type, 'mode': options.mode,
                       'shared_memory': options.shared, 'pinned': not options.unpinned,
                       'blocks': options.blocks, 'rows': rows}, file, indent=2)
    if options.svg:
        performance.picture_of(performance.columns(lines), f'{options.n_ranks} ranks, {options.type}', options.svg)


def main():
    options = options_of(sys.argv[1:])
    every = candidates_of(options)
    if every is None:
        return 1
    cores = [] if options.unpinned else sorted(os.sched_getaffinity(0))
    jobs = []

    def progress(point):
        if sys.stderr.isatty():
            print(f"\r{point.operation} {point.n_bytes} bytes    ", end='', file=sys.stderr)

    probe = Probe(options.programs, cores)
    try:
        for candidate in every:
            jobs.append(Job(candidate, options.n_ranks, cores))
        rows = Measurement(options, cores, jobs, probe).rows(progress)
    except JobError as error:
        print(f'compare: {error}', file=sys.stderr)
        return 1
    finally:
        n_left = len(jobs)
        probe.end()
        for job in jobs:
            job.end()
    report(options, rows)
    return 0 if n_left == len(every) else 1


if __name__ == '__main__':
    sys.exit(main())
