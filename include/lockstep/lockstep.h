/** @file
 * The C interface of lockstep: C99 and C++. Link with -llockstep (pkg-config lockstep, or the CMake
 * target lockstep::c). docs/c_api.md shows it from C, Python and Rust.
 *
 * Results. Every function that returns int returns LOCKSTEP_OK (0) or a lockstep_status; those that
 * return a number instead say so. No function ends the process or lets a C++ exception through. The
 * calling thread's last failure is described by lockstep_error_*; a call that succeeds keeps it.
 *
 * Groups. A group dies with every status but LOCKSTEP_OK and LOCKSTEP_USAGE_ERROR: each later call
 * on it returns the same status and message, on every rank.
 *
 * Threads. Every function may be called from any thread. A group takes one call at a time, so each
 * thread that communicates needs a group of its own (lockstep_group_duplicate). The calling thread
 * does the work of a call; asynchronous calls run in their order on one thread of the group.
 *
 * Memory. Buffers belong to the caller. Those of an asynchronous call must stay until it has
 * completed. Each handle is freed by the function of its type; freeing NULL does nothing. Returned
 * strings belong to the library, and live as the function says.
 *
 * Arguments of every operation:
 * - `count`: number of elements, not bytes; as each operation says
 * - `dtype`, `reduction`: a lockstep_dtype, a lockstep_reduction
 * - `timeout_ms`: limit of this call in milliseconds; LOCKSTEP_GROUP_TIMEOUT: the group's
 * - `site`: the caller's line, for errors: LOCKSTEP_HERE, lockstep_at(file, line), or NULL
 */
#ifndef LOCKSTEP_LOCKSTEP_H
#define LOCKSTEP_LOCKSTEP_H

#include <stddef.h>
#include <stdint.h>

/** The version of this header; lockstep_version() has the library's. */
#define LOCKSTEP_VERSION_MAJOR 0
#define LOCKSTEP_VERSION_MINOR 2
#define LOCKSTEP_VERSION_PATCH 0

#if defined(_WIN32)
#error "lockstep is for Linux"
#endif
#define LOCKSTEP_API __attribute__((visibility("default")))

#ifdef __cplusplus
extern "C" {
#endif

/** What a function that returns int returns. */
typedef enum lockstep_status {
  LOCKSTEP_OK = 0,
  LOCKSTEP_USAGE_ERROR = 1,    /**< the caller's bug, found before data moves; the group is usable,
                                    but after one of send or recv */
  LOCKSTEP_MISMATCH_ERROR = 2, /**< ranks disagree on operation, type, count, root or reduction */
  LOCKSTEP_TIMEOUT_ERROR = 3,  /**< a peer did not arrive within the timeout */
  LOCKSTEP_PEER_LOST = 4,      /**< a peer died or left */
  LOCKSTEP_PEER_FAILED = 5,    /**< a peer left because of an error, and the message has its text */
  LOCKSTEP_SYSTEM_ERROR = 6,   /**< a system call failed, or no memory: see lockstep_error_number */
  LOCKSTEP_ENGINE_ERROR = 7,   /**< the engine's own library (MPI) failed, or it is not available */
  LOCKSTEP_OTHER_ERROR = 8     /**< anything else: a bug in lockstep */
} lockstep_status;

/** Element types. f16 is IEEE 754 binary16, bf16 the upper half of a binary32. bool: 0 or 1. */
typedef enum lockstep_dtype {
  LOCKSTEP_U8 = 0,
  LOCKSTEP_I8 = 1,
  LOCKSTEP_I32 = 2,
  LOCKSTEP_I64 = 3,
  LOCKSTEP_F16 = 4,
  LOCKSTEP_BF16 = 5,
  LOCKSTEP_F32 = 6,
  LOCKSTEP_F64 = 7,
  LOCKSTEP_BOOL = 8,
  LOCKSTEP_I16 = 9,
  LOCKSTEP_U16 = 10,
  LOCKSTEP_U32 = 11,
  LOCKSTEP_U64 = 12
} lockstep_dtype;

/** How values are combined, always in the order of one tree over the ranks, ((0 + 1) + (2 + 3)) +
 * ...: results are bitwise the same on all ranks, for any size and engine. Sums and products of
 * integers wrap; mean of integers truncates toward zero; 16-bit floats accumulate in f32 and are
 * rounded once. band, bor and bxor take integers and bool, which has no sum, product, mean. */
typedef enum lockstep_reduction {
  LOCKSTEP_SUM = 0,
  LOCKSTEP_PRODUCT = 1,
  LOCKSTEP_MIN = 2,
  LOCKSTEP_MAX = 3,
  LOCKSTEP_BAND = 4,
  LOCKSTEP_BOR = 5,
  LOCKSTEP_BXOR = 6,
  LOCKSTEP_MEAN = 7
} lockstep_reduction;

#define LOCKSTEP_GROUP_TIMEOUT ((int64_t)-1) /**< the timeout of the group */
#define LOCKSTEP_NO_TIMEOUT INT64_MAX        /**< a hundred years */

typedef struct lockstep_group lockstep_group;   /**< ranks that communicate */
typedef struct lockstep_work lockstep_work;     /**< an asynchronous call */
typedef struct lockstep_buffer lockstep_buffer; /**< memory that every rank of the host can reach */
typedef struct lockstep_site lockstep_site;     /**< a line of the caller's source */

/* --- version --------------------------------------------------------------------------------- */

/** "0.2.0". Lives as long as the library. */
LOCKSTEP_API const char* lockstep_version(void);
/** major * 10000 + minor * 100 + patch */
LOCKSTEP_API int lockstep_version_number(void);

/* --- the caller's line ----------------------------------------------------------------------- */

/** A line of source; the same pointer for the same line. It and its copy of `file` live as long as
 * the process, so make one for each place in the source, not for each call. NULL if file is NULL,
 * or without memory. Bindings pass the line of their own caller. */
LOCKSTEP_API const lockstep_site* lockstep_at(const char* file, int line);
#define LOCKSTEP_HERE (lockstep_at(__FILE__, __LINE__))

/* --- the last failure of the calling thread -------------------------------------------------- */

/* Strings are valid until the thread's next call that fails; "" (numbers: as stated) before any. */

/** The lockstep_status; LOCKSTEP_OK before any. */
LOCKSTEP_API int lockstep_error_status(void);
/** Operation, group, rank, call and source line, then the cause and what to do. Many lines. */
LOCKSTEP_API const char* lockstep_error_message(void);
/** The message without operation, group, rank and line in front. */
LOCKSTEP_API const char* lockstep_error_text(void);
/** "all_reduce", "init_dist", ... */
LOCKSTEP_API const char* lockstep_error_operation(void);
/** Name of the group; "" outside a group. */
LOCKSTEP_API const char* lockstep_error_group(void);
/** This rank in that group; -1 outside a group. */
LOCKSTEP_API int lockstep_error_rank(void);
/** Number of the call in that group, from 1; 0: none. */
LOCKSTEP_API uint64_t lockstep_error_sequence(void);
/** The rank to blame; -1 if it is not known, or not one rank alone (see lockstep_error_peers). */
LOCKSTEP_API int lockstep_error_culprit(void);
/** Writes the ranks that the failure is about (who died, failed, was late, or made another call
 * than most) to `peers`, at most `capacity`. Returns how many there are, at most 16. */
LOCKSTEP_API int lockstep_error_peers(int* peers, int capacity);
/** The caller's line, from `site`; "" and 0 if that was NULL. */
LOCKSTEP_API const char* lockstep_error_file(void);
LOCKSTEP_API int lockstep_error_line(void);
/** LOCKSTEP_SYSTEM_ERROR: an errno value; else 0. */
LOCKSTEP_API int lockstep_error_number(void);

/* --- the world ------------------------------------------------------------------------------- */

/** Joins the world that a launcher (lockstep run, torchrun, srun, mpirun) started. Collective.
 *
 * - `launcher`: "infer" or NULL: from the environment; "none", "lockstep", "pytorch", "slurm",
 * "mpi"
 * - `backend`: "auto" or NULL, "solo", "shared", "ucx", "mpi", "hierarchical"
 * - `timeout_ms`: limit of one operation; LOCKSTEP_GROUP_TIMEOUT: LOCKSTEP_TIMEOUT of the
 * environment, or else 5 minutes.
 *
 * Without a launcher the world is this process alone, and every operation works. Call it once, from
 * one thread. */
LOCKSTEP_API int lockstep_init(const char* launcher, const char* backend, int64_t timeout_ms,
                               const lockstep_site* site);
/** Leaves the world after pending asynchronous calls; peers that call on get LOCKSTEP_PEER_LOST. If
 * failure is neither NULL nor "", this rank cannot continue: peers get LOCKSTEP_PEER_FAILED with
 * that text at once. Groups must not be used afterwards, but are still to be freed. */
LOCKSTEP_API int lockstep_destroy(const char* failure, const lockstep_site* site);
/** 1 between lockstep_init and lockstep_destroy, if a launcher started this process; else 0. */
LOCKSTEP_API int lockstep_is_distributed(void);
/** A handle of the world: rank 0 of 1 if not distributed. To be freed. */
LOCKSTEP_API int lockstep_world(lockstep_group** group, const lockstep_site* site);
/** A handle of the group of the world's ranks on this host. To be freed. */
LOCKSTEP_API int lockstep_local_group(lockstep_group** group, const lockstep_site* site);

/* --- groups ---------------------------------------------------------------------------------- */

/** A group of the ranks that gave the same color (0 or more), in the order of key, then rank; key
 * -1: by rank. Collective over `parent`. */
LOCKSTEP_API int lockstep_group_split(const lockstep_group* parent, int color, int key,
                                      lockstep_group** group, const lockstep_site* site);
/** The same ranks over a channel of their own, for another thread. Collective. */
LOCKSTEP_API int lockstep_group_duplicate(const lockstep_group* parent, lockstep_group** group,
                                          const lockstep_site* site);
/** Frees the handle; the group's resources go with the last handle, work and buffer of it. */
LOCKSTEP_API void lockstep_group_free(lockstep_group* group);
/** Numbers; -1 if group is NULL. */
LOCKSTEP_API int lockstep_group_rank(const lockstep_group* group);
LOCKSTEP_API int lockstep_group_size(const lockstep_group* group);
LOCKSTEP_API int64_t lockstep_group_timeout_ms(const lockstep_group* group);
/** "world", "world/0.1", ... and "shared", "mpi", ...; they live as long as the handle. NULL if
 * group is NULL. */
LOCKSTEP_API const char* lockstep_group_name(const lockstep_group* group);
LOCKSTEP_API const char* lockstep_group_backend(const lockstep_group* group);
/** This rank cannot do its part: the group is dead on all ranks with LOCKSTEP_PEER_FAILED and this
 * reason. May be called while another thread waits in a call on the group, which then ends. */
LOCKSTEP_API int lockstep_group_abandon(const lockstep_group* group, const char* reason);

/* --- shared buffers -------------------------------------------------------------------------- */

/** n_bytes of zeroed memory on every rank, the same n_bytes on all; operations on it avoid copies.
 * Collective. Free it before the program ends. */
LOCKSTEP_API int lockstep_buffer_allocate(const lockstep_group* group, size_t n_bytes,
                                          lockstep_buffer** buffer, const lockstep_site* site);
/** Its first byte; NULL if buffer is NULL. */
LOCKSTEP_API void* lockstep_buffer_data(const lockstep_buffer* buffer);
LOCKSTEP_API size_t lockstep_buffer_size(const lockstep_buffer* buffer); /**< in bytes */
/** Frees this rank's memory. */
LOCKSTEP_API void lockstep_buffer_free(lockstep_buffer* buffer);

/* --- operations ------------------------------------------------------------------------------ */

/* All ranks of the group call the same operations in the same order, with the same arguments where
 * nothing else is said. `in` and `out` do not overlap. size: that of the group. */

/** Returns when every rank has called it. */
LOCKSTEP_API int lockstep_barrier(const lockstep_group* group, int64_t timeout_ms,
                                  const lockstep_site* site);
/** data[count] <- reduction of every rank's data */
LOCKSTEP_API int lockstep_all_reduce(const lockstep_group* group, void* data, size_t count,
                                     int dtype, int reduction, int64_t timeout_ms,
                                     const lockstep_site* site);
/** The same on rank dst; elsewhere data is unchanged. */
LOCKSTEP_API int lockstep_reduce(const lockstep_group* group, void* data, size_t count, int dtype,
                                 int reduction, int dst, int64_t timeout_ms,
                                 const lockstep_site* site);
/** data[count] <- rank src's data */
LOCKSTEP_API int lockstep_broadcast(const lockstep_group* group, void* data, size_t count,
                                    int dtype, int src, int64_t timeout_ms,
                                    const lockstep_site* site);
/** out[size * count] <- every rank's in[count], in rank order */
LOCKSTEP_API int lockstep_all_gather(const lockstep_group* group, const void* in, void* out,
                                     size_t count, int dtype, int64_t timeout_ms,
                                     const lockstep_site* site);
/** The same with counts[r] elements of rank r: in[counts[own rank]], out[sum of counts]. counts has
 * size entries, the same on all ranks. */
LOCKSTEP_API int lockstep_all_gather_v(const lockstep_group* group, const void* in, void* out,
                                       const size_t* counts, int dtype, int64_t timeout_ms,
                                       const lockstep_site* site);
/** As all_gather on rank dst; elsewhere out is not used and may be NULL. */
LOCKSTEP_API int lockstep_gather(const lockstep_group* group, const void* in, void* out,
                                 size_t count, int dtype, int dst, int64_t timeout_ms,
                                 const lockstep_site* site);
LOCKSTEP_API int lockstep_gather_v(const lockstep_group* group, const void* in, void* out,
                                   const size_t* counts, int dtype, int dst, int64_t timeout_ms,
                                   const lockstep_site* site);
/** out[count] <- this rank's chunk of rank src's in[size * count]; elsewhere in may be NULL. */
LOCKSTEP_API int lockstep_scatter(const lockstep_group* group, const void* in, void* out,
                                  size_t count, int dtype, int src, int64_t timeout_ms,
                                  const lockstep_site* site);
/** out[count] <- reduction over the ranks of this rank's chunk of in[size * count] */
LOCKSTEP_API int lockstep_reduce_scatter(const lockstep_group* group, const void* in, void* out,
                                         size_t count, int dtype, int reduction, int64_t timeout_ms,
                                         const lockstep_site* site);
/** Chunk q of out[size * count] <- this rank's chunk of rank q's in[size * count] */
LOCKSTEP_API int lockstep_all_to_all(const lockstep_group* group, const void* in, void* out,
                                     size_t count, int dtype, int64_t timeout_ms,
                                     const lockstep_site* site);
/** Sends data[count] to dst, another rank, which calls recv with the same count and type. May
 * return before that. Messages between two ranks arrive in order. */
LOCKSTEP_API int lockstep_send(const lockstep_group* group, const void* data, size_t count,
                               int dtype, int dst, int64_t timeout_ms, const lockstep_site* site);
/** data[count] <- the next message of src, another rank */
LOCKSTEP_API int lockstep_recv(const lockstep_group* group, void* data, size_t count, int dtype,
                               int src, int64_t timeout_ms, const lockstep_site* site);

/* --- asynchronous operations ----------------------------------------------------------------- */

/* They return at once; *work is to be waited for and freed. It is NULL if they fail. */

LOCKSTEP_API int lockstep_barrier_async(const lockstep_group* group, int64_t timeout_ms,
                                        const lockstep_site* site, lockstep_work** work);
LOCKSTEP_API int lockstep_all_reduce_async(const lockstep_group* group, void* data, size_t count,
                                           int dtype, int reduction, int64_t timeout_ms,
                                           const lockstep_site* site, lockstep_work** work);
LOCKSTEP_API int lockstep_reduce_async(const lockstep_group* group, void* data, size_t count,
                                       int dtype, int reduction, int dst, int64_t timeout_ms,
                                       const lockstep_site* site, lockstep_work** work);
LOCKSTEP_API int lockstep_broadcast_async(const lockstep_group* group, void* data, size_t count,
                                          int dtype, int src, int64_t timeout_ms,
                                          const lockstep_site* site, lockstep_work** work);
LOCKSTEP_API int lockstep_all_gather_async(const lockstep_group* group, const void* in, void* out,
                                           size_t count, int dtype, int64_t timeout_ms,
                                           const lockstep_site* site, lockstep_work** work);
LOCKSTEP_API int lockstep_gather_async(const lockstep_group* group, const void* in, void* out,
                                       size_t count, int dtype, int dst, int64_t timeout_ms,
                                       const lockstep_site* site, lockstep_work** work);
LOCKSTEP_API int lockstep_scatter_async(const lockstep_group* group, const void* in, void* out,
                                        size_t count, int dtype, int src, int64_t timeout_ms,
                                        const lockstep_site* site, lockstep_work** work);
LOCKSTEP_API int lockstep_reduce_scatter_async(const lockstep_group* group, const void* in,
                                               void* out, size_t count, int dtype, int reduction,
                                               int64_t timeout_ms, const lockstep_site* site,
                                               lockstep_work** work);
LOCKSTEP_API int lockstep_all_to_all_async(const lockstep_group* group, const void* in, void* out,
                                           size_t count, int dtype, int64_t timeout_ms,
                                           const lockstep_site* site, lockstep_work** work);
LOCKSTEP_API int lockstep_send_async(const lockstep_group* group, const void* data, size_t count,
                                     int dtype, int dst, int64_t timeout_ms,
                                     const lockstep_site* site, lockstep_work** work);
LOCKSTEP_API int lockstep_recv_async(const lockstep_group* group, void* data, size_t count,
                                     int dtype, int src, int64_t timeout_ms,
                                     const lockstep_site* site, lockstep_work** work);

/** Blocks until the operation has completed; its status. May be called again. */
LOCKSTEP_API int lockstep_work_wait(lockstep_work* work);
/** 1 if lockstep_work_wait would not block, 0 if it would, -1 if work is NULL. */
LOCKSTEP_API int lockstep_work_done(const lockstep_work* work);
/** Frees the handle after it has waited for the operation, whose status is lost (the group is dead
 * then, and its next call returns it). */
LOCKSTEP_API void lockstep_work_free(lockstep_work* work);

#ifdef __cplusplus
}
#endif

#endif
