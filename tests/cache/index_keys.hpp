// Keys that a test can name by a number.
#pragma once

#include <array>
#include <cstring>
#include <vector>

#include "cache/index.hpp"

namespace kvmem::test {

class Keys {
 public:
  static constexpr std::size_t bytes = 20;  // no multiple of 8, so that every part of a key counts

  Keys(std::initializer_list<std::uint64_t> numbers) {
    for (const std::uint64_t number : numbers) add(number);
  }
  explicit Keys(const std::vector<std::uint64_t>& numbers) {
    for (const std::uint64_t number : numbers) add(number);
  }
  // first, first + 1, ... count of them
  static Keys chain(std::uint64_t first, std::size_t count) {
    Keys keys{};
    for (std::size_t i = 0; i < count; ++i) keys.add(first + i);
    return keys;
  }

  void add(std::uint64_t number) {
    Key key{};
    std::memcpy(key.data() + bytes - sizeof number, &number, sizeof number);
    keys_.push_back(key);
  }
  [[nodiscard]] std::vector<const std::byte*> pointers() const {
    std::vector<const std::byte*> all;
    for (const Key& key : keys_) all.push_back(key.data());
    return all;
  }
  [[nodiscard]] std::size_t size() const { return keys_.size(); }

 private:
  using Key = std::array<std::byte, bytes>;
  std::vector<Key> keys_;
};

}  // namespace kvmem::test
