#pragma once

#include <stdexcept>
#include <string>

namespace lockstep::test {

/// Cannot be sent when its text says so, and cannot be read when that says so.
struct Fragile {
  std::string text;
  template <class Archive>
  void save(Archive& archive) const {
    if (text == "unsendable") throw std::runtime_error("this one does not travel");
    archive(text);
  }
  template <class Archive>
  void load(Archive& archive) {
    archive(text);
    if (text == "unreadable") throw std::runtime_error("this one does not arrive");
  }
};

}  // namespace lockstep::test
