#include "host/block_pool.hpp"

#include <algorithm>
#include <limits>
#include <utility>

#include "base/check.hpp"
#include "host/pool_core.hpp"

namespace kvmem {

std::byte* HostBlocks::data(std::size_t i) const noexcept {
  KVMEM_INVARIANT(i < slots_.size());
  return core_->at(slots()[i]);
}

std::size_t HostBlocks::block_bytes() const noexcept {
  return core_ != nullptr ? core_->block_bytes() : 0;
}

std::size_t HostBlocks::slot_bytes() const noexcept {
  return core_ != nullptr ? core_->slot_bytes() : 0;
}

std::optional<std::uint32_t> HostBlocks::sum(std::size_t i) const noexcept {
  KVMEM_INVARIANT(i < slots_.size());
  return core_->sum(slots()[i]);
}

bool HostBlocks::pinned() const noexcept { return core_ != nullptr && core_->pinned(slots()); }

bool HostBlocks::in_one_chunk() const noexcept {
  const std::size_t chunk_bytes = core_ != nullptr ? core_->region().pin_chunk_bytes() : 0;
  if (chunk_bytes == 0) return true;
  const auto chunk_of = [&](SlotIndex slot) { return slot * core_->slot_bytes() / chunk_bytes; };
  return std::ranges::all_of(
      slots(), [&](SlotIndex slot) { return chunk_of(slot) == chunk_of(slots()[0]); });
}

HostBlocks HostBlocks::share(std::size_t first, std::size_t count) const {
  if (core_ == nullptr) throw AlreadyReleased("the blocks were released");
  KVMEM_EXPECTS(first <= size() && count <= size() - first, "blocks ", first, " to ", first, " + ",
                count, " of ", size(), " are out of range");
  return core_->add(slots().subspan(first, count), Holder::owner, false);
}

HostBlocks HostBlocks::hold_for_copy() const {
  if (core_ == nullptr) throw AlreadyReleased("the blocks were released");
  return core_->add(slots(), Holder::copy, false);
}

void HostBlocks::expect_no_copies() const {
  if (core_ == nullptr) throw AlreadyReleased("the blocks were released");
  core_->expect_no_copies(slots());
}

void HostBlocks::let_go() noexcept {
  std::exchange(core_, nullptr)->remove(slots(), holder_);
  slots_ = {};
}

void HostBlocks::poison() noexcept {
  KVMEM_INVARIANT(core_ == nullptr || holder_ == Holder::copy);
  if (holder_ != Holder::copy) return release();
  if (auto* const core = std::exchange(core_, nullptr)) core->poison(slots());
  slots_ = {};
}

PoolTicket::PoolTicket(detail::PoolCore* core, std::shared_ptr<Ticket> ticket) noexcept
    : core_(core), ticket_(std::move(ticket)) {}

PoolTicket::PoolTicket(PoolTicket&& other) noexcept
    : core_(std::exchange(other.core_, nullptr)), ticket_(std::move(other.ticket_)) {}

PoolTicket::~PoolTicket() {
  if (core_ != nullptr) core_->drop(ticket_);
}

bool PoolTicket::granted() const {
  if (core_ == nullptr) throw AlreadyReleased("the ticket was taken");
  return core_->granted(*ticket_);
}

HostBlocks PoolTicket::take() {
  if (core_ == nullptr) throw AlreadyReleased("the ticket was taken");
  HostBlocks blocks = core_->take(*ticket_);
  core_ = nullptr;
  ticket_ = nullptr;
  return blocks;
}

BlockPool::BlockPool(std::shared_ptr<Device> device, const PoolOptions& options) {
  constexpr std::size_t most_block_bytes = std::size_t{1} << 63;  // so that rounding up cannot wrap
  constexpr std::size_t most_slots = std::numeric_limits<SlotIndex>::max();
  KVMEM_EXPECTS(device != nullptr, "a block pool needs a device");
  KVMEM_EXPECTS(options.block_bytes > 0 && options.block_bytes <= most_block_bytes, "block_bytes ",
                options.block_bytes, " must be from 1 to 2^63");
  KVMEM_EXPECTS(options.capacity_bytes > 0, "capacity_bytes must not be zero");
  KVMEM_EXPECTS(options.pin_bytes_per_second == 0 || options.pin_bytes_per_second >= 1,
                "pin_bytes_per_second is ", options.pin_bytes_per_second, ": at least 1, or 0");
  const std::size_t slot_bytes = round_up(options.block_bytes, slot_alignment_bytes);
  const std::size_t slots = options.capacity_bytes / slot_bytes;
  if (slots == 0) {
    Shortage shortage;
    shortage.bound = "capacity_bytes";
    shortage.wanted = slot_bytes;
    shortage.free = shortage.largest = options.capacity_bytes;
    throw CapacityError(text("a pool needs at least one slot, ", slot_bytes, " bytes"), shortage);
  }
  KVMEM_EXPECTS(slots <= most_slots, "capacity_bytes ", options.capacity_bytes, " would be ", slots,
                " slots; the most is ", most_slots, " (", most_slots * slot_bytes, " bytes)");
  core_ = new detail::PoolCore(std::move(device), options, slot_bytes,
                               static_cast<std::uint32_t>(slots));
}

BlockPool::~BlockPool() { core_->drop_pool(); }

std::optional<HostBlocks> BlockPool::try_acquire(std::size_t count) {
  return core_->try_acquire(count);
}

bool BlockPool::try_acquire(std::span<SlotIndex> slots) { return core_->try_acquire(slots); }
void BlockPool::release(std::span<const SlotIndex> slots) { core_->release(slots); }

PoolTicket BlockPool::enqueue(std::size_t count, Waker waker) {
  return PoolTicket(core_, core_->enqueue(count, std::move(waker)));
}

HostBlocks BlockPool::share_indices(std::span<const SlotIndex> slots) {
  return core_->add(slots, Holder::owner, true);
}

void BlockPool::keep_sums() { core_->keep_sums(); }
void BlockPool::set_sum(SlotIndex slot, std::uint32_t sum) noexcept { core_->set_sum(slot, sum); }
void BlockPool::forget_sums(std::span<const SlotIndex> slots) noexcept {
  core_->forget_sums(slots);
}
std::optional<std::uint32_t> BlockPool::sum(SlotIndex slot) const noexcept {
  return core_->sum(slot);
}

std::uint64_t BlockPool::free() const { return core_->free(); }
PoolStats BlockPool::stats() const { return core_->stats(); }
Shortage BlockPool::shortage(std::size_t wanted) const { return core_->shortage(wanted); }
void BlockPool::close() noexcept { core_->close(); }
void BlockPool::check() const { core_->check(); }

std::byte* BlockPool::data() const noexcept { return core_->region().data(); }
std::size_t BlockPool::block_bytes() const noexcept { return core_->block_bytes(); }
std::size_t BlockPool::slot_bytes() const noexcept { return core_->slot_bytes(); }
std::uint32_t BlockPool::capacity() const noexcept { return core_->capacity(); }
bool BlockPool::pinned() const noexcept { return core_->region().facts().pinned; }
bool BlockPool::pinned(std::span<const SlotIndex> slots) const noexcept {
  return core_->pinned(slots);
}
std::size_t BlockPool::pin_chunk_bytes() const noexcept {
  return core_->region().pin_chunk_bytes();
}
const std::shared_ptr<Device>& BlockPool::device() const noexcept { return core_->device(); }

}  // namespace kvmem
