// Which blocks of one side unfinished transfers read and write: two counts a block, 8 bytes.
//
// Not thread-safe: the manager's lock guards it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "base/check.hpp"

namespace kvmem {

enum class Access : std::uint8_t { read, write };

class BlockUses {
 public:
  explicit BlockUses(std::size_t count) : uses_(count) {}

  [[nodiscard]] bool in_use(std::size_t block) const noexcept {
    return uses_[block].readers + uses_[block].writers > 0;
  }
  [[nodiscard]] std::size_t written() const noexcept { return written_; }  // blocks with a writer

  // Readers go together; a writer goes with nobody.
  template <class Id>
  [[nodiscard]] bool conflicts(const std::vector<Id>& blocks, Access access) const noexcept {
    return std::ranges::any_of(blocks, [&](Id block) {
      const Use& use = uses_[static_cast<std::size_t>(block)];
      return use.writers > 0 || (access == Access::write && use.readers > 0);
    });
  }

  template <class Id>
  void begin(const std::vector<Id>& blocks, Access access) noexcept {
    for (const Id block : blocks) {
      Use& use = uses_[static_cast<std::size_t>(block)];
      if (access == Access::read)
        ++use.readers;
      else if (use.writers++ == 0)
        ++written_;
    }
  }

  template <class Ids>
  void end(const Ids& blocks, Access access) noexcept {
    for (const auto block : blocks) {
      Use& use = uses_[static_cast<std::size_t>(block)];
      KVMEM_INVARIANT(access == Access::read ? use.readers > 0 : use.writers > 0);
      if (access == Access::read)
        --use.readers;
      else if (--use.writers == 0)
        --written_;
    }
  }

 private:
  struct Use {
    std::uint32_t readers = 0;
    std::uint32_t writers = 0;
  };
  std::vector<Use> uses_;
  std::size_t written_ = 0;
};

}  // namespace kvmem
