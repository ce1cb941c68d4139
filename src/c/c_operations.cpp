#include <lockstep/lockstep.h>

#include <numeric>
#include <span>

#include "c/handles.hpp"
#include "c/last_error.hpp"

using lockstep::c::Arguments;
using lockstep::c::guarded;

namespace {

template <class F>
int run(const char* operation, const lockstep_group* group, int64_t timeout_ms,
        const lockstep_site* site, F body, int peer = -1) noexcept {
  return guarded(operation, [&] { body(Arguments(operation, group, timeout_ms, site, peer)); });
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

int lockstep_barrier(const lockstep_group* group, int64_t timeout_ms, const lockstep_site* site) {
  return run("barrier", group, timeout_ms, site,
             [&](const Arguments& call) { call.group().barrier(call.timeout(), call.where()); });
}

int lockstep_all_reduce(const lockstep_group* group, void* data, size_t count, int dtype,
                        int reduction, int64_t timeout_ms, const lockstep_site* site) {
  return run("all_reduce", group, timeout_ms, site, [&](const Arguments& call) {
    call.group().all_reduce({data, count, call.dtype(dtype)}, call.reduction(reduction),
                            call.timeout(), call.where());
  });
}

int lockstep_reduce(const lockstep_group* group, void* data, size_t count, int dtype, int reduction,
                    int dst, int64_t timeout_ms, const lockstep_site* site) {
  return run("reduce", group, timeout_ms, site, [&](const Arguments& call) {
    call.group().reduce({data, count, call.dtype(dtype)}, dst, call.reduction(reduction),
                        call.timeout(), call.where());
  });
}

int lockstep_broadcast(const lockstep_group* group, void* data, size_t count, int dtype, int src,
                       int64_t timeout_ms, const lockstep_site* site) {
  return run("broadcast", group, timeout_ms, site, [&](const Arguments& call) {
    call.group().broadcast({data, count, call.dtype(dtype)}, src, call.timeout(), call.where());
  });
}

int lockstep_all_gather(const lockstep_group* group, const void* in, void* out, size_t count,
                        int dtype, int64_t timeout_ms, const lockstep_site* site) {
  return run("all_gather", group, timeout_ms, site, [&](const Arguments& call) {
    call.group().all_gather({in, count, call.dtype(dtype)},
                            {out, call.count_of_all(count), call.dtype(dtype)}, call.timeout(),
                            call.where());
  });
}

int lockstep_all_gather_v(const lockstep_group* group, const void* in, void* out,
                          const size_t* counts, int dtype, int64_t timeout_ms,
                          const lockstep_site* site) {
  return run("all_gather", group, timeout_ms, site, [&](const Arguments& call) {
    call.group().all_gather({in, count_of_this_rank(call, counts), call.dtype(dtype)},
                            {out, sum_of(call, counts), call.dtype(dtype)}, counts_of(call, counts),
                            call.timeout(), call.where());
  });
}

int lockstep_gather(const lockstep_group* group, const void* in, void* out, size_t count, int dtype,
                    int dst, int64_t timeout_ms, const lockstep_site* site) {
  return run("gather", group, timeout_ms, site, [&](const Arguments& call) {
    call.group().gather({in, count, call.dtype(dtype)},
                        {out, call.count_of_all(count), call.dtype(dtype)}, dst, call.timeout(),
                        call.where());
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

int lockstep_scatter(const lockstep_group* group, const void* in, void* out, size_t count,
                     int dtype, int src, int64_t timeout_ms, const lockstep_site* site) {
  return run("scatter", group, timeout_ms, site, [&](const Arguments& call) {
    call.group().scatter({in, call.count_of_all(count), call.dtype(dtype)},
                         {out, count, call.dtype(dtype)}, src, call.timeout(), call.where());
  });
}

int lockstep_reduce_scatter(const lockstep_group* group, const void* in, void* out, size_t count,
                            int dtype, int reduction, int64_t timeout_ms,
                            const lockstep_site* site) {
  return run("reduce_scatter", group, timeout_ms, site, [&](const Arguments& call) {
    call.group().reduce_scatter({in, call.count_of_all(count), call.dtype(dtype)},
                                {out, count, call.dtype(dtype)}, call.reduction(reduction),
                                call.timeout(), call.where());
  });
}

int lockstep_all_to_all(const lockstep_group* group, const void* in, void* out, size_t count,
                        int dtype, int64_t timeout_ms, const lockstep_site* site) {
  return run("all_to_all", group, timeout_ms, site, [&](const Arguments& call) {
    call.group().all_to_all({in, call.count_of_all(count), call.dtype(dtype)},
                            {out, call.count_of_all(count), call.dtype(dtype)}, call.timeout(),
                            call.where());
  });
}

int lockstep_send(const lockstep_group* group, const void* data, size_t count, int dtype, int dst,
                  int64_t timeout_ms, const lockstep_site* site) {
  return run(
      "send", group, timeout_ms, site,
      [&](const Arguments& call) {
        call.group().send({data, count, call.dtype(dtype)}, dst, call.timeout(), call.where());
      },
      dst);
}

int lockstep_recv(const lockstep_group* group, void* data, size_t count, int dtype, int src,
                  int64_t timeout_ms, const lockstep_site* site) {
  return run(
      "recv", group, timeout_ms, site,
      [&](const Arguments& call) {
        call.group().recv({data, count, call.dtype(dtype)}, src, call.timeout(), call.where());
      },
      src);
}
