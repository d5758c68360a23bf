#include "cache/owner_books.hpp"

#include <algorithm>

#include "base/check.hpp"

namespace kvmem {

void expect_budget(const ThrashBudget& budget) {
  const auto positive = [](const char* name, const std::optional<double>& limit, double most) {
    KVMEM_EXPECTS(!limit || (*limit > 0 && *limit <= most), name, " is ", limit.value_or(0),
                  ", which must be more than 0 and at most ", most);
  };
  positive("max_bytes_per_token", budget.max_bytes_per_token, 1e18);
  positive("max_unused_share", budget.max_unused_share, 1);
  positive("max_again_share", budget.max_again_share, 1);
  KVMEM_EXPECTS(budget.resume >= 0 && budget.resume <= 1, "resume is ", budget.resume,
                ", which must be 0 to 1");
}

OwnerBooks::OwnerBooks(const ThrashBudget& budget, std::size_t max_owners)
    : budget_(budget), max_owners_(max_owners) {
  expect_budget(budget);
}

void OwnerBooks::open(const std::string& owner) {
  if (owners_.size() < max_owners_) owners_.try_emplace(owner);
}

OwnerBooks::Book* OwnerBooks::book(const std::string& owner) {
  const auto found = owners_.find(owner);
  return found == owners_.end() ? nullptr : &found->second;
}

void OwnerBooks::note_offload(const std::string& owner, std::uint64_t blocks, std::uint64_t bytes,
                              std::uint64_t again) {
  const auto note = [&](OwnerCounts& counts) {
    counts.offloads += blocks;
    counts.offloaded_bytes += bytes;
    counts.offloaded_again += again;
  };
  note(total_);
  if (Book* const its = book(owner)) note(its->counts);
}

void OwnerBooks::note_restore(const std::string& owner, std::uint64_t blocks, std::uint64_t bytes) {
  const auto note = [&](OwnerCounts& counts) {
    counts.restores += blocks;
    counts.restored_bytes += bytes;
  };
  note(total_);
  Book* const its = book(owner);
  if (its == nullptr || blocks == 0) return;
  note(its->counts);
  its->counts.unused_bytes += its->fresh_bytes;  // restored again: the first time was for nothing
  total_.unused_bytes += its->fresh_bytes;
  its->fresh_bytes = bytes;
}

void OwnerBooks::note_tokens(const std::string& owner, std::uint64_t count) {
  total_.tokens += count;
  open(owner);
  Book* const its = book(owner);
  if (its == nullptr) return;
  its->counts.tokens += count;
  if (count > 0) its->fresh_bytes = 0;
}

void OwnerBooks::drop(const std::string& owner) {
  const auto found = owners_.find(owner);
  if (found == owners_.end()) return;
  total_.unused_bytes += found->second.fresh_bytes;
  owners_.erase(found);
}

double OwnerBooks::strain(const OwnerCounts& counts, std::string& words) const {
  const std::uint64_t moved = counts.offloaded_bytes + counts.restored_bytes;
  if (moved < budget_.least_bytes) return 0;
  double worst = 0;
  const auto judge = [&](const char* what, double value, const std::optional<double>& limit) {
    if (!limit || value / *limit <= worst) return;
    worst = value / *limit;
    words = text(what, " is ", value, ", and the budget is ", *limit);
  };
  // Of none generated: as if of one.
  judge("bytes moved per generated token",
        static_cast<double>(moved) / static_cast<double>(std::max<std::uint64_t>(counts.tokens, 1)),
        budget_.max_bytes_per_token);
  const auto share = [](std::uint64_t part, std::uint64_t whole) {
    return whole == 0 ? 0.0 : static_cast<double>(part) / static_cast<double>(whole);
  };
  judge("the share of restored bytes that were never used",
        share(counts.unused_bytes, counts.restored_bytes), budget_.max_unused_share);
  // What was refused counts as not offloaded again, or who is refused would be so for ever.
  judge("the share of blocks offloaded again",
        share(counts.offloaded_again, counts.offloads + counts.refused), budget_.max_again_share);
  return worst;
}

std::optional<std::string> OwnerBooks::refuses(const std::string& owner, std::uint64_t blocks) {
  const auto found = owners_.find(owner);
  if (found == owners_.end()) return std::nullopt;
  Book& its = found->second;
  std::string words;
  const double now = strain(its.counts, words);
  its.refusing = its.refusing ? now > budget_.resume : now > 1;
  if (!its.refusing) return std::nullopt;
  its.counts.refused += blocks;
  total_.refused += blocks;
  return text("thrash: of owner '", owner, "' ", words, " (until it is ", budget_.resume,
              " times that)");
}

std::optional<OwnerCounts> OwnerBooks::of(const std::string& owner) const {
  const auto found = owners_.find(owner);
  return found == owners_.end() ? std::nullopt : std::optional(found->second.counts);
}

}  // namespace kvmem
