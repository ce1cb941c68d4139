# The C interface from Python's ctypes, as docs/c_api.md shows it: operations.py LIBRARY [fail]
import ctypes
import sys

lib = ctypes.CDLL(sys.argv[1])
for name in ("lockstep_version", "lockstep_error_message", "lockstep_error_file"):
    getattr(lib, name).restype = ctypes.c_char_p
lib.lockstep_at.restype = ctypes.c_void_p
lib.lockstep_buffer_data.restype = ctypes.c_void_p

I64, F64, SUM, GROUP_TIMEOUT = 3, 7, 0, ctypes.c_int64(-1)


def here():
    frame = sys._getframe(1)
    return ctypes.c_void_p(lib.lockstep_at(frame.f_code.co_filename.encode(), frame.f_lineno))


def check(status):
    if status != 0:
        raise RuntimeError(lib.lockstep_error_message().decode())


check(lib.lockstep_init(None, None, ctypes.c_int64(60000), here()))
world = ctypes.c_void_p()
check(lib.lockstep_world(ctypes.byref(world), here()))
rank, size = lib.lockstep_group_rank(world), lib.lockstep_group_size(world)

numbers = (ctypes.c_int64 * 3)(rank, 1, 2)
check(lib.lockstep_all_reduce(world, numbers, ctypes.c_size_t(3), I64, SUM, GROUP_TIMEOUT, here()))
assert list(numbers) == [size * (size - 1) // 2, size, 2 * size]

buffer = ctypes.c_void_p()
check(lib.lockstep_buffer_allocate(world, ctypes.c_size_t(800), ctypes.byref(buffer), here()))
data = ctypes.cast(lib.lockstep_buffer_data(buffer), ctypes.POINTER(ctypes.c_double * 100)).contents
data[:] = [rank] * 100
check(lib.lockstep_all_reduce(world, data, ctypes.c_size_t(100), F64, SUM, GROUP_TIMEOUT, here()))
assert data[99] == size * (size - 1) / 2
lib.lockstep_buffer_free(buffer)

work = ctypes.c_void_p()
check(lib.lockstep_barrier_async(world, GROUP_TIMEOUT, here(), ctypes.byref(work)))
check(lib.lockstep_work_wait(work))
lib.lockstep_work_free(work)

if len(sys.argv) > 2:
    try:
        if rank == 1:
            check(lib.lockstep_barrier(world, GROUP_TIMEOUT, here()))
        else:
            check(lib.lockstep_all_reduce(world, numbers, ctypes.c_size_t(3), I64, SUM, GROUP_TIMEOUT, here()))
    except RuntimeError as error:
        print(error, "culprit", lib.lockstep_error_culprit(), flush=True)
        sys.exit(1)
print("rank", rank, "of", size, "lockstep", lib.lockstep_version().decode(), flush=True)
lib.lockstep_group_free(world)
check(lib.lockstep_destroy(None, here()))
