#include "tier/disk_slots.hpp"

#include <utility>

#include "base/check.hpp"
#include "tier/disk_core.hpp"

namespace kvmem {

using detail::DiskCall;

namespace {

SlotHeader header_of(const detail::DiskCore& core, SlotIndex slot, const DiskRecord& record) {
  const detail::DiskGeometry& geometry = core.geometry();
  KVMEM_EXPECTS(slot < geometry.slots, "disk slot ", slot, " is not one of ", geometry.slots);
  KVMEM_EXPECTS(record.key.size() == core.options().key_bytes, "a key of ", record.key.size(),
                " bytes; this tier's have ", core.options().key_bytes);
  KVMEM_EXPECTS(record.payload_bytes > 0 && record.payload_bytes <= geometry.block_bytes,
                "payload_bytes is ", record.payload_bytes, "; it must be 1 to ",
                geometry.block_bytes);
  return {.state = SlotHeader::State::written,
          .slot = slot,
          .payload_bytes = record.payload_bytes,
          .manifest = core.options().manifest,
          .group = record.group,
          .key = disk_key(record.key)};
}

void expect_aligned(const std::byte* buffer) {
  KVMEM_EXPECTS(
      buffer != nullptr && reinterpret_cast<std::uintptr_t>(buffer) % disk_page_bytes == 0,
      "a buffer for the disk must begin at a multiple of ", disk_page_bytes, " bytes, not at ",
      static_cast<const void*>(buffer));
}

}  // namespace

DiskSlots::DiskSlots(const DiskOptions& options)
    : core_(std::make_shared<detail::DiskCore>(options)) {
  core_->start();
}

// The core also holds itself until its workers have ended, so that nothing of it goes where no
// worker can be waited for: a forked child, a process that exits, a mount that does not answer.
DiskSlots::~DiskSlots() {
  if (mark_.must_leak()) return;
  if (core_->close(core_->options().close_within).running > 0) core_->abandon();
}

std::vector<FoundSlot> DiskSlots::take_found() {
  mark_.expect_same_process("a disk tier");
  return core_->take_found();
}

std::vector<FoundSlot> DiskSlots::take_superseded() {
  mark_.expect_same_process("a disk tier");
  return core_->take_superseded();
}

DiskSubmit DiskSlots::try_write(SlotIndex slot, const DiskRecord& record, const std::byte* source,
                                DiskDone done) {
  mark_.expect_same_process("a disk tier");
  expect_aligned(source);
  DiskCall call;
  call.kind = DiskCall::Kind::write;
  call.header = header_of(*core_, slot, record);
  call.source = source;
  call.source_sum = record.payload_sum;
  call.done = std::move(done);
  return core_->submit(call);
}

DiskSubmit DiskSlots::try_read(SlotIndex slot, const DiskRecord& expected, std::uint64_t generation,
                               std::byte* target, DiskDone done) {
  mark_.expect_same_process("a disk tier");
  expect_aligned(target);
  DiskCall call;
  call.kind = DiskCall::Kind::read;
  call.header = header_of(*core_, slot, expected);
  call.header.generation = generation;
  call.target = target;
  call.done = std::move(done);
  return core_->submit(call);
}

DiskSubmit DiskSlots::try_erase(SlotIndex slot, DiskDone done) {
  mark_.expect_same_process("a disk tier");
  KVMEM_EXPECTS(slot < core_->geometry().slots, "disk slot ", slot, " is not one of ",
                core_->geometry().slots);
  DiskCall call;
  call.kind = DiskCall::Kind::erase;
  call.header.slot = slot;
  call.done = std::move(done);
  return core_->submit(call);
}

std::size_t DiskSlots::expire() {
  mark_.expect_same_process("a disk tier");
  return core_->expire();
}

std::uint32_t DiskSlots::capacity() const noexcept { return core_->geometry().slots; }

bool DiskSlots::is_retired(SlotIndex slot) const {
  mark_.expect_same_process("a disk tier");
  KVMEM_EXPECTS(slot < capacity(), "disk slot ", slot, " is not one of ", capacity());
  return core_->is_retired(slot);
}

DiskStats DiskSlots::stats() const {
  mark_.expect_same_process("a disk tier");
  return core_->stats();
}

DiskCloseReport DiskSlots::close(std::chrono::nanoseconds within) {
  mark_.expect_same_process("a disk tier");
  return core_->close(within);
}

}  // namespace kvmem
