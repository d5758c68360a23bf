// What each owner (a request) moved and what came of it, and a budget that ends thrash.
//
// Thrash is state that goes back and forth and serves nothing: blocks offloaded again, blocks
// restored and dropped before a token came of them, many bytes a token. Each is a ratio of an
// owner's own counts. Once one of them exceeds its limit, copies of this owner to the host are
// refused until all are below `resume` times their limits.
//
// Not thread-safe. At most `max_owners` have books of their own; others count in the total alone.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <unordered_map>

namespace kvmem {

struct ThrashBudget {                         // no limit where there is none
  std::optional<double> max_bytes_per_token;  // both ways, over tokens generated
  std::optional<double> max_unused_share;     // restored and never used, of all restored bytes
  std::optional<double> max_again_share;      // offloaded again, of all offloaded blocks
  double resume = 0.5;                        // 0 to 1
  std::uint64_t least_bytes = std::uint64_t{64} << 20;  // moved, before anything is judged
};
void expect_budget(const ThrashBudget& budget);  // throws InvalidArgument

struct OwnerCounts {
  std::uint64_t offloads = 0, restores = 0;  // blocks that arrived
  std::uint64_t offloaded_bytes = 0, restored_bytes = 0;
  std::uint64_t offloaded_again = 0;  // blocks whose key had been stored before and was gone
  std::uint64_t unused_bytes = 0;     // restored, and dropped or restored again before a token
  std::uint64_t tokens = 0;           // generated
  std::uint64_t refused = 0;          // blocks, by the budget

  // 0 while there are no tokens.
  [[nodiscard]] double bytes_per_token() const noexcept {
    return tokens == 0 ? 0.0
                       : static_cast<double>(offloaded_bytes + restored_bytes) /
                             static_cast<double>(tokens);
  }
};

class OwnerBooks {
 public:
  OwnerBooks(const ThrashBudget& budget, std::size_t max_owners);

  // A book of its own, unless there are too many. What ends after drop() counts in the total alone.
  void open(const std::string& owner);
  void note_offload(const std::string& owner, std::uint64_t blocks, std::uint64_t bytes,
                    std::uint64_t again);
  void note_restore(const std::string& owner, std::uint64_t blocks, std::uint64_t bytes);
  void note_tokens(const std::string& owner, std::uint64_t count);
  void drop(const std::string& owner);

  // Why the owner may not offload now, in words, or nothing; `blocks` of it count as refused.
  [[nodiscard]] std::optional<std::string> refuses(const std::string& owner, std::uint64_t blocks);

  [[nodiscard]] std::optional<OwnerCounts> of(const std::string& owner) const;
  [[nodiscard]] const OwnerCounts& total() const noexcept { return total_; }
  [[nodiscard]] std::size_t size() const noexcept { return owners_.size(); }

 private:
  struct Book {
    OwnerCounts counts;
    std::uint64_t fresh_bytes = 0;  // restored, and no token since
    bool refusing = false;
  };
  [[nodiscard]] Book* book(const std::string& owner);
  // The worst ratio to its limit and its words; 0 where nothing is judged.
  [[nodiscard]] double strain(const OwnerCounts& counts, std::string& words) const;

  ThrashBudget budget_;
  std::size_t max_owners_;
  std::unordered_map<std::string, Book> owners_;
  OwnerCounts total_;
};

}  // namespace kvmem
