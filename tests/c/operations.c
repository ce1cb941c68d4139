/* A rank that uses nothing but C99 and lockstep.h.
 *   operations all             every operation, with what each must give
 *   operations mismatch R      rank R calls barrier where the others add up
 *   operations lose R          rank R is killed while the others wait for it
 *   operations late R          rank R never comes
 *   operations abandon R       rank R says that it cannot do its part
 *   operations threads         two groups at once, from two threads
 *   operations refusals        calls that rank 0 alone refuses, and calls that all ranks refuse
 * A rank that gets a failure prints its fields. */
#define _POSIX_C_SOURCE 200809L
#include <lockstep/lockstep.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define DEFAULT LOCKSTEP_GROUP_TIMEOUT

static void must(int status, int line) {
  if (status == LOCKSTEP_OK) return;
  fprintf(stderr, "operations.c:%d: status %d: %s\n", line, status, lockstep_error_message());
  exit(3);
}
static void expect(int condition, const char* text, int line) {
  if (condition) return;
  fprintf(stderr, "operations.c:%d: not so: %s (last error: %s)\n", line, text,
          lockstep_error_message());
  exit(4);
}
#define MUST(call) must((call), __LINE__)
#define EXPECT(condition) expect((condition), #condition, __LINE__)

static lockstep_group* world;
static int rank, size;

static int64_t sum_of_ranks(void) { return (int64_t)size * (size - 1) / 2; }

static void reductions(void) {
  int64_t data[2] = {rank, rank + 1};
  MUST(lockstep_all_reduce(world, data, 2, LOCKSTEP_I64, LOCKSTEP_SUM, DEFAULT, LOCKSTEP_HERE));
  EXPECT(data[0] == sum_of_ranks() && data[1] == sum_of_ranks() + size);

  float value = (float)rank;
  MUST(lockstep_reduce(world, &value, 1, LOCKSTEP_F32, LOCKSTEP_MAX, size - 1, DEFAULT, NULL));
  EXPECT(value == (float)rank); /* unchanged, or the largest: the receiver's own */

  int32_t* all = malloc((size_t)size * sizeof *all);
  for (int r = 0; r < size; ++r) all[r] = r + rank;
  int32_t part = -1;
  MUST(lockstep_reduce_scatter(world, all, &part, 1, LOCKSTEP_I32, LOCKSTEP_SUM, DEFAULT,
                               LOCKSTEP_HERE));
  EXPECT(part == size * rank + (int32_t)sum_of_ranks());
  free(all);
}

static void movements(void) {
  int32_t* all = malloc((size_t)size * sizeof *all);
  int32_t* sent = malloc((size_t)size * sizeof *sent);
  int32_t value = rank + 10;
  MUST(lockstep_all_gather(world, &value, all, 1, LOCKSTEP_I32, DEFAULT, LOCKSTEP_HERE));
  for (int r = 0; r < size; ++r) EXPECT(all[r] == r + 10);

  memset(all, 0, (size_t)size * sizeof *all);
  MUST(lockstep_gather(world, &value, rank == 0 ? all : NULL, 1, LOCKSTEP_I32, 0, DEFAULT,
                       LOCKSTEP_HERE));
  for (int r = 0; r < size; ++r) EXPECT(all[r] == (rank == 0 ? r + 10 : 0));

  value = -1;
  MUST(lockstep_scatter(world, rank == 0 ? all : NULL, &value, 1, LOCKSTEP_I32, 0, DEFAULT,
                        LOCKSTEP_HERE));
  EXPECT(value == rank + 10);

  for (int r = 0; r < size; ++r) sent[r] = 100 * rank + r;
  MUST(lockstep_all_to_all(world, sent, all, 1, LOCKSTEP_I32, DEFAULT, LOCKSTEP_HERE));
  for (int r = 0; r < size; ++r) EXPECT(all[r] == 100 * r + rank);

  value = rank;
  MUST(lockstep_broadcast(world, &value, 1, LOCKSTEP_I32, size - 1, DEFAULT, LOCKSTEP_HERE));
  EXPECT(value == size - 1);

  if (size > 1 && rank == 0) {
    MUST(lockstep_send(world, sent, 2, LOCKSTEP_I32, 1, DEFAULT, LOCKSTEP_HERE));
  } else if (rank == 1) {
    int32_t got[2] = {-1, -1};
    MUST(lockstep_recv(world, got, 2, LOCKSTEP_I32, 0, DEFAULT, LOCKSTEP_HERE));
    EXPECT(got[0] == 0 && got[1] == 1);
  }
  MUST(lockstep_barrier(world, 60000, LOCKSTEP_HERE));
  free(sent);
  free(all);
}

/* Rank r gives r + 1 bytes, each of which is r. */
static void counts_by_rank(void) {
  size_t* counts = malloc((size_t)size * sizeof *counts);
  size_t n_all = 0;
  for (int r = 0; r < size; ++r) n_all += counts[r] = (size_t)r + 1;
  uint8_t* own = malloc((size_t)rank + 1);
  memset(own, rank, (size_t)rank + 1);
  for (int pass = 0; pass < 2; ++pass) {
    uint8_t* all = malloc(n_all);
    memset(all, 255, n_all);
    if (pass == 0) {
      MUST(lockstep_all_gather_v(world, own, all, counts, LOCKSTEP_U8, DEFAULT, LOCKSTEP_HERE));
    } else {
      MUST(lockstep_gather_v(world, own, all, counts, LOCKSTEP_U8, 0, DEFAULT, LOCKSTEP_HERE));
    }
    size_t at = 0;
    for (int r = 0; r < size; ++r) {
      for (size_t i = 0; i < counts[r]; ++i, ++at) {
        EXPECT(all[at] == (pass == 1 && rank != 0 ? 255 : r));
      }
    }
    free(all);
  }
  free(own);
  free(counts);
}

static void finish(lockstep_work* work) {
  MUST(lockstep_work_wait(work));
  EXPECT(lockstep_work_done(work) == 1);
  lockstep_work_free(work);
}

static void asynchronous(void) {
  int32_t* in = malloc((size_t)size * sizeof *in);
  int32_t* out = malloc((size_t)size * sizeof *out);
  int32_t value = 1;
  lockstep_work* work = NULL;
  for (int r = 0; r < size; ++r) in[r] = 100 * rank + r;

  MUST(lockstep_all_reduce_async(world, &value, 1, LOCKSTEP_I32, LOCKSTEP_SUM, DEFAULT,
                                 LOCKSTEP_HERE, &work));
  finish(work);
  EXPECT(value == size);
  MUST(lockstep_reduce_async(world, &value, 1, LOCKSTEP_I32, LOCKSTEP_MAX, 0, DEFAULT,
                             LOCKSTEP_HERE, &work));
  finish(work);
  value = rank;
  MUST(lockstep_broadcast_async(world, &value, 1, LOCKSTEP_I32, size - 1, DEFAULT, LOCKSTEP_HERE,
                                &work));
  finish(work);
  EXPECT(value == size - 1);
  value = rank;
  MUST(lockstep_all_gather_async(world, &value, out, 1, LOCKSTEP_I32, DEFAULT, LOCKSTEP_HERE,
                                 &work));
  finish(work);
  for (int r = 0; r < size; ++r) EXPECT(out[r] == r);
  MUST(
      lockstep_gather_async(world, &value, out, 1, LOCKSTEP_I32, 0, DEFAULT, LOCKSTEP_HERE, &work));
  finish(work);
  MUST(
      lockstep_scatter_async(world, in, &value, 1, LOCKSTEP_I32, 0, DEFAULT, LOCKSTEP_HERE, &work));
  finish(work);
  EXPECT(value == rank);
  MUST(lockstep_reduce_scatter_async(world, in, &value, 1, LOCKSTEP_I32, LOCKSTEP_MIN, DEFAULT,
                                     LOCKSTEP_HERE, &work));
  finish(work);
  EXPECT(value == rank);
  MUST(lockstep_all_to_all_async(world, in, out, 1, LOCKSTEP_I32, DEFAULT, LOCKSTEP_HERE, &work));
  finish(work);
  for (int r = 0; r < size; ++r) EXPECT(out[r] == 100 * r + rank);
  if (size > 1 && rank == 0) {
    MUST(lockstep_send_async(world, in, 1, LOCKSTEP_I32, 1, DEFAULT, LOCKSTEP_HERE, &work));
    finish(work);
  } else if (rank == 1) {
    MUST(lockstep_recv_async(world, &value, 1, LOCKSTEP_I32, 0, DEFAULT, LOCKSTEP_HERE, &work));
    finish(work);
    EXPECT(value == 0);
  }
  MUST(lockstep_barrier_async(world, DEFAULT, LOCKSTEP_HERE, &work));
  finish(work);
  free(out);
  free(in);
}

static void groups_and_buffers(void) {
  lockstep_group* part = NULL;
  MUST(lockstep_group_split(world, rank % 2, -rank, &part, LOCKSTEP_HERE));
  EXPECT(lockstep_group_size(part) == (size + 1 - rank % 2) / 2);
  EXPECT(strncmp(lockstep_group_name(part), "world/", 6) == 0);
  int32_t one = 1;
  MUST(lockstep_all_reduce(part, &one, 1, LOCKSTEP_I32, LOCKSTEP_SUM, DEFAULT, LOCKSTEP_HERE));
  EXPECT(one == lockstep_group_size(part));
  lockstep_group_free(part);

  lockstep_group* local = NULL;
  MUST(lockstep_local_group(&local, LOCKSTEP_HERE));
  EXPECT(lockstep_group_size(local) == size);
  lockstep_group_free(local);

  lockstep_buffer* buffer = NULL;
  MUST(lockstep_buffer_allocate(world, 1000 * sizeof(double), &buffer, LOCKSTEP_HERE));
  EXPECT(lockstep_buffer_size(buffer) == 1000 * sizeof(double));
  double* data = lockstep_buffer_data(buffer);
  for (int i = 0; i < 1000; ++i) data[i] = rank;
  MUST(lockstep_all_reduce(world, data, 1000, LOCKSTEP_F64, LOCKSTEP_MEAN, DEFAULT, LOCKSTEP_HERE));
  EXPECT(data[999] == (double)sum_of_ranks() / size);
  lockstep_buffer_free(buffer);
}

/* The caller's bugs: each is found before data moves, and the group stays usable. */
static void usage_errors(void) {
  float value = 1;
  const int line = __LINE__ + 1;
  EXPECT(lockstep_all_reduce(world, &value, 1, 99, LOCKSTEP_SUM, DEFAULT, LOCKSTEP_HERE) ==
         LOCKSTEP_USAGE_ERROR);
  EXPECT(lockstep_error_status() == LOCKSTEP_USAGE_ERROR);
  EXPECT(strcmp(lockstep_error_text(),
                "element type 99 does not exist; use a lockstep_dtype, as LOCKSTEP_F32") == 0);
  EXPECT(strcmp(lockstep_error_operation(), "all_reduce") == 0);
  EXPECT(strcmp(lockstep_error_group(), "world") == 0);
  EXPECT(lockstep_error_rank() == rank);
  EXPECT(lockstep_error_culprit() == -1 && lockstep_error_peers(NULL, 0) == 0);
  EXPECT(strstr(lockstep_error_file(), "operations.c") != NULL);
  EXPECT(lockstep_error_line() == line || lockstep_error_line() == line + 1);
  EXPECT(lockstep_error_number() == 0);
#define REJECTED(call, part) \
  EXPECT((call) == LOCKSTEP_USAGE_ERROR && strstr(lockstep_error_message(), part) != NULL)
  REJECTED(lockstep_all_reduce(world, &value, 1, LOCKSTEP_F32, -1, DEFAULT, NULL), "reduction -1");
  REJECTED(lockstep_all_reduce(world, NULL, 1, LOCKSTEP_F32, 0, DEFAULT, NULL), "data is null");
  REJECTED(lockstep_all_reduce(NULL, &value, 1, LOCKSTEP_F32, 0, DEFAULT, NULL), "group is NULL");
  REJECTED(lockstep_barrier(world, -2, NULL), "timeout_ms is -2");
  REJECTED(lockstep_broadcast(world, &value, 1, LOCKSTEP_F32, size, DEFAULT, NULL), "src is");
  REJECTED(lockstep_all_gather_v(world, &value, &value, NULL, LOCKSTEP_F32, DEFAULT, NULL),
           "counts is NULL");
  REJECTED(lockstep_barrier_async(world, DEFAULT, NULL, NULL), "work is NULL");
  REJECTED(lockstep_work_wait(NULL), "work is NULL");
  lockstep_work* work = (lockstep_work*)&value;
  lockstep_group* other = NULL; /* which a refused send ends */
  MUST(lockstep_group_duplicate(world, &other, LOCKSTEP_HERE));
  REJECTED(lockstep_send_async(other, &value, 1, LOCKSTEP_F32, -5, DEFAULT, NULL, &work), "dst is");
  EXPECT(work == NULL); /* so that it may be freed */
  EXPECT(size == 1 || lockstep_barrier(other, DEFAULT, NULL) == LOCKSTEP_MISMATCH_ERROR);
  lockstep_group_free(other);
  REJECTED(lockstep_world(NULL, NULL), "group is NULL");
  REJECTED(lockstep_init("moon", NULL, DEFAULT, NULL), "launcher 'moon' does not exist");
  REJECTED(lockstep_group_split(world, -1, -1, &world, LOCKSTEP_HERE), "color is -1");
  if (size > 1) {
    REJECTED(lockstep_all_to_all(world, &value, &value, SIZE_MAX, LOCKSTEP_F32, DEFAULT, NULL),
             "more than fit in memory");
  }
  EXPECT(lockstep_group_rank(NULL) == -1 && lockstep_group_name(NULL) == NULL);
  EXPECT(lockstep_buffer_data(NULL) == NULL && lockstep_work_done(NULL) == -1);
  EXPECT(lockstep_at(NULL, 1) == NULL && lockstep_at("a.py", 3) == lockstep_at("a.py", 3));
  EXPECT(lockstep_at("a.py", 3) != lockstep_at("a.py", 4));
  lockstep_group_free(NULL);
  lockstep_work_free(NULL);
  lockstep_buffer_free(NULL);
  MUST(lockstep_barrier(world, DEFAULT, LOCKSTEP_HERE));
}

/* How a call can be wrong. */
enum fault { NO_FAULT, WRONG_TYPE, NO_DATA, WRONG_ROOT, N_FAULTS };

/* A broadcast from rank 0 that has this fault; its status, or that of its wait. */
static int broadcast_with(const lockstep_group* group, enum fault fault, int is_async, int* line) {
  int32_t value = rank;
  void* const data = fault == NO_DATA ? NULL : &value;
  const int dtype = fault == WRONG_TYPE ? 99 : LOCKSTEP_I32;
  const int src = fault == WRONG_ROOT ? size + 3 : 0;
  if (!is_async) {
    *line = __LINE__ + 1;
    return lockstep_broadcast(group, data, 1, dtype, src, DEFAULT, LOCKSTEP_HERE);
  }
  lockstep_work* work = NULL;
  *line = __LINE__ + 1;
  int status = lockstep_broadcast_async(group, data, 1, dtype, src, DEFAULT, LOCKSTEP_HERE, &work);
  if (status == LOCKSTEP_OK) status = lockstep_work_wait(work);
  lockstep_work_free(work);
  return status;
}

static const char* const kReasons[N_FAULTS] = {
    "", "element type 99 does not exist; use a lockstep_dtype, as LOCKSTEP_F32", "data is null",
    "src is "};

/* The others meet what rank 0 refused as a mismatch, and rank 0 does so in its next call. */
static void refused_by_rank_0(enum fault fault, int is_async) {
  lockstep_group* part = NULL;
  int line = 0;
  MUST(lockstep_group_duplicate(world, &part, LOCKSTEP_HERE));
  MUST(lockstep_barrier(part, DEFAULT, LOCKSTEP_HERE));
  if (rank == 0) {
    EXPECT(broadcast_with(part, fault, is_async, &line) == LOCKSTEP_USAGE_ERROR);
    EXPECT(strstr(lockstep_error_message(), kReasons[fault]) != NULL);
    EXPECT(lockstep_error_line() == line);
  }
  int refused_line = line;
  MUST(lockstep_broadcast(world, &refused_line, 1, LOCKSTEP_I32, 0, DEFAULT, LOCKSTEP_HERE));
  EXPECT(broadcast_with(part, NO_FAULT, is_async, &line) == LOCKSTEP_MISMATCH_ERROR);
  /* The column of ranks is wider where rank 0 has also made its next call. */
  const char* const row = strstr(lockstep_error_message(), "\n  0 ");
  const char* const refused = row == NULL ? NULL : row + 4 + strspn(row + 4, " ");
  EXPECT(refused != NULL && strncmp(refused, "refused broadcast #2: ", 22) == 0);
  char place[32];
  snprintf(place, sizeof place, ", at operations.c:%d", refused_line);
  EXPECT(refused != NULL && strstr(refused, kReasons[fault]) != NULL);
  EXPECT(refused != NULL && strstr(refused, place) != NULL);
  EXPECT(lockstep_error_culprit() == 0);
  lockstep_group_free(part);
}

/* All alike: the group stays usable. */
static void refused_by_all(enum fault fault, int is_async) {
  int line = 0;
  EXPECT(broadcast_with(world, fault, is_async, &line) == LOCKSTEP_USAGE_ERROR);
  EXPECT(strstr(lockstep_error_message(), kReasons[fault]) != NULL);
  MUST(broadcast_with(world, NO_FAULT, is_async, &line));
}

static void refusals(void) {
  for (int fault = WRONG_TYPE; fault < N_FAULTS; ++fault) {
    for (int is_async = 0; is_async < 2; ++is_async) {
      refused_by_rank_0(fault, is_async);
      refused_by_all(fault, is_async);
    }
  }
  printf("rank %d: refusals\n", rank);
}

static void versions(void) {
  char text[32];
  snprintf(text, sizeof text, "%d.%d.%d", LOCKSTEP_VERSION_MAJOR, LOCKSTEP_VERSION_MINOR,
           LOCKSTEP_VERSION_PATCH);
  EXPECT(strcmp(text, lockstep_version()) == 0);
  EXPECT(lockstep_version_number() ==
         LOCKSTEP_VERSION_MAJOR * 10000 + LOCKSTEP_VERSION_MINOR * 100 + LOCKSTEP_VERSION_PATCH);
}

static void report_failure(int status) {
  int peers[16];
  const int n = lockstep_error_peers(peers, 16);
  printf("status %d operation %s rank %d culprit %d peers", status, lockstep_error_operation(),
         lockstep_error_rank(), lockstep_error_culprit());
  for (int i = 0; i < n; ++i) printf(" %d", peers[i]);
  printf(" line %d\n%s\n", lockstep_error_line(), lockstep_error_message());
  fflush(stdout);
}

static int all_reduce_with_others(void) {
  float value = 1;
  return lockstep_all_reduce(world, &value, 1, LOCKSTEP_F32, LOCKSTEP_SUM, DEFAULT, LOCKSTEP_HERE);
}

static void* add_up(void* group) {
  static const int kCalls = 300;
  int64_t total = 0;
  for (int i = 0; i < kCalls; ++i) {
    int64_t value = 1;
    MUST(lockstep_all_reduce(group, &value, 1, LOCKSTEP_I64, LOCKSTEP_SUM, DEFAULT, LOCKSTEP_HERE));
    total += value;
  }
  EXPECT(total == (int64_t)kCalls * size);
  /* Failures are the thread's own. */
  EXPECT(lockstep_error_status() == LOCKSTEP_OK && lockstep_error_message()[0] == '\0');
  return NULL;
}

static void two_threads(void) {
  lockstep_group* second = NULL;
  MUST(lockstep_group_duplicate(world, &second, LOCKSTEP_HERE));
  EXPECT(lockstep_barrier(world, -2, NULL) == LOCKSTEP_USAGE_ERROR);
  pthread_t threads[2];
  EXPECT(pthread_create(&threads[0], NULL, add_up, world) == 0);
  EXPECT(pthread_create(&threads[1], NULL, add_up, second) == 0);
  pthread_join(threads[0], NULL);
  pthread_join(threads[1], NULL);
  lockstep_group_free(second);
  printf("rank %d: both groups\n", rank);
}

int main(int argc, char** argv) {
  const char* const mode = argc > 1 ? argv[1] : "all";
  const int other = argc > 2 ? atoi(argv[2]) : -1;
  EXPECT(lockstep_init(NULL, NULL, 0, LOCKSTEP_HERE) == LOCKSTEP_USAGE_ERROR);
  EXPECT(strstr(lockstep_error_message(), "timeout_ms is 0; give the limit of one") != NULL);
  signal(SIGTERM, SIG_IGN); /* the test reads every rank's own words */
  MUST(lockstep_init(NULL, NULL, 60000, LOCKSTEP_HERE));
  MUST(lockstep_world(&world, LOCKSTEP_HERE));
  rank = lockstep_group_rank(world);
  size = lockstep_group_size(world);
  if (strcmp(mode, "all") == 0) {
    versions();
    reductions();
    movements();
    counts_by_rank();
    asynchronous();
    groups_and_buffers();
    usage_errors();
    printf("rank %d of %d: all, over %s\n", rank, size, lockstep_group_backend(world));
  } else if (strcmp(mode, "threads") == 0) {
    two_threads();
  } else if (strcmp(mode, "refusals") == 0) {
    refusals();
  } else {
    int status = LOCKSTEP_OK;
    if (rank == other && strcmp(mode, "mismatch") == 0) {
      status = lockstep_barrier(world, DEFAULT, LOCKSTEP_HERE);
    } else if (rank == other && strcmp(mode, "lose") == 0) {
      raise(SIGKILL);
    } else if (rank == other && strcmp(mode, "abandon") == 0) {
      MUST(lockstep_group_abandon(world, "no data"));
      status = all_reduce_with_others();
    } else if (rank == other && strcmp(mode, "late") == 0) {
      for (;;) pause();
    } else if (strcmp(mode, "late") == 0) {
      status = lockstep_barrier(world, 100, LOCKSTEP_HERE);
    } else {
      status = all_reduce_with_others();
    }
    report_failure(status);
    return 1;
  }
  lockstep_group_free(world);
  MUST(lockstep_destroy(NULL, LOCKSTEP_HERE));
  return 0;
}
