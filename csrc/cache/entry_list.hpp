// Entries in the order in which they were used: a ring through an array of links that several lists
// may share. An entry is in one of them at most.
#pragma once

#include "cache/policy.hpp"

namespace kvmem {

struct Links {
  EntryId older, newer;
};

class EntryList {
 public:
  // `head` is an element of `links` that no entry has: the ring begins and ends there.
  EntryList(Links* links, EntryId head) noexcept : links_(links), head_(head) {
    links_[head] = {head, head};
  }

  [[nodiscard]] EntryId size() const noexcept { return size_; }
  [[nodiscard]] EntryId oldest() const noexcept { return links_[head_].newer; }  // of at least one

  void add_newest(EntryId entry) noexcept {
    const EntryId newest = links_[head_].older;
    links_[entry] = {newest, head_};
    links_[newest].newer = entry;
    links_[head_].older = entry;
    ++size_;
  }
  void remove(EntryId entry) noexcept {
    const auto [older, newer] = links_[entry];
    links_[older].newer = newer;
    links_[newer].older = older;
    --size_;
  }
  void make_newest(EntryId entry) noexcept {
    remove(entry);
    add_newest(entry);
  }

 private:
  Links* links_;
  EntryId head_;
  EntryId size_ = 0;
};

}  // namespace kvmem
