// Groups and shared buffers.
#include <lockstep/lockstep.h>

#include <memory>

#include "c/handles.hpp"
#include "c/last_error.hpp"

using lockstep::c::Arguments;
using lockstep::c::guarded;

int lockstep_group_split(const lockstep_group* parent, int color, int key, lockstep_group** group,
                         const lockstep_site* site) {
  return guarded("split", [&] {
    const Arguments call("split", parent, LOCKSTEP_GROUP_TIMEOUT, site);
    call.check_given(group, "the group to return");
    *group =
        std::make_unique<lockstep_group>(call.group().split(color, key, call.where())).release();
  });
}

int lockstep_group_duplicate(const lockstep_group* parent, lockstep_group** group,
                             const lockstep_site* site) {
  return lockstep_group_split(parent, /*color=*/0, /*key=*/-1, group, site);
}

void lockstep_group_free(lockstep_group* group) { delete group; }

int lockstep_group_rank(const lockstep_group* group) {
  return group == nullptr ? -1 : group->group.rank();
}
int lockstep_group_size(const lockstep_group* group) {
  return group == nullptr ? -1 : group->group.size();
}
int64_t lockstep_group_timeout_ms(const lockstep_group* group) {
  return group == nullptr ? -1 : static_cast<int64_t>(group->group.timeout().count());
}
const char* lockstep_group_name(const lockstep_group* group) {
  return group == nullptr ? nullptr : group->name.c_str();
}
const char* lockstep_group_backend(const lockstep_group* group) {
  return group == nullptr ? nullptr : group->backend.c_str();
}

int lockstep_group_abandon(const lockstep_group* group, const char* reason) {
  return guarded("abandon", [&] {
    const Arguments call("abandon", group, LOCKSTEP_GROUP_TIMEOUT, /*site=*/nullptr);
    call.group().abandon(reason == nullptr ? "no reason was given" : reason);
  });
}

int lockstep_buffer_allocate(const lockstep_group* group, size_t n_bytes, lockstep_buffer** buffer,
                             const lockstep_site* site) {
  return guarded("allocate", [&] {
    const Arguments call("allocate", group, LOCKSTEP_GROUP_TIMEOUT, site);
    call.check_given(buffer, "the buffer to return");
    auto handle = std::make_unique<lockstep_buffer>();
    handle->buffer = call.group().allocate(n_bytes, call.where());
    *buffer = handle.release();
  });
}

void* lockstep_buffer_data(const lockstep_buffer* buffer) {
  return buffer == nullptr ? nullptr : buffer->buffer.data();
}
size_t lockstep_buffer_size(const lockstep_buffer* buffer) {
  return buffer == nullptr ? 0 : buffer->buffer.size();
}
void lockstep_buffer_free(lockstep_buffer* buffer) { delete buffer; }
