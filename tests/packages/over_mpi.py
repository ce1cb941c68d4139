# A rank of mpirun over the C interface: over_mpi.py LIBRARY
import ctypes
import sys

lib = ctypes.CDLL(sys.argv[1])
lib.lockstep_error_message.restype = ctypes.c_char_p


def check(status):
    if status != 0:
        sys.exit(lib.lockstep_error_message().decode())


check(lib.lockstep_init(None, b"mpi", ctypes.c_int64(60000), None))
world = ctypes.c_void_p()
check(lib.lockstep_world(ctypes.byref(world), None))
value = ctypes.c_int64(1)
check(lib.lockstep_all_reduce(world, ctypes.byref(value), ctypes.c_size_t(1), 3, 0, ctypes.c_int64(-1), None))
assert value.value == lib.lockstep_group_size(world) == 2
lib.lockstep_group_free(world)
check(lib.lockstep_destroy(None, None))
