#pragma once

#include <exception>
#include <lockstep/error.hpp>
#include <lockstep/objects.hpp>
#include <string>
#include <vector>

namespace lockstep::detail {

std::string_view name_of(ObjectOp op);
ErrorContext context_of(const ObjectCall& call);

/// Sends this rank's header to all ranks. Checks that all belong to one call, except `agreed`.
std::vector<MessageHeader> exchange_headers(const ObjectCall& call, const Bytes& mine);
/// Throws MismatchError on every rank if `agreed` differs; `what` names it.
void check_agreed(const ObjectCall& call, const std::vector<MessageHeader>& headers,
                  std::string_view what);
/// Throws MismatchError if the message of `sender` is damaged.
void check_message(const ObjectCall& call, int sender, const MessageHeader& header,
                   std::span<const std::byte> bytes);

/// Every rank's text, on every rank.
std::vector<std::string> exchange_texts(const ObjectCall& call, std::string_view mine);
/// Exchanges the outcome of a step. Rethrows this rank's error; throws PeerFailed if only other
/// ranks failed.
void agree(const ObjectCall& call, const std::exception_ptr& mine);

}  // namespace lockstep::detail
