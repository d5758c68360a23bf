// A bare hash map of keys, which any index comes down to: it holds nothing and orders nothing.
#pragma once

#include <array>
#include <cstdint>
#include <cstring>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace kvmem::bench {

class BareMap {
 public:
  static constexpr std::size_t key_bytes = 32;

  // `keys`: digests of 32 bytes one behind the other, so their first bytes are a hash already.
  explicit BareMap(std::string_view keys) {
    entries_.reserve(keys.size() / key_bytes);
    for (std::size_t at = 0; at + key_bytes <= keys.size(); at += key_bytes)
      entries_.emplace(key_at(keys, at), static_cast<std::uint32_t>(at / key_bytes));
  }
  // How many of these are there.
  [[nodiscard]] std::size_t find(std::string_view keys) const {
    std::size_t found = 0;
    for (std::size_t at = 0; at + key_bytes <= keys.size(); at += key_bytes)
      found += entries_.contains(key_at(keys, at));
    return found;
  }

 private:
  using Key = std::array<char, key_bytes>;
  struct FirstBytes {
    std::size_t operator()(const Key& key) const noexcept {
      std::size_t hash = 0;
      std::memcpy(&hash, key.data(), sizeof hash);
      return hash;
    }
  };
  static Key key_at(std::string_view keys, std::size_t at) {
    Key key;
    std::memcpy(key.data(), keys.data() + at, key_bytes);
    return key;
  }

  std::unordered_map<Key, std::uint32_t, FirstBytes> entries_;
};

}  // namespace kvmem::bench
