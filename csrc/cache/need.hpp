// What of each group a hit needs, and how long a prefix is usable when only some blocks are there.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>

#include "cache/entries.hpp"

namespace kvmem {

// What of a group a hit of so many blocks needs.
enum class NeedKind : std::uint8_t {
  all,   // every block: full attention
  last,  // the last `count` blocks: a sliding window
  state  // the last block alone: recurrent state, which stands for all before it
};
struct Need {
  NeedKind kind = NeedKind::all;
  std::size_t count = 0;  // of NeedKind::last, at least 1
};

// Which of the keys: [first, last).
struct KeyRange {
  std::size_t first = 0, last = 0;
};

[[nodiscard]] constexpr KeyRange needed(const Need& need, std::size_t length) noexcept {
  const std::size_t count = need.kind == NeedKind::all     ? length
                            : need.kind == NeedKind::state ? 1
                                                           : need.count;
  return {length - std::min(count, length), length};
}

struct GroupNeed {
  GroupIndex group = 0;
  Need need;
};

// The longest length, of at most `keys`, whose needs are all there: there(group, position).
template <class There>
[[nodiscard]] std::size_t longest_usable(std::span<const GroupNeed> needs, std::size_t keys,
                                         const There& there) noexcept {
  std::size_t longest = keys;
  for (const auto& [group, need] : needs) {
    if (need.kind != NeedKind::all) continue;
    std::size_t here = 0;
    while (here < longest && there(group, here)) ++here;
    longest = here;
  }
  for (bool agreed = false; !agreed;) {
    agreed = true;
    for (const auto& [group, need] : needs) {
      if (need.kind == NeedKind::all) continue;
      const KeyRange range = needed(need, longest);
      for (std::size_t i = range.last; i-- > range.first;) {
        if (there(group, i)) continue;
        longest = i;  // each longer one needs this one too
        agreed = false;
        break;
      }
    }
  }
  return longest;
}

}  // namespace kvmem
