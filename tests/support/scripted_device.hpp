// A device that does what its test says, when it says so: every call is logged, any call can be
// made to fail, and a copy moves its bytes only when the test runs it.
//
// Streams and events are those of the one model. The clock is virtual: it ticks with each look and
// moves on when a thread sleeps with `help`, so deadlines pass without wall time. A sleep in which
// nothing can ever move again throws, so that a hang is a failure. Any thread.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstring>
#include <functional>
#include <limits>
#include <list>
#include <mutex>
#include <new>
#include <optional>
#include <stdexcept>
#include <utility>
#include <vector>

#include "base/error.hpp"
#include "device/model.hpp"
#include "device/model_device.hpp"
#include "support/allocation_faults.hpp"

namespace kvmem::test {

enum class CallKind : std::uint8_t {
  create_stream,
  stream_id,
  create_event,
  record,
  wait,
  query,
  recorded,
  event_time,
  copy,
  pin,
  any,  // in a script: whichever comes
};

enum class Failure : std::uint8_t {
  refused,    // nothing happened
  in_flight,  // it happened, and the device says that it failed
  no_memory,  // nothing happened, and it throws bad_alloc
  lost,       // nothing happened, and the device is lost from now on
};

struct Call {
  CallKind kind;
  StreamHandle stream = 0;
  EventHandle event = 0;
  std::size_t descriptors = 0, bytes = 0;
  SourceAccess access = SourceAccess::stream_order;
  const std::byte* first_target = nullptr;
};

struct ScriptedOptions {
  bool moves_bytes = true;  // false: addresses may be made up
  bool needs_pinned_host = false;
  bool runs_in_sleep =
      false;  // a thread that sleeps with `help` runs a copy, as on the host device
  std::size_t max_descriptors = 1 << 16;
};

class ScriptedDevice final : public ModelDevice {
 public:
  explicit ScriptedDevice(const ScriptedOptions& options = {})
      : ModelDevice("the scripted device"), options_(options) {
    info_.kind = "scripted";
    info_.name = "host";
    info_.needs_pinned_host = options.needs_pinned_host;
    info_.max_descriptors = options.max_descriptors;
  }

  // ---- the script ----
  // The nth call of that kind from now on fails, counted from 1, and those behind it.
  void fail(CallKind kind, std::size_t nth, Failure how = Failure::refused, std::size_t times = 1) {
    const std::lock_guard lock(mutex_);
    failures_.push_back({kind, nth, how, times});
  }
  void fail_always(CallKind kind, Failure how = Failure::refused) {
    fail(kind, 1, how, std::numeric_limits<std::size_t>::max());
  }
  void heal() {
    const std::lock_guard lock(mutex_);
    failures_.clear();
  }
  void lose() {
    {
      const std::lock_guard lock(mutex_);
      lost_ = true;
    }
    progress().bump();
  }
  [[nodiscard]] bool lost() const {
    const std::lock_guard lock(mutex_);
    return lost_;
  }
  // Called before the next call of that kind has any effect, outside the device's lock.
  void before_next(CallKind kind, std::function<void()> hook) {
    const std::lock_guard lock(mutex_);
    hooks_.emplace_back(kind, std::move(hook));
  }
  // Called whenever somebody asks for the time, outside the device's lock.
  void before_each_look_at_the_clock(std::function<void()> hook) {
    const std::lock_guard lock(mutex_);
    clock_hook_ = std::move(hook);
  }

  // Runs the copy at the head of that stream; false when none may run there.
  bool run(StreamHandle stream) {
    return run_first([&](const Pending& pending) { return pending.stream == stream; });
  }
  bool run_one() {
    return run_first([](const Pending&) { return true; });
  }
  void run_all() {
    while (run_one()) {
    }
  }

  // ---- what happened ----
  [[nodiscard]] std::vector<Call> calls() const {
    const std::lock_guard lock(mutex_);
    return calls_;
  }
  [[nodiscard]] std::vector<Call> calls(CallKind kind) const {
    auto all = calls();
    std::erase_if(all, [&](const Call& call) { return call.kind != kind; });
    return all;
  }
  void forget_calls() {
    const std::lock_guard lock(mutex_);
    calls_.clear();
  }
  [[nodiscard]] std::size_t pending_copies() const {
    const std::lock_guard lock(mutex_);
    return pending_.size();
  }
  // What copies that were queued and have not run may still read or write.
  using Range = std::pair<const std::byte*, std::size_t>;
  [[nodiscard]] std::vector<Range> pending_ranges() const {
    const std::lock_guard lock(mutex_);
    std::vector<Range> ranges;
    for (const Pending& pending : pending_) {
      ranges.insert(ranges.end(), pending.ranges.begin(), pending.ranges.end());
    }
    return ranges;
  }
  [[nodiscard]] static bool overlaps(const std::vector<Range>& ranges, const std::byte* base,
                                     std::size_t bytes) {
    return std::ranges::any_of(ranges, [&](const Range& range) {
      return range.first < base + bytes && base < range.first + range.second;
    });
  }
  [[nodiscard]] bool may_touch(const std::byte* base, std::size_t bytes) const {
    return overlaps(pending_ranges(), base, bytes);
  }
  // The arrays of each copy that was queued and has not run: on a lost device, for ever.
  [[nodiscard]] std::vector<CopyDescriptors> pending_batches() const {
    const std::lock_guard lock(mutex_);
    std::vector<CopyDescriptors> batches;
    for (const Pending& pending : pending_) batches.push_back(pending.batch);
    return batches;
  }
  using PinnedRange = std::pair<std::byte*, std::size_t>;
  [[nodiscard]] std::vector<PinnedRange> pinned() const {
    const std::lock_guard lock(mutex_);
    return pinned_;
  }
  [[nodiscard]] std::size_t unpinned_copies() const { return unpinned_copies_; }
  [[nodiscard]] std::size_t injected() const { return injected_; }  // failures that happened
  [[nodiscard]] std::ptrdiff_t live_events() const { return live_events_; }
  [[nodiscard]] std::ptrdiff_t live_streams() const { return live_streams_; }

  // ---- Device ----
  const DeviceInfo& info() const noexcept override { return info_; }
  Nanoseconds now() const noexcept override {
    std::function<void()> hook;
    {
      const std::lock_guard lock(mutex_);
      hook = clock_hook_;
    }
    if (hook) hook();
    return clock_.fetch_add(1000) + 1000;
  }

  void* allocate(std::size_t bytes) override { return ::operator new(bytes); }
  void deallocate(void* base, std::size_t) noexcept override { ::operator delete(base); }
  void pin(void* base, std::size_t bytes) override {
    const Entered held(*this, {.kind = CallKind::pin});
    if (held.verdict) throw CapacityError("scripted", {.bound = "pins"});
    pinned_.emplace_back(static_cast<std::byte*>(base), bytes);
  }
  void unpin(void* base, std::size_t bytes) noexcept override {
    const std::lock_guard lock(mutex_);
    std::erase(pinned_, std::pair(static_cast<std::byte*>(base), bytes));
  }

  StreamHandle create_stream() override {
    const Entered held(*this, {.kind = CallKind::create_stream});
    if (held.verdict) throw CopyFailed("scripted: create_stream");
    ++live_streams_;
    return model_.create_stream();
  }
  void destroy_stream(StreamHandle stream) noexcept override {
    const std::lock_guard lock(mutex_);
    model_.destroy_stream(stream);
    --live_streams_;
  }
  std::uint64_t stream_id(StreamHandle stream) override {
    const Entered held(*this, {.kind = CallKind::stream_id, .stream = stream});
    if (held.verdict) throw InvalidArgument("scripted: stream_id");
    return model_.stream_id(stream);
  }

  EventHandle create_event(bool timing) override {
    const Entered held(*this, {.kind = CallKind::create_event});
    if (held.verdict) throw CopyFailed("scripted: create_event");
    ++live_events_;
    return model_.create_event(timing);
  }
  void destroy_event(EventHandle event) noexcept override {
    const std::lock_guard lock(mutex_);
    model_.destroy_event(event);
    --live_events_;
  }
  void record(EventHandle event, StreamHandle stream) override {
    bool reached = false;
    {
      const Entered held(*this, {.kind = CallKind::record, .stream = stream, .event = event});
      if (held.verdict != Failure::refused) reached = model_.record(event, stream, tick());
      if (held.verdict) throw CopyFailed("scripted: record");
    }
    if (reached) progress().bump();
  }
  void wait(StreamHandle stream, EventHandle event) override {
    const Entered held(*this, {.kind = CallKind::wait, .stream = stream, .event = event});
    if (held.verdict != Failure::refused) model_.wait(stream, event);
    if (held.verdict) throw CopyFailed("scripted: wait");
  }
  EventState query(EventHandle event) noexcept override {
    try {
      const Entered held(*this, {.kind = CallKind::query, .event = event});
      if (held.verdict) return EventState::failed;
      return model_.done(event) ? EventState::done : EventState::pending;
    } catch (const DeviceLost&) {
      return EventState::lost;
    } catch (...) {
      return EventState::failed;
    }
  }
  bool recorded(EventHandle event) const override {
    const Entered held(*this, {.kind = CallKind::recorded, .event = event});
    if (held.verdict) throw InvalidArgument("scripted: recorded");
    return model_.recorded(event);
  }
  Nanoseconds event_time(EventHandle event) override {
    const Entered held(*this, {.kind = CallKind::event_time, .event = event});
    if (held.verdict) throw CopyFailed("scripted: event_time");
    return model_.reached_at(event);
  }
  void record_unsignalled(EventHandle event) override {
    const std::lock_guard lock(mutex_);
    model_.record_unsignalled(event);
  }
  void signal(EventHandle event) override {
    {
      const std::lock_guard lock(mutex_);
      model_.signal(event, tick());
    }
    progress().bump();
  }

  void copy(const CopyDescriptors& batch, Direction direction, SourceAccess access,
            StreamHandle stream) override {
    Call call{.kind = CallKind::copy, .stream = stream, .descriptors = batch.count};
    for (std::size_t i = 0; i < batch.count; ++i) call.bytes += batch.sizes[i];
    call.access = access;
    call.first_target = batch.targets[0];
    const Entered held(*this, call);
    expect_copy(batch, direction);
    if (held.verdict != Failure::refused) queue(batch, direction, stream);
    if (held.verdict) throw CopyFailed("scripted: copy");
  }

  void sleep(std::uint64_t seen, Nanoseconds at_most, bool help) override {
    if (!help) return progress().sleep(seen, std::chrono::nanoseconds(at_most));  // a reaper
    if (progress().value() != seen) {
      idle_sleeps_ = 0;
      return;
    }
    if (options_.runs_in_sleep && run_one()) return;
    clock_.fetch_add(std::max<Nanoseconds>(at_most, 1));
    if (++idle_sleeps_ > most_idle_sleeps) {
      throw std::logic_error("scripted: a thread waits for what can never come");
    }
  }

 private:
  static constexpr std::size_t most_idle_sleeps = 100'000;

  struct Pending {
    StreamHandle stream;
    CopyDescriptors batch;
    std::vector<Range> ranges;
  };
  struct Planned {
    CallKind kind;
    std::size_t left;
    Failure how;
    std::size_t times;
  };
  // Inside a call: counted, logged, and told whether it fails. What the device itself allocates is
  // none of a test's allocations.
  struct Entered {
    Entered(const ScriptedDevice& device, const Call& call) {
      device.run_hook(call.kind);
      lock = std::unique_lock(device.mutex_);
      device.calls_.push_back(call);
      for (Planned& planned : device.failures_) {
        if (planned.kind != call.kind && planned.kind != CallKind::any) continue;
        if (planned.left > 1) {
          --planned.left;
        } else if (planned.times > 0) {
          --planned.times;
          verdict = planned.how;
          ++device.injected_;
        }
      }
      if (verdict == Failure::lost) device.lost_ = true;
      if (device.lost_) throw DeviceLost("scripted: the device is lost");
      if (verdict == Failure::no_memory) throw std::bad_alloc();
    }
    const UncountedAllocations own;
    std::unique_lock<std::mutex> lock;
    std::optional<Failure> verdict;
  };

  void run_hook(CallKind kind) const {
    std::function<void()> hook;
    {
      const std::lock_guard lock(mutex_);
      const auto found =
          std::ranges::find(hooks_, kind, &std::pair<CallKind, std::function<void()>>::first);
      if (found == hooks_.end()) return;
      hook = std::move(found->second);
      hooks_.erase(found);
    }
    hook();
  }

  // What hardware would corrupt silently is refused here.
  void expect_copy(const CopyDescriptors& batch, Direction direction) {
    if (batch.count > info_.max_descriptors)
      throw InvalidArgument("scripted: too many descriptors");
    if (!options_.needs_pinned_host) return;
    for (std::size_t i = 0; i < batch.count; ++i) {
      const std::byte* const host =
          direction == Direction::to_host ? batch.targets[i] : batch.sources[i];
      const bool pinned = std::ranges::any_of(pinned_, [&](const auto& range) {
        return host >= range.first && host + batch.sizes[i] <= range.first + range.second;
      });
      if (pinned) continue;
      ++unpinned_copies_;
      throw InvalidArgument("scripted: an asynchronous copy of memory that is not pinned");
    }
  }

  void queue(const CopyDescriptors& batch, Direction direction, StreamHandle stream) {
    Pending pending{stream, batch, {}};
    for (std::size_t i = 0; i < batch.count; ++i) {
      pending.ranges.emplace_back(batch.targets[i], batch.sizes[i]);
      pending.ranges.emplace_back(batch.sources[i], batch.sizes[i]);
    }
    ModelCopy queued;
    queued.batch = batch;
    queued.direction = direction;
    model_.copy(stream, queued);
    pending_.push_back(std::move(pending));
  }

  bool run_first(const std::function<bool(const Pending&)>& wanted) {
    const UncountedAllocations own;
    {
      const std::lock_guard lock(mutex_);
      if (lost_) return false;
      const auto found = [&]() -> std::pair<ModelCopy*, std::list<Pending>::iterator> {
        for (ModelCopy* const copy : model_.runnable()) {
          // The arrays of two copies that are both pending are never the same.
          const auto place = std::ranges::find_if(pending_, [&](const Pending& pending) {
            return pending.batch.targets == copy->batch.targets;
          });
          if (wanted(*place)) return {copy, place};
        }
        return {nullptr, pending_.end()};
      }();
      if (!found.first) return false;
      const CopyDescriptors batch = found.first->batch;
      for (std::size_t i = 0; options_.moves_bytes && i < batch.count; ++i) {
        std::memcpy(batch.targets[i], batch.sources[i], batch.sizes[i]);
      }
      pending_.erase(found.second);
      model_.ended(found.first, tick());
    }
    idle_sleeps_ = 0;
    progress().bump();
    return true;
  }

  Nanoseconds tick() { return clock_.fetch_add(1000) + 1000; }

  const ScriptedOptions options_;
  DeviceInfo info_;
  mutable std::mutex mutex_;
  mutable std::atomic<Nanoseconds> clock_{0};
  std::function<void()> clock_hook_;
  StreamModel model_;
  mutable std::vector<Call> calls_;
  mutable std::vector<Planned> failures_;
  mutable std::vector<std::pair<CallKind, std::function<void()>>> hooks_;
  std::list<Pending> pending_;
  std::vector<PinnedRange> pinned_;
  mutable bool lost_ = false;
  mutable std::atomic<std::size_t> injected_{0};
  std::atomic<std::size_t> unpinned_copies_{0}, idle_sleeps_{0};
  std::atomic<std::ptrdiff_t> live_events_{0}, live_streams_{0};
};

}  // namespace kvmem::test
