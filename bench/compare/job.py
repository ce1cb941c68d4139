"""The ranks of one candidate. The other side is bench/peers/protocol.hpp."""
import array
import os
import signal
import socket
import struct
import subprocess
import time

START_LIMIT_S = 60
BLOCK_LIMIT_S = 120
CREDENTIALS = struct.Struct('3i')  # pid, uid, gid
HELLO = struct.Struct('2i')  # rank, number of ranks
WELCOME = struct.Struct('i')  # core, -1: any
ANSWER = struct.Struct('2I504s')  # succeeded, number of times that follow, error text


class JobError(Exception):
    pass


def cpu_seconds(pid):
    """That a process has used; 0 if it has ended."""
    try:
        return time.clock_gettime(~pid << 3 | 2)  # as clock_getcpuclockid
    except OSError:
        return 0


class Job:
    """Running and connected."""

    def __init__(self, candidate, n_ranks, cores):
        """cores: rank r runs on cores[r % len(cores)]; empty: anywhere."""
        self.candidate = candidate
        self.output = os.fdopen(os.memfd_create('bench-compare'), 'w+b')
        self.ranks, self.pids, self.process = [None] * n_ranks, set(), None
        try:
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind('')  # the kernel chooses an abstract name
                listener.listen(n_ranks)
                listener.settimeout(0.1)
                name = listener.getsockname()[1:].decode()
                self.process = subprocess.Popen([*candidate.command, name], stdin=subprocess.DEVNULL,
                                                stdout=self.output, stderr=subprocess.STDOUT,
                                                start_new_session=True)
                self.accept(listener, cores)
        except BaseException:
            self.end()
            raise

    def accept(self, listener, cores):
        limit = time.monotonic() + START_LIMIT_S
        while None in self.ranks:
            if time.monotonic() > limit:
                self.fail(f'did not start in {START_LIMIT_S} s')
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                if self.process.poll() is not None:
                    self.fail('ended before all its ranks had connected')
                continue
            pid, uid, _ = CREDENTIALS.unpack(
                connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size))
            if uid != os.geteuid():
                connection.close()
                continue
            connection.settimeout(BLOCK_LIMIT_S)
            try:
                rank, n_ranks = HELLO.unpack(receive(connection, HELLO.size))
            except OSError as error:  # also at the limit
                self.fail(f'did not say which rank it is: {error}')
            if n_ranks != len(self.ranks) or not 0 <= rank < n_ranks or self.ranks[rank]:
                self.fail(f'says rank {rank} of {n_ranks}, expected {len(self.ranks)} ranks')
            connection.sendall(WELCOME.pack(cores[rank % len(cores)] if cores else -1))
            self.ranks[rank] = connection
            self.pids.add(pid)  # one of all ranks that are threads

    def run(self, request):
        """Times of every rank, in ns per call. Raises JobError with the rank's error text."""
        times = array.array('d')
        try:
            for rank in self.ranks:
                rank.sendall(request)
            for rank in self.ranks:
                is_ok, n, text = ANSWER.unpack(receive(rank, ANSWER.size))
                if not is_ok:
                    raise JobError(text.rstrip(b'\0').decode(errors='replace'))
                times.frombytes(receive(rank, n * times.itemsize))
        except TimeoutError:
            self.fail(f'sent nothing for {BLOCK_LIMIT_S} s')
        except (OSError, JobError) as error:
            self.fail(str(error))
        return times

    def cpu_seconds(self):
        """That its ranks have used."""
        return sum(map(cpu_seconds, self.pids))

    def fail(self, what):
        self.output.seek(0)
        said = self.output.read().decode(errors='replace')[-500:]
        raise JobError(f'{self.candidate.name}: {what}' + (f'; it wrote:\n{said}' if said else ''))

    def end(self):
        """Ranks exit when their connection is closed; others are killed with their descendants."""
        for rank in filter(None, self.ranks):
            rank.close()
        if self.process:
            try:
                self.process.wait(timeout=5)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait()
        self.output.close()


def receive(connection, n_bytes):
    data = bytearray()
    while len(data) < n_bytes:
        part = connection.recv(n_bytes - len(data))
        if not part:
            raise OSError('the rank has closed the connection')
        data += part
    return bytes(data)
