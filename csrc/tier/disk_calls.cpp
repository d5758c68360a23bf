// What a worker does with a call, and what its end says of its slot and of the tier.
#include <algorithm>
#include <cerrno>
#include <new>
#include <utility>

#include "base/crc32c.hpp"
#include "base/error.hpp"
#include "tier/disk_core.hpp"

namespace kvmem::detail {

namespace {

DiskResult failed(int error) { return {outcome_of(error), std::max(error, 0), 0}; }

// The file system is gone or going, whatever the slot.
bool is_of_the_volume(int error) {
  return error == ENOENT || error == ESTALE || error == ENODEV || error == ENXIO ||
         error == ENOTCONN || error == EROFS || error == ENOTDIR;
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

void say(const std::exception& error, std::string& words) noexcept {
  try {
    words = error.what();
  } catch (const std::bad_alloc&) {  // the error's number is said
  }
}

std::uint64_t whole_pages(std::uint64_t bytes) { return round_up(bytes, disk_page_bytes); }

}  // namespace

DiskResult DiskCore::sum(DiskCall& call) noexcept {
  const std::uint64_t bytes = call.header.payload_bytes;
  if (call.reads()) {
    const std::uint32_t found = crc32c(0, call.target, bytes);
    const bool right = data_sum(call.header, found) == call.header.data_sum;
    return {right ? DiskOutcome::ok : DiskOutcome::bad_data_sum, 0, 0, found};
  }
  const std::uint32_t found = crc32c(0, call.source, bytes);
  if (found != call.source_sum.value_or(found)) return {DiskOutcome::bad_data_sum, 0, 0};
  call.source_sum = found;
  return {};
}

DiskCore::Ended DiskCore::move(DiskCall& call, HeaderBlock& block) noexcept {
  Ended ended;
  try {
    std::shared_ptr<Volume> here = volume_for(call);
    if (call.reads()) {
      ended.result = read(*here, call, block);
    } else if (const int error = here->in_place(call.slot()); error != 0 && !call.probe) {
      ended.result = failed(error);
    } else {
      if (error != 0) here = remake(*here, call);
      ended.result = write(*here, call, block);
    }
  } catch (const std::bad_alloc&) {
    ended.result = failed(ENOMEM);
  } catch (const std::exception& error) {  // of remaking
    ended.result = failed(ENOENT);
    say(error, ended.trouble);
  }
  return ended;
}

DiskResult DiskCore::read(Volume& volume, DiskCall& call, HeaderBlock& block) {
  SlotHeader expected = call.header;
  expected.tier = volume.tier();
  const std::uint64_t bytes = whole_pages(expected.payload_bytes);
  if (const int error = volume.read(call.slot(), block, call.target, bytes)) return failed(error);
  SlotHeader found;
  const DiskOutcome decoded = decode(block, found);
  if (decoded != DiskOutcome::ok) return {decoded, 0, 0};
  const DiskOutcome compared = compare(found, expected);
  if (compared != DiskOutcome::ok) return {compared, 0, 0};
  call.header = found;
  return is_summed_apart(call) ? DiskResult{} : sum(call);
}

DiskResult DiskCore::write(Volume& volume, DiskCall& call, HeaderBlock& block) {
  SlotHeader header = call.header;
  header.tier = volume.tier();
  if (call.kind == DiskCall::Kind::write) {
    if (!is_summed_apart(call)) {
      const DiskResult summed = sum(call);
      if (summed.outcome != DiskOutcome::ok) return summed;
    }
    header.state = SlotHeader::State::written;
    header.data_sum = data_sum(header, call.source_sum.value());
  }
  encode(header, block);
  const SlotIndex slot = call.slot();
  int error = volume.write(slot, block, call.source, whole_pages(header.payload_bytes));
  if (error == 0 && options_.sync == DiskSync::each_write) error = volume.sync(slot);
  return error == 0 ? DiskResult{} : failed(error);
}

std::shared_ptr<Volume> DiskCore::volume_for(DiskCall& call) const {
  const std::lock_guard lock(mutex_);
  call.volume = stats_.remade;
  return volume_;
}

std::shared_ptr<Volume> DiskCore::remake(const Volume& former, DiskCall& call) {
  std::shared_ptr<Volume> made = Volume::open(options_, geometry_, &former);
  std::string why_empty = made->why_empty();
  const std::lock_guard lock(mutex_);
  for (SlotUse& use : slots_) use.retired = false;
  stats_.retired = 0;
  call.volume = ++stats_.remade;
  if (!why_empty.empty()) stats_.why_empty = std::move(why_empty);
  volume_ = made;
  return made;
}

void DiskCore::settle(const DiskCall& call, Ended& ended) noexcept {
  const DiskResult& result = ended.result;
  DiskCounts& counts = call.reads() ? stats_.reads : stats_.writes;
  ++counts.ended[static_cast<std::size_t>(result.outcome)];
  if (result.outcome == DiskOutcome::ok) {
    ++counts.calls;
    counts.bytes += call.header.payload_bytes;
  }
  if (call.reads()) {
    settle_read(call, result);
  } else {
    settle_write(call, ended);
  }
}

// What a call met on a volume that was remade meanwhile says nothing of the one there is.
void DiskCore::settle_read(const DiskCall& call, const DiskResult& result) noexcept {
  SlotUse& use = slots_[call.slot()];
  --use.readers;
  if (!is_of_now(call)) return;
  const bool failed = result.outcome == DiskOutcome::io_error;
  if (failed && is_of_the_volume(result.error)) {
    degrade({"reading", result.error, {}});
  } else if (!use.retired && (failed || result.outcome == DiskOutcome::bad_data_sum ||
                              result.outcome == DiskOutcome::bad_header_sum)) {
    use.retired = true;
    ++stats_.retired;
  }
}

void DiskCore::settle_write(const DiskCall& call, Ended& ended) noexcept {
  const DiskResult& result = ended.result;
  SlotUse& use = slots_[call.slot()];
  use.writing = false;
  if (result.outcome == DiskOutcome::io_error && !use.retired && is_of_now(call))
    degrade({"writing", result.error, std::move(ended.trouble)});
  if (!call.probe) return;
  probing_ = false;
  next_probe_ = next_probe();
  if (result.outcome == DiskOutcome::ok) trouble_.doing = nullptr;
}

// What fails meanwhile does not put the next attempt off.
void DiskCore::degrade(Trouble trouble) noexcept {
  if (trouble_.doing == nullptr) {
    ++stats_.degradations;
    next_probe_ = next_probe();
  }
  trouble_ = std::move(trouble);
}

DiskClock::time_point DiskCore::next_probe() const noexcept {
  constexpr std::chrono::nanoseconds for_good = std::chrono::years(100);
  return DiskClock::now() + std::min(options_.probe_after, for_good);
}

}  // namespace kvmem::detail
