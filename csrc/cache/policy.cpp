#include "cache/policy.hpp"

#include <algorithm>
#include <cmath>
#include <unordered_map>
#include <vector>

#include "cache/policy_parts.hpp"

namespace kvmem {

std::string_view name_of(PolicyKind kind) noexcept {
  switch (kind) {
    case PolicyKind::lru:
      return "lru";
    case PolicyKind::arc:
      return "arc";
    case PolicyKind::gdsf:
      return "gdsf";
  }
  return "?";
}

PolicyKind policy_named(std::string_view name) {
  std::string known;
  for (const PolicyKind kind : policy_kinds) {
    if (name == name_of(kind)) return kind;
    known += text(known.empty() ? "" : ", ", name_of(kind));
  }
  throw InvalidArgument(text("policy is '", name, "', none of ", known));
}

std::unique_ptr<Policy> make_policy(PolicyKind kind, EntryId capacity) {
  switch (kind) {
    case PolicyKind::lru:
      return make_lru(capacity);
    case PolicyKind::arc:
      return make_arc(capacity);
    case PolicyKind::gdsf:
      return make_gdsf(capacity);
  }
  throw InvalidArgument(text("policy is number ", static_cast<int>(kind), ", which none has"));
}

// ---- a cache that does nothing but ask a policy ----

namespace {

class Anything final : public MayGo {
 public:
  bool operator()(EntryId /*entry*/) const noexcept override { return true; }
};

class BareCache {
 public:
  BareCache(PolicyKind kind, EntryId capacity)
      : policy_(make_policy(kind, capacity)), key_of_(capacity) {
    entries_.reserve(capacity);
  }

  bool access(std::uint64_t key, double value) {  // whether it hits
    if (const auto found = entries_.find(key); found != entries_.end()) {
      policy_->touch(found->second);
      return true;
    }
    policy_->announce(key);
    if (entries_.size() == key_of_.size() && policy_->outranked(value)) return false;
    const EntryId entry = take_entry();
    key_of_[entry] = key;
    entries_.emplace(key, entry);
    policy_->insert(entry, key, value);
    return false;
  }

 private:
  EntryId take_entry() {
    if (entries_.size() < key_of_.size()) return static_cast<EntryId>(entries_.size());
    const EntryId entry = policy_->victim(Anything()).value();
    entries_.erase(key_of_[entry]);
    return entry;
  }

  std::unique_ptr<Policy> policy_;
  std::vector<std::uint64_t> key_of_;
  std::unordered_map<std::uint64_t, EntryId> entries_;
};

}  // namespace

std::uint64_t count_hits(PolicyKind kind, EntryId capacity, std::span<const std::uint64_t> keys,
                         std::span<const double> values, std::span<std::uint8_t> hit) {
  static_cast<void>(expect_capacity(capacity));
  KVMEM_EXPECTS(values.empty() || values.size() == keys.size(), "there are ", values.size(),
                " values for ", keys.size(), " keys");
  KVMEM_EXPECTS(hit.empty() || hit.size() == keys.size(), "there is room for ", hit.size(),
                " hits, and there are ", keys.size(), " keys");
  for (std::size_t i = 0; i < values.size(); ++i) {
    KVMEM_EXPECTS(std::isfinite(values[i]) && values[i] > 0, "values[", i, "] is ", values[i],
                  ", which must be positive and finite");
  }
  if (keys.empty()) return 0;
  // One with room for each access never evicts; more room changes nothing.
  BareCache cache(kind, static_cast<EntryId>(std::min<std::size_t>(capacity, keys.size())));
  std::uint64_t hits = 0;
  for (std::size_t i = 0; i < keys.size(); ++i) {
    const bool is_hit = cache.access(keys[i], values.empty() ? 1.0 : values[i]);
    if (!hit.empty()) hit[i] = is_hit;
    hits += is_hit;
  }
  return hits;
}

}  // namespace kvmem
