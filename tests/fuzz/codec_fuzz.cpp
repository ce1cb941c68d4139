// Whatever bytes a peer sends, the decoder returns or throws a std::exception, and what it decoded
// encodes again to something that decodes.

#include <cereal/types/array.hpp>
#include <cereal/types/deque.hpp>
#include <cereal/types/list.hpp>
#include <cereal/types/map.hpp>
#include <cereal/types/optional.hpp>
#include <cereal/types/set.hpp>
#include <cereal/types/string.hpp>
#include <cereal/types/tuple.hpp>
#include <cereal/types/unordered_map.hpp>
#include <cereal/types/utility.hpp>
#include <cereal/types/variant.hpp>
#include <cereal/types/vector.hpp>
#include <cstdint>
#include <cstring>
#include <lockstep/detail/codec.hpp>
#include <nlohmann/json.hpp>
#include <stdexcept>

// The decoder alone, so that clang versions without std::source_location can build this.
void lockstep::detail::throw_too_deep() { throw std::length_error("too deep"); }

namespace {

using namespace lockstep::detail;

struct Empty {};

struct Tree {
  std::string name;
  std::vector<Tree> children;
  template <class Archive>
  void serialize(Archive& archive) {
    archive(name, children);
  }
};

using Everything =
    std::tuple<std::map<std::string, std::vector<double>>, std::optional<std::string>,
               std::variant<int, std::string, std::vector<bool>>, std::set<std::int64_t>,
               std::array<float, 3>, std::unordered_map<int, std::pair<bool, char>>,
               std::deque<std::list<int>>, std::vector<Empty>, std::u16string>;

template <class T>
void try_decode(std::span<const std::byte> bytes) {
  T object;
  try {
    decode(bytes, object);
  } catch (const std::exception&) {
    return;
  }
  Bytes again;
  encode(again, object);
  T same;
  decode(again.span(), same);
}

}  // namespace

/// The first byte chooses what the rest is read as.
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size == 0) return 0;
  const auto bytes = std::as_bytes(std::span(data, size)).subspan(1);
  switch (data[0] % 5) {
    case 0: try_decode<Everything>(bytes); break;
    case 1: try_decode<nlohmann::json>(bytes); break;
    case 2: try_decode<Tree>(bytes); break;
    case 3: try_decode<std::vector<std::vector<std::uint16_t>>>(bytes); break;
    case 4: {
      MessageHeader header;
      if (bytes.size() < sizeof header) break;
      std::memcpy(&header, bytes.data(), sizeof header);
      (void)defect_of(header, bytes.subspan(sizeof header));
      break;
    }
  }
  return 0;
}
