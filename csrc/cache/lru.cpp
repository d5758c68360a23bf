#include "cache/entry_list.hpp"
#include "cache/policy.hpp"
#include "cache/policy_parts.hpp"
#include "cache/zeroed_array.hpp"

namespace kvmem {

namespace {

class Lru final : public Policy {
 public:
  explicit Lru(EntryId capacity)
      : links_(std::size_t{capacity} + 1), order_(links_.data(), capacity) {}

  void announce(std::uint64_t /*key_hash*/) noexcept override {}
  bool outranked(double /*value*/) noexcept override { return false; }  // it is the most recent
  void insert(EntryId entry, std::uint64_t /*key_hash*/, double /*value*/) noexcept override {
    order_.add_newest(entry);
  }
  void touch(EntryId entry) noexcept override { order_.make_newest(entry); }
  void remove(EntryId entry) noexcept override { order_.remove(entry); }

  std::optional<EntryId> victim(const MayGo& may_go) noexcept override {
    for (EntryId unseen = order_.size(); unseen > 0; --unseen) {
      const EntryId entry = order_.oldest();
      if (may_go(entry)) {
        order_.remove(entry);
        return entry;
      }
      order_.make_newest(entry);
    }
    return std::nullopt;
  }

  void prefetch(EntryId entry) const noexcept override { __builtin_prefetch(&links_[entry]); }
  std::size_t bytes() const noexcept override { return links_.bytes(); }

 private:
  ZeroedArray<Links> links_;
  EntryList order_;
};

}  // namespace

std::unique_ptr<Policy> make_lru(EntryId capacity) {
  return std::make_unique<Lru>(expect_capacity(capacity));
}

}  // namespace kvmem
