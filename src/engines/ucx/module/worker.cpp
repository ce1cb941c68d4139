#include "engines/ucx/module/worker.hpp"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>

namespace lockstep::ucx_module {
namespace {

using std::chrono::milliseconds;

/// In all: a worker that is closed soon after one that took so long is not flushed.
constexpr milliseconds kMostToClose{1000};
using Clock = std::chrono::steady_clock;
std::atomic<Clock::rep> last_stuck{0};
const pid_t owner = ::getpid();

std::mutex context_mutex;
/// One for all workers, never destroyed: a program's globals may hold groups.
ucp_context_h context = nullptr;

void on_error(void* peer, ucp_ep_h /*endpoint*/, ucs_status_t status) {
  static_cast<Worker::Peer*>(peer)->status = status;
}

}  // namespace

bool is_own_process() { return ::getpid() == owner; }

int start(const char* transports) {
  const std::lock_guard lock(context_mutex);
  if (context != nullptr) return 0;
  ucp_config_t* config = nullptr;
  ucs_status_t status = ucp_config_read(nullptr, nullptr, &config);
  if (status != UCS_OK) return -status;
  status = ucp_config_modify(config, "TLS", transports);
  ucp_params_t params{};
  params.field_mask = UCP_PARAM_FIELD_FEATURES | UCP_PARAM_FIELD_MT_WORKERS_SHARED;
  params.features = UCP_FEATURE_TAG;
  params.mt_workers_shared = 1;
  if (status == UCS_OK) status = ucp_init(&params, config, &context);
  ucp_config_release(config);
  return -status;
}

int Worker::make(std::unique_ptr<Worker>& worker) {
  std::unique_ptr<Worker> made(new Worker);
  ucp_worker_params_t params{};
  params.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE;
  params.thread_mode = UCS_THREAD_MODE_SERIALIZED;
  if (const auto status = ucp_worker_create(context, &params, &made->worker_); status != UCS_OK) {
    made->worker_ = nullptr;
    return -status;
  }
  worker = std::move(made);
  return 0;
}

Worker::~Worker() {
  if (worker_ == nullptr || is_stuck || !is_own_process()) return;
  const Clock::duration since_stuck = Clock::now().time_since_epoch() - Clock::duration(last_stuck);
  const bool flushes = since_stuck > 10 * kMostToClose;
  std::vector<void*> closing;
  for (Peer& peer : peers_) {
    if (peer.endpoint == nullptr) continue;
    void* const request =
        ucp_ep_close_nb(peer.endpoint, flushes && peer.status == UCS_OK ? UCP_EP_CLOSE_MODE_FLUSH
                                                                        : UCP_EP_CLOSE_MODE_FORCE);
    if (UCS_PTR_IS_PTR(request)) closing.push_back(request);
  }
  const bool are_closed = progress_until(
      flushes ? kMostToClose : kMostToClose / 20, [this] { return progress(); },
      [&] {
        return std::all_of(closing.begin(), closing.end(), [](void* request) {
          return ucp_request_check_status(request) != UCS_INPROGRESS;
        });
      });
  if (!are_closed && flushes) last_stuck = Clock::now().time_since_epoch().count();
  for (void* const request : closing) ucp_request_free(request);
  ucp_worker_destroy(worker_);
}

int Worker::address(LockstepUcxAddress& address) {
  ucp_worker_attr_t attributes{};
  attributes.field_mask = UCP_WORKER_ATTR_FIELD_ADDRESS | UCP_WORKER_ATTR_FIELD_ADDRESS_FLAGS;
  attributes.address_flags = UCP_WORKER_ADDRESS_FLAG_NET_ONLY;
  if (const auto status = ucp_worker_query(worker_, &attributes); status != UCS_OK) return -status;
  const bool fits = attributes.address_length <= address.bytes.size();
  if (fits) {
    address = {};
    address.n_bytes = static_cast<std::uint32_t>(attributes.address_length);
    std::memcpy(address.bytes.data(), attributes.address, address.n_bytes);
  }
  ucp_worker_release_address(worker_, attributes.address);
  return fits ? 0 : -UCS_ERR_EXCEEDS_LIMIT;
}

void Worker::set_peers(const LockstepUcxAddress* addresses, std::size_t n) {
  peers_.resize(n);
  for (std::size_t i = 0; i < n; ++i) {
    const std::size_t n_bytes =
        std::min<std::size_t>(addresses[i].n_bytes, addresses[i].bytes.size());
    peers_[i].address.assign(addresses[i].bytes.data(), n_bytes);
  }
}

int Worker::connect(std::size_t i, Peer*& peer) {
  peer = &peers_[i];
  if (peer->endpoint != nullptr) return peer->status == UCS_OK ? 0 : -peer->status;
  ucp_ep_params_t params{};
  params.field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE |
                      UCP_EP_PARAM_FIELD_ERR_HANDLER;
  params.address = reinterpret_cast<const ucp_address_t*>(peer->address.data());
  params.err_mode = UCP_ERR_HANDLING_MODE_PEER;
  params.err_handler.cb = on_error;
  params.err_handler.arg = peer;
  const ucs_status_t status = ucp_ep_create(worker_, &params, &peer->endpoint);
  if (status == UCS_OK) return 0;
  peer->endpoint = nullptr;
  return -status;
}

}  // namespace lockstep::ucx_module
