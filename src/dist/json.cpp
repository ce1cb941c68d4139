#include <fmt/format.h>

#include <lockstep/detail/codec.hpp>
#include <nlohmann/json.hpp>

namespace lockstep::detail {

using nlohmann::json;

namespace {

/// Wire format; nlohmann's own numbering may change.
enum class Kind : std::uint8_t {
  null,
  boolean,
  integer,
  natural,
  real,
  string,
  binary,
  array,
  object
};

void save_string(Writer& out, const std::string& text) {
  out.write_size(text.size());
  out.write(text.data(), text.size());
}

std::string load_string(Reader& in) {
  std::string text(in.read_size(), '\0');
  in.read(text.data(), text.size());
  return text;
}

template <class T>
T load_number(Reader& in) {
  T value{};
  in(value);
  return value;
}

}  // namespace

void save_json(Writer& out, const json& value) {
  const auto kind = [&out](Kind k) { out(static_cast<std::uint8_t>(k)); };
  switch (value.type()) {
    case json::value_t::null:
    case json::value_t::discarded: return kind(Kind::null);
    case json::value_t::boolean: kind(Kind::boolean); return out(value.get<bool>()), void();
    case json::value_t::number_integer:
      kind(Kind::integer);
      return out(value.get<std::int64_t>()), void();
    case json::value_t::number_unsigned:
      kind(Kind::natural);
      return out(value.get<std::uint64_t>()), void();
    case json::value_t::number_float: kind(Kind::real); return out(value.get<double>()), void();
    case json::value_t::string:
      kind(Kind::string);
      return save_string(out, value.get_ref<const std::string&>());
    case json::value_t::binary: {
      kind(Kind::binary);
      const auto& bytes = value.get_binary();
      out(bytes.has_subtype(), bytes.has_subtype() ? std::uint64_t{bytes.subtype()} : 0);
      out.write_size(bytes.size());
      return out.write(bytes.data(), bytes.size());
    }
    case json::value_t::array:
      kind(Kind::array);
      out.write_size(value.size());
      for (const json& element : value) out(element);
      return;
    case json::value_t::object:
      kind(Kind::object);
      out.write_size(value.size());
      for (const auto& [key, element] : value.items()) {
        save_string(out, key);
        out(element);
      }
      return;
  }
}

void load_json(Reader& in, json& value) {
  const auto kind = load_number<std::uint8_t>(in);
  switch (static_cast<Kind>(kind)) {
    case Kind::null: value = nullptr; return;
    case Kind::boolean: value = load_number<bool>(in); return;
    case Kind::integer: value = load_number<std::int64_t>(in); return;
    case Kind::natural: value = load_number<std::uint64_t>(in); return;
    case Kind::real: value = load_number<double>(in); return;
    case Kind::string: value = load_string(in); return;
    case Kind::binary: {
      const bool has_subtype = load_number<bool>(in);
      const auto subtype = load_number<std::uint64_t>(in);
      std::vector<std::uint8_t> bytes(in.read_size());
      in.read(bytes.data(), bytes.size());
      value =
          has_subtype ? json::binary(std::move(bytes), subtype) : json::binary(std::move(bytes));
      return;
    }
    case Kind::array: {
      value = json::array();
      for (std::uint64_t n = in.read_size(); n > 0; --n) in(value.emplace_back());
      return;
    }
    case Kind::object: {
      value = json::object();
      for (std::uint64_t n = in.read_size(); n > 0; --n) {
        const std::string key = load_string(in);
        in(value[key]);
      }
      return;
    }
  }
  throw DecodeError(fmt::format("a json value is of kind {}", kind));
}

}  // namespace lockstep::detail
