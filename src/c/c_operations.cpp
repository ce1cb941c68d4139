#include <lockstep/lockstep.h>

#include <memory>
#include <numeric>
#include <span>

#include "c/handles.hpp"
#include "c/last_error.hpp"

using lockstep::c::Arguments;
using lockstep::c::guarded;

namespace {

template <class F>
int run(const char* operation, const lockstep_group* group, int64_t timeout_ms,
        const lockstep_site* site, F body) noexcept {
  return guarded(operation, [&] { body(Arguments(operation, group, timeout_ms, site)); });
}

template <class F>
int start(const char* operation, const lockstep_group* group, int64_t timeout_ms,
          const lockstep_site* site, lockstep_work** work, F body) noexcept {
  if (work != nullptr) *work = nullptr;  // may be freed, also if this fails
  return run(operation, group, timeout_ms, site, [&](const Arguments& call) {
    call.check_given(work, "work");
    auto handle = std::make_unique<lockstep_work>();
    handle->work = body(call);
    *work = handle.release();
  });
}

/// counts, whose entries are the numbers of elements of each rank.
std::span<const std::size_t> counts_of(const Arguments& call, const size_t* counts) {
  call.check_given(counts, "counts");
  return {counts, call.size()};
}

std::size_t count_of_this_rank(const Arguments& call, const size_t* counts) {
  return counts_of(call, counts)[static_cast<std::size_t>(call.group().rank())];
}

std::size_t sum_of(const Arguments& call, const size_t* counts) {
  const auto all = counts_of(call, counts);
  return std::accumulate(all.begin(), all.end(), std::size_t{0});
}

}  // namespace

#define LOCKSTEP_LIST(...) __VA_ARGS__

/// Defines lockstep_OPERATION and lockstep_OPERATION_async. `parameters`: those before timeout_ms;
/// the rest: the arguments of Group's function, in terms of these and of `call`.
#define LOCKSTEP_BOTH_FORMS(operation, parameters, ...)                                  \
  int lockstep_##operation(LOCKSTEP_LIST parameters, int64_t timeout_ms,                 \
                           const lockstep_site* site) {                                  \
    return run(#operation, group, timeout_ms, site, [&](const Arguments& call) {         \
      call.group().operation(__VA_ARGS__ __VA_OPT__(, ) call.timeout(), call.where());   \
    });                                                                                  \
  }                                                                                      \
  int lockstep_##operation##_async(LOCKSTEP_LIST parameters, int64_t timeout_ms,         \
                                   const lockstep_site* site, lockstep_work** work) {    \
    return start(#operation, group, timeout_ms, site, work, [&](const Arguments& call) { \
      return call.group().operation##_async(__VA_ARGS__ __VA_OPT__(, ) call.timeout(),   \
                                            call.where());                               \
    });                                                                                  \
  }

LOCKSTEP_BOTH_FORMS(barrier, (const lockstep_group* group))

LOCKSTEP_BOTH_FORMS(all_reduce,
                    (const lockstep_group* group, void* data, size_t count, int dtype,
                     int reduction),
                    {data, count, call.dtype(dtype)}, call.reduction(reduction))

LOCKSTEP_BOTH_FORMS(reduce,
                    (const lockstep_group* group, void* data, size_t count, int dtype,
                     int reduction, int dst),
                    {data, count, call.dtype(dtype)}, dst, call.reduction(reduction))

LOCKSTEP_BOTH_FORMS(broadcast,
                    (const lockstep_group* group, void* data, size_t count, int dtype, int src),
                    {data, count, call.dtype(dtype)}, src)

LOCKSTEP_BOTH_FORMS(
    all_gather, (const lockstep_group* group, const void* in, void* out, size_t count, int dtype),
    {in, count, call.dtype(dtype)}, {out, call.count_of_all(count), call.dtype(dtype)})

LOCKSTEP_BOTH_FORMS(gather,
                    (const lockstep_group* group, const void* in, void* out, size_t count,
                     int dtype, int dst),
                    {in, count, call.dtype(dtype)},
                    {out, call.count_of_all(count), call.dtype(dtype)}, dst)

LOCKSTEP_BOTH_FORMS(scatter,
                    (const lockstep_group* group, const void* in, void* out, size_t count,
                     int dtype, int src),
                    {in, call.count_of_all(count), call.dtype(dtype)},
                    {out, count, call.dtype(dtype)}, src)

LOCKSTEP_BOTH_FORMS(reduce_scatter,
                    (const lockstep_group* group, const void* in, void* out, size_t count,
                     int dtype, int reduction),
                    {in, call.count_of_all(count), call.dtype(dtype)},
                    {out, count, call.dtype(dtype)}, call.reduction(reduction))

LOCKSTEP_BOTH_FORMS(all_to_all,
                    (const lockstep_group* group, const void* in, void* out, size_t count,
                     int dtype),
                    {in, call.count_of_all(count), call.dtype(dtype)},
                    {out, call.count_of_all(count), call.dtype(dtype)})

LOCKSTEP_BOTH_FORMS(send,
                    (const lockstep_group* group, const void* data, size_t count, int dtype,
                     int dst),
                    {data, count, call.dtype(dtype)}, dst)

LOCKSTEP_BOTH_FORMS(recv,
                    (const lockstep_group* group, void* data, size_t count, int dtype, int src),
                    {data, count, call.dtype(dtype)}, src)

int lockstep_all_gather_v(const lockstep_group* group, const void* in, void* out,
                          const size_t* counts, int dtype, int64_t timeout_ms,
                          const lockstep_site* site) {
  return run("all_gather", group, timeout_ms, site, [&](const Arguments& call) {
    call.group().all_gather({in, count_of_this_rank(call, counts), call.dtype(dtype)},
                            {out, sum_of(call, counts), call.dtype(dtype)}, counts_of(call, counts),
                            call.timeout(), call.where());
  });
}

int lockstep_gather_v(const lockstep_group* group, const void* in, void* out, const size_t* counts,
                      int dtype, int dst, int64_t timeout_ms, const lockstep_site* site) {
  return run("gather", group, timeout_ms, site, [&](const Arguments& call) {
    call.group().gather({in, count_of_this_rank(call, counts), call.dtype(dtype)},
                        {out, sum_of(call, counts), call.dtype(dtype)}, counts_of(call, counts),
                        dst, call.timeout(), call.where());
  });
}

int lockstep_work_wait(lockstep_work* work) {
  return guarded("wait", [&] {
    if (work == nullptr) {
      throw lockstep::UsageError({.operation = "wait"}, "work is NULL");
    }
    work->work.wait();
  });
}

int lockstep_work_done(const lockstep_work* work) {
  if (work == nullptr) return -1;
  return work->work.done() ? 1 : 0;
}

void lockstep_work_free(lockstep_work* work) { delete work; }
