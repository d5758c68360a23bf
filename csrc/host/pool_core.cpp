#include "host/pool_core.hpp"

#include <algorithm>
#include <utility>
#include <vector>

#include "base/check.hpp"
#include "host/budget.hpp"

namespace kvmem::detail {

namespace {

// What the table, its free list and a manager's counts take, where the slots themselves take
// nothing.
constexpr std::size_t bookkeeping_bytes_a_slot = 32;

bool pins_first(const Device& device, Pin pin) {
  return pin == Pin::required || (pin == Pin::automatic && device.info().needs_pinned_host);
}

RegionOptions region_for(const Device& device, const PoolOptions& pool, std::uint32_t capacity) {
  RegionOptions options = pool.region;
  options.has_bytes = device.info().has_bytes;
  if (!options.has_bytes) expect_memory_for(capacity * bookkeeping_bytes_a_slot);
  if (!options.preferred_node) options.preferred_node = device.info().numa_node;
  if (options.progress && pins_first(device, pool.pin)) {  // the second half is pinning
    options.progress = [&pool](std::size_t done, std::size_t total) {
      return pool.region.progress(done, 2 * total);
    };
  }
  return options;
}

// In slots; 0: all are as good as they will ever be.
std::uint32_t pinned_behind_at_a_time(const PoolOptions& pool, const PinPace& pace,
                                      std::size_t slot_bytes) {
  if (pool.pin != Pin::background) return 0;
  return static_cast<std::uint32_t>(pace.chunk_bytes(slot_bytes) / slot_bytes);
}

std::optional<std::string> what_of(const std::exception_ptr& error) {
  try {
    if (error) std::rethrow_exception(error);
  } catch (const std::exception& what) {
    return what.what();
  }
  return std::nullopt;
}

}  // namespace

PoolCore::PoolCore(std::shared_ptr<Device> device, const PoolOptions& options,
                   std::size_t slot_bytes, std::uint32_t capacity)
    : device_(std::move(device)),
      block_bytes_(options.block_bytes),
      slot_bytes_(slot_bytes),
      capacity_(capacity),
      attached_(options.region.attach.has_value()),
      pace_{options.pin_bytes_per_second},
      region_(PinnedRegion::map(slot_bytes * capacity, region_for(*device_, options, capacity))),
      table_(capacity, pinned_behind_at_a_time(options, pace_, slot_bytes)),
      tickets_(attached_ ? 0 : capacity) {
  if (attached_) {
    std::vector<SlotIndex> all(capacity);
    table_.acquire(all);
    note_peaks();
  }
  if (pins_first(*device_, options.pin)) pin_first(options.region.progress);
  if (options.pin == Pin::background) pin_behind();  // last: its thread uses all of this
}

// Nobody holds anything any more, so what is not free is what a copy may still touch. Of an
// attached pool the owners elsewhere are left.
PoolCore::~PoolCore() {
  table_.check();
  const SlotCounts& counts = table_.counts();
  const std::uint32_t untouched = attached_ ? counts.held : counts.free;
  if (untouched != capacity_) region_.leak();
}

template <class Change>
void PoolCore::apply(Change&& change) noexcept {
  const bool watched = tickets_.waiting() > 0;
  change();
  note_peaks();
  if (watched) device_->progress().bump_for_waiters();
}

template <class Change>
void PoolCore::leave(Change&& change) noexcept {
  bool last = false;
  {
    const std::lock_guard lock(mutex_);
    apply(change);
    last = --handles_ == 0;
  }
  if (last) delete this;
}

void PoolCore::note_peaks() noexcept {
  const SlotCounts& counts = table_.counts();
  if (counts.held > peak_held_) peak_held_ = counts.held;
  if (counts.quarantined > peak_quarantined_) peak_quarantined_ = counts.quarantined;
}

std::optional<HostBlocks> PoolCore::try_acquire(std::size_t count) {
  expect_same_process();
  KVMEM_EXPECTS(count > 0, "an acquire of zero blocks");
  // Room is made before the lock is taken, but not touched: a refusal costs little.
  std::optional<HostBlocks> blocks;
  if (count <= capacity_) blocks.emplace(HostBlocks(nullptr, SlotList(count), Holder::owner));
  const std::lock_guard lock(mutex_);
  expect_open();
  if (blocks && try_acquire_locked(blocks->slots_.span())) {
    ++handles_;
    blocks->core_ = this;
  } else {
    ++refused_;
    blocks.reset();
  }
  return blocks;
}

bool PoolCore::try_acquire(std::span<SlotIndex> slots) {
  expect_same_process();
  KVMEM_EXPECTS(!slots.empty(), "an acquire of zero blocks");
  const std::lock_guard lock(mutex_);
  expect_open();
  if (try_acquire_locked(slots)) return true;
  ++refused_;
  return false;
}

bool PoolCore::try_acquire_locked(std::span<SlotIndex> slots) {
  if (!tickets_.try_take(slots.size())) return false;
  table_.acquire(slots);
  forget_sums(slots);
  note_peaks();
  acquired_ += slots.size();
  return true;
}

std::shared_ptr<Ticket> PoolCore::enqueue(std::size_t count, Waker waker) {
  expect_same_process();
  KVMEM_EXPECTS(count > 0, "an acquire of zero blocks");
  const std::lock_guard lock(mutex_);
  expect_open();
  if (count > tickets_.bound()) {
    throw CapacityError(attached_ ? "an attached pool gives no blocks: another one does"
                                  : "more blocks than the pool can ever give",
                        shortage_locked(count));
  }
  auto ticket = tickets_.enqueue(count, std::move(waker));
  ++handles_;
  return ticket;
}

bool PoolCore::granted(const Ticket& ticket) {
  expect_same_process();
  const std::lock_guard lock(mutex_);
  if (ticket.state == Ticket::State::closed) {
    expect_open();
    throw CapacityError("so many blocks were poisoned that the pool can never give as many",
                        shortage_locked(ticket.wanted));
  }
  return ticket.state == Ticket::State::granted;
}

HostBlocks PoolCore::take(const Ticket& ticket) {
  if (!granted(ticket)) throw NotDone("the ticket was not granted yet");
  SlotList slots(ticket.wanted);
  const std::lock_guard lock(mutex_);
  table_.acquire(slots.span());
  forget_sums(slots.span());
  note_peaks();
  acquired_ += slots.size();
  // The ticket's place in handles_ is now this one's.
  return HostBlocks(this, std::move(slots), Holder::owner);
}

void PoolCore::drop(const std::shared_ptr<Ticket>& ticket) noexcept {
  if (mark_.must_leak()) return;
  leave([&] { tickets_.abandon(ticket); });
}

HostBlocks PoolCore::add(std::span<const SlotIndex> slots, Holder holder, bool expect_owner) {
  expect_same_process();
  if (slots.empty()) return {};
  SlotList copy(slots);
  const std::lock_guard lock(mutex_);
  if (expect_owner) table_.expect_held(slots);
  table_.add(slots, holder);
  note_peaks();
  ++handles_;
  return HostBlocks(this, std::move(copy), holder);
}

void PoolCore::remove(std::span<const SlotIndex> slots, Holder holder) noexcept {
  if (mark_.must_leak()) return;
  leave([&] { tickets_.give_back(table_.remove(slots, holder)); });
}

void PoolCore::release(std::span<const SlotIndex> slots) {
  KVMEM_EXPECTS(!attached_, "the slots of an attached pool go home to another one");
  expect_same_process();
  const std::lock_guard lock(mutex_);
  table_.expect_owners(slots);
  apply([&] { tickets_.give_back(table_.remove(slots, Holder::owner)); });
}

void PoolCore::expect_no_copies(std::span<const SlotIndex> slots) {
  expect_same_process();
  const std::lock_guard lock(mutex_);
  table_.expect_no_copies(slots);
}

void PoolCore::poison(std::span<const SlotIndex> slots) noexcept {
  if (mark_.must_leak()) return;
  leave([&] {
    const std::uint32_t before = table_.counts().poisoned;
    table_.poison(slots);
    if (!attached_) tickets_.lose(table_.counts().poisoned - before);
  });
}

void PoolCore::keep_sums() {
  expect_same_process();
  if (sums_.load() != nullptr) return;
  auto sums = std::make_unique<BlockSums>(capacity_);
  const std::lock_guard lock(mutex_);
  if (own_sums_) return;
  own_sums_ = std::move(sums);
  sums_.store(own_sums_.get(), std::memory_order_release);
}

void PoolCore::close() noexcept {
  if (mark_.must_leak()) return;
  const std::lock_guard lock(mutex_);
  apply([&] {
    closed_ = true;
    tickets_.close();
    pinning_ends_.notify_all();
  });
}

void PoolCore::drop_pool() noexcept {
  if (mark_.must_leak()) return;
  close();
  leave([] {});
}

void PoolCore::pinning_ended(const std::exception_ptr& error) noexcept {
  if (mark_.must_leak()) return;
  leave([&] { pin_error_ = error; });
}

std::uint64_t PoolCore::free() {
  expect_same_process();
  const std::lock_guard lock(mutex_);
  return tickets_.waiting() > 0 ? 0 : tickets_.free();  // nobody overtakes
}

PoolStats PoolCore::stats() {
  expect_same_process();
  PoolStats stats;
  stats.block_bytes = block_bytes_;
  stats.slot_bytes = slot_bytes_;
  stats.padding_bytes = (slot_bytes_ - block_bytes_) * capacity_;
  stats.region = region_.facts();
  const std::lock_guard lock(mutex_);
  stats.slots = table_.counts();
  stats.peak_held = peak_held_;
  stats.peak_quarantined = peak_quarantined_;
  stats.waiters = tickets_.waiting();
  stats.acquired = acquired_;
  stats.refused = refused_;
  stats.pin_error = what_of(pin_error_);
  return stats;
}

Shortage PoolCore::shortage(std::size_t wanted) {
  expect_same_process();
  const std::lock_guard lock(mutex_);
  return shortage_locked(wanted);
}

Shortage PoolCore::shortage_locked(std::size_t wanted) const {
  Shortage shortage;
  shortage.bound = "pool blocks";
  shortage.wanted = wanted;
  shortage.free = tickets_.free();
  shortage.largest = tickets_.bound();
  shortage.held = table_.counts().held;
  shortage.quarantined = table_.counts().quarantined;
  return shortage;
}

void PoolCore::check() {
  expect_same_process();
  const std::lock_guard lock(mutex_);
  table_.check();
  KVMEM_INVARIANT(tickets_.free() <= table_.counts().free);
  KVMEM_INVARIANT(tickets_.bound() == (attached_ ? 0 : capacity_ - table_.counts().poisoned));
}

}  // namespace kvmem::detail
