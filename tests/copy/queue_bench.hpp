// A copy queue on a scripted device, driven by hand: pump() submits what may go, reap() ends what
// was observed to end. Blocks are 1 KiB; what the addresses point at does not matter unless a test
// says so.
#pragma once

#include <algorithm>
#include <cstddef>
#include <memory>
#include <numeric>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "copy/copy_queue.hpp"
#include "support/scripted_device.hpp"
#include "support/stall.hpp"

namespace kvmem::test {

inline constexpr std::size_t block_bytes = 1024;

struct BenchOptions {
  QueueWindow window{16 * block_bytes, 1000, false};  // lane 0: 8 blocks, the others: 2 each
  Direction direction = Direction::to_host;
  ScriptedOptions device{.moves_bytes = false};
  bool timing = false;
  std::size_t staging_pieces = 0, staging_piece_bytes = 4096;
};

class QueueBench {
 public:
  explicit QueueBench(const BenchOptions& options = {})
      : direction_(options.direction),
        device_(std::make_shared<ScriptedDevice>(options.device)),
        events_(std::make_shared<EventPool>(device_, options.timing)) {
    if (options.staging_pieces > 0) {
      ring_ = std::make_shared<StagingRing>(device_, options.staging_pieces,
                                            options.staging_piece_bytes);
    }
    queue_ = std::make_unique<CopyQueue>(
        events_, options.window, ring_,
        [this](const Stream& lane) { lanes_.push_back(lane.handle()); });
  }

  struct Submitted {
    const CopyJob* job;
    StreamHandle lane;
    std::size_t begin, end, bytes;
  };

  [[nodiscard]] ScriptedDevice& device() { return *device_; }
  [[nodiscard]] const std::shared_ptr<ScriptedDevice>& device_ptr() { return device_; }
  [[nodiscard]] CopyQueue& queue() { return *queue_; }
  [[nodiscard]] const std::vector<StreamHandle>& lanes() const { return lanes_; }
  [[nodiscard]] const std::vector<Submitted>& submitted() const { return submitted_; }
  [[nodiscard]] const std::vector<const CopyJob*>& finished() const { return finished_; }
  [[nodiscard]] std::size_t in_flight() const { return in_flight_.size(); }
  [[nodiscard]] const Slice& slice(std::size_t i) const { return *in_flight_[i]; }

  [[nodiscard]] std::vector<Submitted> submitted_of(const CopyJob& job) const {
    auto some = submitted_;
    std::erase_if(some, [&](const Submitted& each) { return each.job != &job; });
    return some;
  }
  [[nodiscard]] bool is_finished(const CopyJob& job) const {
    return std::ranges::count(finished_, &job) == 1;
  }

  struct JobOptions {
    std::size_t blocks = 1;
    Priority priority = Priority::background;
    CopyJob::Events after = {};
    CopyJob::Jobs behind = {};
    bool staged = false;
    std::size_t stages = 1;
  };
  std::shared_ptr<CopyJob> accept(JobOptions options) {
    auto job = make(std::move(options));
    queue_->accept({job});
    return job;
  }
  std::shared_ptr<CopyJob> make(JobOptions options) {
    std::vector<Region> regions;
    for (std::size_t stage = 0; stage < options.stages; ++stage) {
      Region region;
      region.address = next_address_;
      region.stride_bytes = region.payload_bytes = block_bytes / options.stages;
      region.block_count = options.blocks;
      region.stage = static_cast<std::int64_t>(stage);
      next_address_ += region.stride_bytes * region.block_count;
      regions.push_back(region);
    }
    std::vector<BlockId> blocks(options.blocks);
    std::iota(blocks.begin(), blocks.end(), BlockId{0});
    std::vector<SlotIndex> slots(options.blocks);
    std::iota(slots.begin(), slots.end(), SlotIndex{0});
    // Slots apart from each other, so that each block is a descriptor of its own.
    const SlotArena arena{reinterpret_cast<std::byte*>(std::uintptr_t{1} << 40), 2 * block_bytes};
    return wrap(CopyBatch(KVLayout(std::move(regions)), direction_, blocks, slots, arena,
                          queue_->descriptor_bytes(), direction_ == Direction::to_device),
                std::move(options));
  }
  std::shared_ptr<CopyJob> wrap(CopyBatch batch, JobOptions options) {
    return std::make_shared<CopyJob>(std::move(batch), options.priority, std::move(options.after),
                                     std::move(options.behind), options.staged);
  }

  // An event on a foreign stream that is reached when the stall opens.
  std::shared_ptr<Event> unreached(std::unique_ptr<Stall>& stall) {
    const StreamHandle stream = device_->create_stream();
    stall = std::make_unique<Stall>(device_, stream);
    auto event = std::make_shared<Event>(events_->acquire());
    event->record(stream);
    device_->destroy_stream(stream);
    return event;
  }

  void pump() {
    const std::lock_guard one_at_a_time(queue_->submitting());
    for (;;) {
      auto slice = std::make_unique<Slice>();
      if (!queue_->next(*slice)) return;
      queue_->submit(*slice);
      submitted_.push_back(
          {slice->job.get(), slice->lane->stream.handle(), slice->begin, slice->end, slice->bytes});
      in_flight_.push_back(std::move(slice));
    }
  }

  // Ends the slices whose event was reached. A slice without one stays: end() is for those.
  void reap() {
    for (std::size_t i = 0; i < in_flight_.size();) {
      const auto& event = in_flight_[i]->event;
      if (event && event->recorded() && event->query() == EventState::done)
        end(i);
      else
        ++i;
    }
  }
  void end(std::size_t i, bool lost = false) {
    const auto slice = std::move(in_flight_[i]);
    in_flight_.erase(in_flight_.begin() + static_cast<std::ptrdiff_t>(i));
    if (queue_->ended(*slice, lost)) finished_.push_back(slice->job.get());
  }

  // Copies, ends and submits until nothing moves.
  void run_out() {
    for (bool moved = true; moved;) {
      const std::size_t submitted = submitted_.size();
      pump();
      moved = submitted_.size() != submitted;
      while (device_->run_one()) moved = true;
      const std::size_t unended = in_flight_.size();
      reap();
      moved |= in_flight_.size() != unended;
    }
  }

 private:
  const Direction direction_;
  std::shared_ptr<ScriptedDevice> device_;
  std::shared_ptr<EventPool> events_;
  std::shared_ptr<StagingRing> ring_;
  std::vector<StreamHandle> lanes_;
  std::unique_ptr<CopyQueue> queue_;
  std::uint64_t next_address_ = 0x100000;
  std::vector<std::unique_ptr<Slice>> in_flight_;
  std::vector<Submitted> submitted_;
  std::vector<const CopyJob*> finished_;
};

}  // namespace kvmem::test
