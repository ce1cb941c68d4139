#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <lockstep/engine.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "base/fd.hpp"
#include "engines/shared/bootstrap/store_request.hpp"

/// Between a rank of `lockstep run` and its launcher: a socket that the rank inherits. A rank that
/// has left its world asks for the next one; the launcher answers with the segment that all ranks
/// which ask for the same world get: at once, or with --elastic when all of them have asked.
///
/// Each request and each reply is a single message, which arrives entirely or not at all. A request
/// has a number, which its reply repeats: a rank whose request has ended by its limit may ask
/// again, and the launcher answers its newest request. Only the rank's own process sends requests:
/// programs that it starts do not inherit the socket, and a fork of it finds the rank already taken
/// in the segment.
///
/// The ranks of a world of several hosts tell each other their addresses the same way: each gives
/// its own, the launchers send them to each other, and each rank gets all, when all have asked.
///
/// A rank may also ask for the keys and values that the ranks share (store_request.hpp). A request
/// waits until that of another thread has its answer.
namespace lockstep::shared {

/// Two ends; both are closed on exec. Throws SystemError.
struct LauncherSocket {
  base::UniqueFd launcher;
  base::UniqueFd rank;
};
LauncherSocket make_launcher_socket();

// --- the rank's side

/// How a rank of an elastic world was lost.
struct Lost {
  std::int32_t rank;  ///< in its generation
  std::uint32_t generation;
  std::array<char, 240> why;
};

/// What a rank is in its next world.
struct NextWorld {
  base::UniqueFd segment{};
  int rank = 0;  ///< among the `size` ranks of this host
  int size = 0;
  int world_rank = 0;
  int world_size = 0;
  std::uint32_t generation = 0;
  std::vector<Lost> lost{};   ///< since the generation in which this process was last
  std::vector<int> joined{};  ///< ranks of the world that have started since then
};

/// Throws TimeoutError, SystemError, PeerLost (the launcher is gone), EngineError (it ends the
/// job), with the context of `barrier`; its timeout is the limit. Of an elastic world the launcher
/// keeps it, and answers later (is_elastic): this only watches the launcher. last_generation: in
/// which this process was a rank; -1: none.
NextWorld request_next_world(int socket, int rank, std::int64_t last_generation, bool is_elastic,
                             const Call& barrier);

/// What a rank tells the others of its world: text, of which only the ranks know the meaning.
inline constexpr std::size_t kMaxAddressBytes = 1056;

/// What all ranks of a world have told each other.
struct Addresses {
  std::vector<std::string> by_rank{};
  std::vector<int> hosts{};  ///< for each rank the lowest one on its host
  int n_cores = 1;           ///< that the ranks of this host may use together
  std::uint32_t key = 0;     ///< the same on all ranks of the job, and hardly on those of another
};
/// Waits for all ranks of this rank's world. Throws TimeoutError naming those that do not ask, and
/// what request_next_world throws. `world`: how often this process has asked before.
Addresses exchange_addresses(int socket, int rank, int size, std::uint64_t world,
                             const std::string& own, const Call& barrier);
/// `world`: of an elastic job its generation, otherwise 0. Throws PeerLost if it is over,
/// UsageError for a request that is too long, and what request_next_world throws.
StoreAnswer ask_store(int socket, int rank, std::uint64_t world, const StoreRequest& request,
                      const Call& call);

// --- the launcher's side

struct LauncherRequest {
  enum class Kind : std::uint8_t { none, next_world, addresses, store, closed };
  Kind kind;
  std::uint64_t number = 0;
  std::chrono::milliseconds limit{};  ///< of the rank
  std::int64_t last_generation = -1;
  std::uint64_t world = 0;  ///< of addresses and store
  std::string bytes{};      ///< of addresses: the rank's own; of store: see store_request.hpp
};

/// The newest that has come. Does not wait. closed: the rank and its forks have closed their end.
LauncherRequest receive_request(int socket);
/// These drop the reply if the rank is gone. `number`: of the request. `segment`: of next.
void answer(int socket, std::uint64_t number, int segment, const NextWorld& next) noexcept;
/// `memory`: of make_memory_of.
void answer_addresses(int socket, std::uint64_t number, int memory) noexcept;
void answer_store(int socket, std::uint64_t number, std::string_view answer) noexcept;
/// Throws SystemError.
base::UniqueFd make_memory_of(const Addresses& addresses);
/// error_number 0: the job ends, and `text` says why. EOWNERDEAD: the loss of `rank` ended the
/// world before it formed (-1: unknown). ETIMEDOUT: `text` says what did not happen within the
/// limit.
void refuse(int socket, std::uint64_t number, int error_number, std::string_view text,
            int rank = -1) noexcept;

}  // namespace lockstep::shared
