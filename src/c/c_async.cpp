#include <lockstep/lockstep.h>

#include <memory>

#include "c/handles.hpp"
#include "c/last_error.hpp"

using lockstep::c::Arguments;
using lockstep::c::guarded;

namespace {

template <class F>
int start(const char* operation, const lockstep_group* group, int64_t timeout_ms,
          const lockstep_site* site, lockstep_work** work, F body, int peer = -1) noexcept {
  if (work != nullptr) *work = nullptr;  // may be freed, also if this fails
  return guarded(operation, [&] {
    const Arguments call(operation, group, timeout_ms, site, peer);
    call.check_given(work, "work");
    auto handle = std::make_unique<lockstep_work>();
    handle->work = body(call);
    *work = handle.release();
  });
}

}  // namespace

int lockstep_barrier_async(const lockstep_group* group, int64_t timeout_ms,
                           const lockstep_site* site, lockstep_work** work) {
  return start("barrier", group, timeout_ms, site, work, [&](const Arguments& call) {
    return call.group().barrier_async(call.timeout(), call.where());
  });
}

int lockstep_all_reduce_async(const lockstep_group* group, void* data, size_t count, int dtype,
                              int reduction, int64_t timeout_ms, const lockstep_site* site,
                              lockstep_work** work) {
  return start("all_reduce", group, timeout_ms, site, work, [&](const Arguments& call) {
    return call.group().all_reduce_async({data, count, call.dtype(dtype)},
                                         call.reduction(reduction), call.timeout(), call.where());
  });
}

int lockstep_reduce_async(const lockstep_group* group, void* data, size_t count, int dtype,
                          int reduction, int dst, int64_t timeout_ms, const lockstep_site* site,
                          lockstep_work** work) {
  return start("reduce", group, timeout_ms, site, work, [&](const Arguments& call) {
    return call.group().reduce_async({data, count, call.dtype(dtype)}, dst,
                                     call.reduction(reduction), call.timeout(), call.where());
  });
}

int lockstep_broadcast_async(const lockstep_group* group, void* data, size_t count, int dtype,
                             int src, int64_t timeout_ms, const lockstep_site* site,
                             lockstep_work** work) {
  return start("broadcast", group, timeout_ms, site, work, [&](const Arguments& call) {
    return call.group().broadcast_async({data, count, call.dtype(dtype)}, src, call.timeout(),
                                        call.where());
  });
}

int lockstep_all_gather_async(const lockstep_group* group, const void* in, void* out, size_t count,
                              int dtype, int64_t timeout_ms, const lockstep_site* site,
                              lockstep_work** work) {
  return start("all_gather", group, timeout_ms, site, work, [&](const Arguments& call) {
    return call.group().all_gather_async({in, count, call.dtype(dtype)},
                                         {out, call.count_of_all(count), call.dtype(dtype)},
                                         call.timeout(), call.where());
  });
}

int lockstep_gather_async(const lockstep_group* group, const void* in, void* out, size_t count,
                          int dtype, int dst, int64_t timeout_ms, const lockstep_site* site,
                          lockstep_work** work) {
  return start("gather", group, timeout_ms, site, work, [&](const Arguments& call) {
    return call.group().gather_async({in, count, call.dtype(dtype)},
                                     {out, call.count_of_all(count), call.dtype(dtype)}, dst,
                                     call.timeout(), call.where());
  });
}

int lockstep_scatter_async(const lockstep_group* group, const void* in, void* out, size_t count,
                           int dtype, int src, int64_t timeout_ms, const lockstep_site* site,
                           lockstep_work** work) {
  return start("scatter", group, timeout_ms, site, work, [&](const Arguments& call) {
    return call.group().scatter_async({in, call.count_of_all(count), call.dtype(dtype)},
                                      {out, count, call.dtype(dtype)}, src, call.timeout(),
                                      call.where());
  });
}

int lockstep_reduce_scatter_async(const lockstep_group* group, const void* in, void* out,
                                  size_t count, int dtype, int reduction, int64_t timeout_ms,
                                  const lockstep_site* site, lockstep_work** work) {
  return start("reduce_scatter", group, timeout_ms, site, work, [&](const Arguments& call) {
    return call.group().reduce_scatter_async(
        {in, call.count_of_all(count), call.dtype(dtype)}, {out, count, call.dtype(dtype)},
        call.reduction(reduction), call.timeout(), call.where());
  });
}

int lockstep_all_to_all_async(const lockstep_group* group, const void* in, void* out, size_t count,
                              int dtype, int64_t timeout_ms, const lockstep_site* site,
                              lockstep_work** work) {
  return start("all_to_all", group, timeout_ms, site, work, [&](const Arguments& call) {
    return call.group().all_to_all_async({in, call.count_of_all(count), call.dtype(dtype)},
                                         {out, call.count_of_all(count), call.dtype(dtype)},
                                         call.timeout(), call.where());
  });
}

int lockstep_send_async(const lockstep_group* group, const void* data, size_t count, int dtype,
                        int dst, int64_t timeout_ms, const lockstep_site* site,
                        lockstep_work** work) {
  return start(
      "send", group, timeout_ms, site, work,
      [&](const Arguments& call) {
        return call.group().send_async({data, count, call.dtype(dtype)}, dst, call.timeout(),
                                       call.where());
      },
      dst);
}

int lockstep_recv_async(const lockstep_group* group, void* data, size_t count, int dtype, int src,
                        int64_t timeout_ms, const lockstep_site* site, lockstep_work** work) {
  return start(
      "recv", group, timeout_ms, site, work,
      [&](const Arguments& call) {
        return call.group().recv_async({data, count, call.dtype(dtype)}, src, call.timeout(),
                                       call.where());
      },
      src);
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
