// What a worker does with a call.
#include <cerrno>
#include <new>
#include <utility>

#include "base/crc32c.hpp"
#include "base/error.hpp"
#include "tier/disk_core.hpp"

namespace kvmem::detail {

namespace {

DiskResult failed(int error) {
  switch (error) {
    case ENODATA:
      return {DiskOutcome::truncated, 0, 0};
    case EAGAIN:
    case ENOMEM:
    case ENOBUFS:
    case EMFILE:
    case ENFILE:
      return {DiskOutcome::shortage, error, 0};
    default:
      return {DiskOutcome::io_error, error, 0};
  }
}

// In the order in which a difference says most.
DiskOutcome compare(const SlotHeader& found, const SlotHeader& expected) {
  if (found.tier != expected.tier) return DiskOutcome::foreign_tier;
  if (found.slot != expected.slot) return DiskOutcome::misplaced;
  if (found.manifest != expected.manifest) return DiskOutcome::other_manifest;
  if (found.key != expected.key || found.group != expected.group) return DiskOutcome::other_key;
  if (found.generation != expected.generation) return DiskOutcome::other_generation;
  if (found.payload_bytes != expected.payload_bytes) return DiskOutcome::other_size;
  return DiskOutcome::ok;
}

std::uint64_t whole_pages(std::uint64_t bytes) { return round_up(bytes, disk_page_bytes); }

}  // namespace

DiskCore::Ended DiskCore::execute(const DiskCall& call, HeaderBlock& block) noexcept {
  Ended ended;
  try {
    std::shared_ptr<Volume> here = volume();
    if (call.reads()) {
      ended.result = read(*here, call, block);
    } else if (const int error = here->in_place(call.slot()); error != 0 && !call.probe) {
      ended.result = failed(error);
    } else {
      if (error != 0) here = remake(*here);
      ended.result = write(*here, call, block);
    }
  } catch (const std::bad_alloc&) {
    ended.result = failed(ENOMEM);
  } catch (const std::exception& error) {  // of remaking
    ended.result = failed(ENOENT);
    ended.trouble = error.what();
  }
  ended.result.generation = call.header.generation;
  return ended;
}

DiskResult DiskCore::read(Volume& volume, const DiskCall& call, HeaderBlock& block) {
  SlotHeader expected = call.header;
  expected.tier = volume.tier();
  {
    const CallLimit::Pass pass(calls_);
    const int error =
        volume.read(call.slot(), block, call.target, whole_pages(expected.payload_bytes));
    if (error != 0) return failed(error);
  }
  SlotHeader found;
  const DiskOutcome decoded = decode(block, found);
  if (decoded != DiskOutcome::ok) return {decoded, 0, 0};
  const DiskOutcome compared = compare(found, expected);
  if (compared != DiskOutcome::ok) return {compared, 0, 0};
  const std::uint32_t sum = crc32c(0, call.target, found.payload_bytes);
  const bool right = data_sum(found, sum) == found.data_sum;
  return {right ? DiskOutcome::ok : DiskOutcome::bad_data_sum, 0, 0, sum};
}

// One call. The sum comes first: it brings the payload into the processor's caches, from which the
// write takes it, while the other way round both fetch it from memory.
DiskResult DiskCore::write(Volume& volume, const DiskCall& call, HeaderBlock& block) {
  SlotHeader header = call.header;
  header.tier = volume.tier();
  if (call.kind == DiskCall::Kind::write) {
    const std::uint32_t sum = crc32c(0, call.source, header.payload_bytes);
    if (sum != call.source_sum.value_or(sum)) return {DiskOutcome::bad_data_sum, 0, 0};
    header.state = SlotHeader::State::written;
    header.data_sum = data_sum(header, sum);
  }
  encode(header, block);
  const SlotIndex slot = call.slot();
  const CallLimit::Pass pass(calls_);
  int error = volume.write(slot, block, call.source, whole_pages(header.payload_bytes));
  if (error == 0 && options_.sync == DiskSync::each_write) error = volume.sync(slot);
  return error == 0 ? DiskResult{} : failed(error);
}

std::shared_ptr<Volume> DiskCore::remake(const Volume& former) {
  std::shared_ptr<Volume> made = Volume::open(options_, geometry_, &former);
  const std::lock_guard lock(mutex_);
  for (SlotUse& use : slots_) use.retired = false;
  stats_.retired = 0;
  ++stats_.remade;
  volume_ = made;
  return made;
}

}  // namespace kvmem::detail
