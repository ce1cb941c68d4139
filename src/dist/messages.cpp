#include "dist/messages.hpp"

#include <cxxabi.h>
#include <fmt/format.h>

#include <algorithm>
#include <memory>
#include <numeric>
#include <string>
#include <string_view>

#include <lockstep/detail/collective.hpp>

#include "base/exception.hpp"
#include "base/text.hpp"
#include "group/no_rank_text.hpp"

namespace lockstep::detail {
namespace {

constexpr std::uint64_t kMaxBytes = std::uint64_t{1} << 48;  // a sum over 512 ranks does not wrap

void replace_all(std::string& text, std::string_view what, std::string_view with) {
  for (std::size_t at = 0; (at = text.find(what, at)) != std::string::npos; at += with.size()) {
    text.replace(at, what.size(), with);
  }
}

/// The type as a program writes it: without the default arguments of the standard containers.
std::string readable(const std::type_info& type) {
  int status = 0;
  const std::unique_ptr<char, void (*)(void*)> name(
      abi::__cxa_demangle(type.name(), nullptr, nullptr, &status), std::free);
  if (status != 0) return type.name();
  std::string text = name.get();
  replace_all(text, "std::__cxx11::", "std::");
  replace_all(text, "std::basic_string<char, std::char_traits<char>, std::allocator<char> >",
              "std::string");
  replace_all(text, "(anonymous namespace)::", "");
  for (const std::string_view argument :
       {", std::allocator<", ", std::less<", ", std::hash<", ", std::equal_to<"}) {
    for (std::size_t at = 0; (at = text.find(argument)) != std::string::npos;) {
      std::size_t end = at + argument.size();
      for (int depth = 1; depth > 0 && end < text.size(); ++end) {
        depth += text[end] == '<' ? 1 : text[end] == '>' ? -1 : 0;
      }
      text.erase(at, end - at);
    }
  }
  replace_all(text, " >", ">");
  return text;
}

[[noreturn]] void throw_mismatch(const ObjectCall& call, const std::string& text) {
  throw MismatchError(context_of(call), text);
}

/// Throws if the ranks' values differ: all ranks see the same headers, so all throw.
template <class Value, class Describe>
void check_equal(const ObjectCall& call, const std::vector<MessageHeader>& headers,
                 std::string_view what, Value value, Describe describe) {
  const auto differs = [&](const MessageHeader& header) {
    return value(header) != value(headers.front());
  };
  const auto other = std::find_if(headers.begin(), headers.end(), differs);
  if (other == headers.end()) return;
  throw_mismatch(call, fmt::format("the ranks differ in {}: rank 0 has {}, rank {} has {}; all "
                                   "ranks must have the same. The group stays usable",
                                   what, describe(headers.front()), other - headers.begin(),
                                   describe(*other)));
}

void check_types(const ObjectCall& call, const std::vector<MessageHeader>& headers) {
  const auto first = headers.front().type;
  const auto other = std::find_if(headers.begin(), headers.end(),
                                  [first](const auto& header) { return header.type != first; });
  if (other == headers.end()) return;
  const auto names = exchange_texts(call, readable(call.type));
  const auto rank = static_cast<std::size_t>(other - headers.begin());
  throw_mismatch(call, fmt::format("the ranks have objects of different types: rank 0 has {}, rank "
                                   "{} has {}; give the same type on all ranks. The group stays "
                                   "usable",
                                   names[0], rank, names[rank]));
}

void check_root(const ObjectCall& call) {
  if (call.op == ObjectOp::all_gather_object || call.op == ObjectOp::all_reduce_dict) return;
  if (call.root >= 0 && call.root < call.group.size()) return;
  const char* const parameter = call.op == ObjectOp::gather_object ? "dst" : "src";
  throw UsageError(context_of(call),
                   internal::no_rank_text(parameter, call.root, call.group.size()));
}

ConstElements erased(std::span<const std::byte> bytes) {
  return {.data = bytes.data(), .count = bytes.size(), .dtype = DType::u8};
}
Elements erased(const Bytes& bytes) {
  return {.data = bytes.data(), .count = bytes.size(), .dtype = DType::u8};
}

}  // namespace

void throw_too_deep() {
  throw UsageError({.operation = "object"},
                   fmt::format("the object nests deeper than {} levels; send it flat, as a vector "
                               "of its nodes",
                               kMaxDepth));
}

std::string_view name_of(ObjectOp op) {
  switch (op) {
    case ObjectOp::all_gather_object: return "all_gather_object";
    case ObjectOp::gather_object: return "gather_object";
    case ObjectOp::broadcast_object: return "broadcast_object";
    case ObjectOp::broadcast_object_list: return "broadcast_object_list";
    case ObjectOp::collect_results: return "collect_results";
    case ObjectOp::all_reduce_dict: return "all_reduce_dict";
  }
  return "another function";
}

ErrorContext context_of(const ObjectCall& call) {
  return {.operation = std::string(name_of(call.op)),
          .group = call.group.name(),
          .rank = call.group.rank(),
          .where = call.where};
}

std::vector<MessageHeader> exchange_headers(const ObjectCall& call, const Bytes& mine) {
  std::exception_ptr refusal = call.refusal;
  if (!refusal) {
    try {
      check_root(call);
    } catch (const UsageError&) {
      refusal = std::current_exception();
    }
  }
  const MessageHeader header = seal({.op = call.op,
                                     .failed = refusal ? std::uint8_t{1} : std::uint8_t{0},
                                     .root = call.root,
                                     .type = fingerprint(call.type),
                                     .agreed = call.agreed,
                                     .n_items = call.n_items},
                                    mine.span());
  std::vector<MessageHeader> headers;
  Collective(name_of(call.op), call.group, call.where).run([&] {
    headers.resize(static_cast<std::size_t>(call.group.size()));
    call.group.all_gather(
        {.data = &header, .count = sizeof header, .dtype = DType::u8},
        {.data = headers.data(), .count = headers.size() * sizeof header, .dtype = DType::u8},
        call.limit.timeout(), call.where);
  });
  for (std::size_t r = 0; r < headers.size(); ++r) {
    const auto& theirs = headers[r];
    if (theirs.magic != header.magic || theirs.version != header.version) {
      throw_mismatch(call, fmt::format("rank {} sent no header of version {}; all ranks must call "
                                       "this function, with the same version of lockstep",
                                       r, header.version));
    }
    if (theirs.n_bytes > kMaxBytes || theirs.n_items > kMaxBytes) {
      throw_mismatch(
          call, fmt::format("rank {} announces {} objects of {} bytes, more than fit in memory", r,
                            theirs.n_items, theirs.n_bytes));
    }
  }
  if (std::ranges::any_of(headers, [](const auto& one) { return one.failed != 0; })) {
    agree(call, refusal);  // throws on every rank
  }
  check_equal(
      call, headers, "the function they call", [](const auto& h) { return h.op; },
      [](const auto& h) { return name_of(h.op); });
  check_equal(
      call, headers, call.op == ObjectOp::gather_object ? "dst" : "src",
      [](const auto& h) { return h.root; }, [](const auto& h) { return h.root; });
  check_types(call, headers);
  return headers;
}

void check_agreed(const ObjectCall& call, const std::vector<MessageHeader>& headers,
                  std::string_view what) {
  check_equal(
      call, headers, what, [](const auto& h) { return h.agreed; },
      [](const auto& h) { return h.agreed; });
}

void check_message(const ObjectCall& call, int sender, const MessageHeader& header,
                   std::span<const std::byte> bytes) {
  const std::string flaw = defect_of(header, bytes);
  if (!flaw.empty()) {
    throw_mismatch(call, fmt::format("the message of rank {} {}", sender, flaw));
  }
}

Messages gather_messages(const ObjectCall& call, Bytes mine) {
  const Collective collective(name_of(call.op), call.group, call.where);
  const auto headers = exchange_headers(call, mine);
  return collective.run([&] {
    std::vector<std::size_t> counts;
    for (const auto& header : headers) counts.push_back(header.n_bytes);
    Messages all;
    const bool to_all = call.root < 0;
    if (!to_all && call.root != call.group.rank()) {
      call.group.gather(erased(mine.span()), {}, counts, call.root, call.limit.timeout(),
                        call.where);
      return all;
    }
    all.bytes.resize(std::reduce(counts.begin(), counts.end()));
    if (to_all) {
      call.group.all_gather(erased(mine.span()), erased(all.bytes), counts, call.limit.timeout(),
                            call.where);
    } else {
      call.group.gather(erased(mine.span()), erased(all.bytes), counts, call.root,
                        call.limit.timeout(), call.where);
    }
    auto rest = all.bytes.span();
    for (std::size_t r = 0; r < counts.size(); ++r) {
      all.of_rank.push_back(rest.first(counts[r]));
      rest = rest.subspan(counts[r]);
      check_message(call, static_cast<int>(r), headers[r], all.of_rank.back());
    }
    return all;
  });
}

Bytes broadcast_message(const ObjectCall& call, const Bytes& mine) {
  const Collective collective(name_of(call.op), call.group, call.where);
  const auto headers = exchange_headers(call, mine);
  return collective.run([&] {
    if (call.op == ObjectOp::broadcast_object_list) {
      check_agreed(call, headers, "the lengths of their lists");
    }
    const auto& header = headers[static_cast<std::size_t>(call.root)];
    Bytes received;
    if (call.group.rank() == call.root) {
      call.group.broadcast(erased(mine), call.root, call.limit.timeout(), call.where);
    } else {
      received.resize(header.n_bytes);
      call.group.broadcast(erased(received), call.root, call.limit.timeout(), call.where);
      check_message(call, call.root, header, received.span());
    }
    return received;
  });
}

void throw_undecodable(const ObjectCall& call, int sender, const std::exception& reason) {
  // Otherwise it is the type's own code that threw.
  const bool is_of_bytes = dynamic_cast<const DecodeError*>(&reason) != nullptr;
  throw_mismatch(
      call, fmt::format("the message of rank {} cannot be decoded as {}: {}.{} The group stays "
                        "usable",
                        sender, readable(call.type), reason.what(),
                        is_of_bytes ? " Do the ranks run different builds?" : ""));
}

namespace {

/// The text of an error of this rank, for the others: with the caller's line.
std::string text_with_place(const ObjectCall& call, const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const Error& known) {  // has it
    return known.what();
  } catch (...) {
    return fmt::format("{}, at {}:{}", base::text_of(error),
                       base::base_name(call.where.file_name()), call.where.line());
  }
}

}  // namespace

std::vector<std::string> exchange_texts(const ObjectCall& call, std::string_view mine) {
  return all_gather(std::string(mine), call.group, call.limit.timeout(), call.where);
}

void agree(const ObjectCall& call, const std::exception_ptr& mine) {
  const auto texts =
      exchange_texts(call, mine ? fmt::format("x{}", text_with_place(call, mine)) : "");
  if (mine) std::rethrow_exception(mine);
  for (std::size_t r = 0; r < texts.size(); ++r) {
    if (texts[r].empty()) continue;
    throw PeerFailed(context_of(call), fmt::format("rank {} failed: {}. The group stays usable", r,
                                                   texts[r].substr(1)));
  }
}

}  // namespace lockstep::detail
