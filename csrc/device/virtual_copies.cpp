#include "device/virtual_copies.hpp"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <utility>

namespace kvmem {

namespace {

// Where descriptor i of a copy is cut: [0, second) moves at first, [first, size) at the end, so
// what is between moves twice.
struct Cuts {
  std::size_t first, second;
};

Cuts cuts_of(std::uint64_t split, std::size_t i, std::size_t size) {
  const std::uint64_t mixed = (split + i) * 0x9E3779B97F4A7C15ULL;
  const auto within = [size](std::uint64_t draw) {
    return static_cast<std::size_t>(draw % (std::uint64_t{size} + 1));
  };
  const std::size_t one = within(mixed >> 40), other = within((mixed >> 16) & 0xFFFFFF);
  return {std::min(one, other), std::max(one, other)};
}

// The clock has an end.
Nanoseconds later(Nanoseconds time, double by) {
  return by < static_cast<double>(VirtualDevice::latest - time)
             ? time + static_cast<Nanoseconds>(by)
             : VirtualDevice::latest;
}

std::size_t bytes_of(const CopyDescriptors& batch) {
  return std::accumulate(batch.sizes, batch.sizes + batch.count, std::size_t{0});
}

}  // namespace

std::uint64_t VirtualCopies::add(const CopyDescriptors& batch, Direction direction,
                                 SourceAccess access) {
  Copy copy;
  copy.batch = batch;
  copy.direction = direction;
  copy.split = random_();
  if (holds_left_ > 0) {
    --holds_left_;
    copy.held = true;
  }
  if (options_.moves_bytes && access == SourceAccess::any) read_early(copy);
  copies_.emplace(++last_number_, std::move(copy));
  return last_number_;
}

void VirtualCopies::start(ModelCopy* running, Nanoseconds now) {
  Copy& copy = copies_.at(running->number);
  copy.running = running;
  if (options_.moves_bytes) move_first_part(copy);
  Link& link = link_of(copy.direction);
  // An idle link begins when there is something to do, not before.
  if (link.waiting.empty()) link.free_at = std::max(link.free_at, now);
  link.waiting.push_back(running->number);
}

void VirtualCopies::serve(Nanoseconds now) {
  for (Link& link : links_) {
    while (link.free_at <= now) {
      std::vector<std::size_t> able;
      for (std::size_t i = 0; i < link.waiting.size(); ++i) {
        if (!copies_.at(link.waiting[i]).held) able.push_back(i);
      }
      if (able.empty()) break;
      const auto chosen =
          link.waiting.begin() + static_cast<std::ptrdiff_t>(able[random_() % able.size()]);
      Copy& copy = copies_.at(*chosen);
      const double ns = static_cast<double>(bytes_of(copy.batch)) / options_.bytes_per_second * 1e9;
      link.free_at = later(std::max(link.free_at, now), ns);
      copy.end = later(link.free_at, static_cast<double>(options_.latency));
      copy.turn = ++last_turn_;
      link.waiting.erase(chosen);
    }
  }
}

std::optional<Nanoseconds> VirtualCopies::next_time(Nanoseconds now) const {
  std::optional<Nanoseconds> next;
  const auto consider = [&](Nanoseconds time) { next = std::min(next.value_or(time), time); };
  for (const Link& link : links_) {
    const bool wanted = std::ranges::any_of(
        link.waiting, [&](std::uint64_t number) { return !copies_.at(number).held; });
    if (wanted) consider(std::max(link.free_at, now));
  }
  for (const auto& [number, copy] : copies_) {
    if (copy.end) consider(*copy.end);
  }
  return next;
}

ModelCopy* VirtualCopies::take_ended(Nanoseconds now) {
  auto first = copies_.end();
  for (auto copy = copies_.begin(); copy != copies_.end(); ++copy) {
    if (!copy->second.end || *copy->second.end > now) continue;
    const auto when = [](const auto& one) { return std::pair(*one->second.end, one->second.turn); };
    if (first == copies_.end() || when(copy) < when(first)) first = copy;
  }
  if (first == copies_.end()) return nullptr;
  if (options_.moves_bytes) move_rest(first->second);
  ModelCopy* const ended = first->second.running;
  copies_.erase(first);
  return ended;
}

void VirtualCopies::release() noexcept {
  holds_left_ = 0;
  for (auto& [number, copy] : copies_) copy.held = false;
}

std::size_t VirtualCopies::held() const noexcept {
  return static_cast<std::size_t>(
      std::ranges::count_if(copies_, [](const auto& entry) { return entry.second.held; }));
}

// ---- bytes ----

void VirtualCopies::read_early(Copy& copy) const {
  copy.read_early.reserve(bytes_of(copy.batch));
  for (std::size_t i = 0; i < copy.batch.count; ++i) {
    const std::byte* const source = copy.batch.sources[i];
    copy.read_early.insert(copy.read_early.end(), source, source + copy.batch.sizes[i]);
  }
}

void VirtualCopies::move_first_part(Copy& copy) const noexcept {
  std::size_t at = 0;
  for (std::size_t i = 0; i < copy.batch.count; ++i) {
    const std::size_t size = copy.batch.sizes[i];
    const std::byte* const source =
        copy.read_early.empty() ? copy.batch.sources[i] : copy.read_early.data() + at;
    std::memmove(copy.batch.targets[i], source, cuts_of(copy.split, i, size).second);
    at += size;
  }
}

void VirtualCopies::move_rest(const Copy& copy) const noexcept {
  for (std::size_t i = 0; i < copy.batch.count; ++i) {
    const std::size_t size = copy.batch.sizes[i];
    const std::size_t from = cuts_of(copy.split, i, size).first;
    std::memmove(copy.batch.targets[i] + from, copy.batch.sources[i] + from, size - from);
  }
}

}  // namespace kvmem
