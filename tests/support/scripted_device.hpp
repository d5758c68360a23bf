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

using CallKind = DeviceCall;

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
  std::size_t bytes = 0;
  SourceAccess access = SourceAccess::stream_order;
};

struct ScriptedOptions {
  bool moves_bytes = true;  // false: addresses may be made up
  bool needs_pinned_host = false;
  // A thread that sleeps with `help` runs a copy, as on the host device.
  bool runs_in_sleep = false;
  bool virtual_time = false;  // says that it is one; what threads of kvmem's did is done in calls
  std::size_t max_descriptors = 1 << 16;
  std::size_t most_waiting_copies = 1 << 16;
};

class ScriptedDevice final : public ModelDevice {
 public:
  explicit ScriptedDevice(const ScriptedOptions& options = {})
      : ModelDevice("the scripted device"), options_(options) {
    info_.kind = "scripted";
    info_.name = "host";
    info_.needs_pinned_host = options.needs_pinned_host;
    info_.max_descriptors = options.max_descriptors;
    info_.most_waiting_copies = options.most_waiting_copies;
    info_.virtual_time = options.virtual_time;
  }

  // ---- the script ----
  // The nth call of that kind from now on fails, counted from 1, and those behind it.
  void fail(CallKind kind, std::size_t nth, Failure how = Failure::refused, std::size_t times = 1) {
    const Lock held = lock();
    failures_.push_back({kind, nth, how, times});
  }
  void fail_always(CallKind kind, Failure how = Failure::refused) {
    fail(kind, 1, how, std::numeric_limits<std::size_t>::max());
  }
  void heal() {
    const Lock held = lock();
    failures_.clear();
  }
  void lose() {
    {
      const Lock held = lock();
      lost_ = true;
    }
    progress().bump();
  }
  [[nodiscard]] bool lost() const {
    const Lock held = lock();
    return lost_;
  }
  // Called before the next call of that kind has any effect, outside the device's lock.
  void before_next(CallKind kind, std::function<void()> hook) {
    const Lock held = lock();
    hooks_.emplace_back(kind, std::move(hook));
  }
  // Called whenever somebody asks for the time, outside the device's lock.
  void before_each_look_at_the_clock(std::function<void()> hook) {
    const Lock held = lock();
    clock_hook_ = std::move(hook);
  }

  // Runs the copy at the head of that stream, or of any; false when none may run there.
  bool run(StreamHandle stream);
  bool run_one() { return run(any_stream); }
  void run_all() {
    while (run_one()) {
    }
  }

  // ---- what happened ----
  [[nodiscard]] std::vector<Call> calls() const {
    const Lock held = lock();
    return calls_;
  }
  [[nodiscard]] std::vector<Call> calls(CallKind kind) const {
    auto all = calls();
    std::erase_if(all, [&](const Call& call) { return call.kind != kind; });
    return all;
  }
  void forget_calls() {
    const Lock held = lock();
    calls_.clear();
  }
  [[nodiscard]] std::size_t pending_copies() const {
    const Lock held = lock();
    return pending_.size();
  }
  // The arrays of each copy that was queued and has not run: on a lost device, for ever.
  [[nodiscard]] std::vector<CopyDescriptors> pending_batches() const {
    const Lock held = lock();
    return pending_;
  }
  using PinnedRange = std::pair<std::byte*, std::size_t>;
  [[nodiscard]] std::vector<PinnedRange> pinned() const {
    const Lock held = lock();
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
      const Lock held(mutex_);
      hook = clock_hook_;
    }
    if (hook) hook();
    return now_with_lock();
  }

  void* allocate(std::size_t bytes) override { return ::operator new(bytes); }
  void deallocate(void* base, std::size_t) noexcept override { ::operator delete(base); }
  void pin(void* base, std::size_t bytes) override {
    const Entered entered = enter({DeviceCall::pin});
    if (entered.fails) throw CapacityError("scripted", {.bound = "pins"});
    pinned_.emplace_back(static_cast<std::byte*>(base), bytes);
  }
  bool unpin(void* base, std::size_t bytes) noexcept override {
    const Lock held(mutex_);
    std::erase(pinned_, std::pair(static_cast<std::byte*>(base), bytes));
    return true;
  }

  StreamHandle create_stream() override {
    const StreamHandle stream = ModelDevice::create_stream();
    ++live_streams_;
    return stream;
  }
  void destroy_stream(StreamHandle stream) noexcept override {
    ModelDevice::destroy_stream(stream);
    --live_streams_;
  }
  EventHandle create_event(bool timing) override {
    const EventHandle event = ModelDevice::create_event(timing);
    ++live_events_;
    return event;
  }
  void destroy_event(EventHandle event) noexcept override {
    ModelDevice::destroy_event(event);
    --live_events_;
  }
  bool recorded(EventHandle event) const override {
    auto& self = const_cast<ScriptedDevice&>(*this);  // const, and yet a call
    const Entered entered = self.enter({DeviceCall::recorded, 0, event});
    entered.end("recorded");
    return model_.recorded(event);
  }

  void copy(const CopyDescriptors& batch, Direction direction, SourceAccess access,
            StreamHandle stream) override {
    const UncountedAllocations own;
    const Entered entered = enter({DeviceCall::copy, stream});
    for (std::size_t i = 0; i < batch.count; ++i) calls_.back().bytes += batch.sizes[i];
    calls_.back().access = access;
    expect_copy(batch, direction);
    if (entered.happens) {
      ModelCopy queued;
      queued.batch = batch;
      queued.direction = direction;
      queued.number = stream;
      model_.copy(stream, queued);
      pending_.push_back(batch);
    }
    entered.end("scripted: copy");
  }

  void sleep(std::uint64_t seen, Nanoseconds at_most, bool help) override {
    if (!help) return progress().sleep(seen, std::chrono::nanoseconds(at_most));  // a reaper
    if (progress().value() != seen) {
      idle_sleeps_ = 0;
      return;
    }
    if (options_.runs_in_sleep && run_one()) return;
    clock_.fetch_add(std::clamp<Nanoseconds>(at_most, 1, longest_idle));
    if (++idle_sleeps_ > most_idle_sleeps) {
      throw std::logic_error("scripted: a thread waits for what can never come");
    }
  }

 private:
  static constexpr StreamHandle any_stream = 0;  // never given out
  static constexpr std::size_t most_idle_sleeps = 100'000;
  static constexpr Nanoseconds longest_idle = 3'600'000'000'000;

  struct Planned {
    CallKind kind;
    std::size_t left;
    Failure how;
    std::size_t times;
  };
  // Logs the call and decides whether it fails. That allocates, which is none of a test's subject.
  Entered enter(const Asked& asked) override {
    const UncountedAllocations own;
    run_hook(asked.call);
    Entered entered{lock()};
    calls_.push_back({asked.call, asked.stream, asked.event});
    std::optional<Failure> verdict;
    for (Planned& planned : failures_) {
      if (planned.kind != asked.call && planned.kind != CallKind::any) continue;
      if (planned.left > 1) {
        --planned.left;
      } else if (planned.times > 0) {
        --planned.times;
        verdict = planned.how;
        ++injected_;
      }
    }
    if (verdict == Failure::lost) lost_ = true;
    if (lost_) throw DeviceLost("scripted: the device is lost");
    if (verdict == Failure::no_memory) throw std::bad_alloc();
    entered.fails = verdict.has_value();
    entered.happens = verdict != Failure::refused;
    return entered;
  }

  void run_hook(CallKind kind) {
    std::function<void()> hook;
    {
      const Lock held = lock();
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

  // A hook is called without the lock.
  Nanoseconds now_with_lock() const override { return clock_.fetch_add(1000) + 1000; }

  const ScriptedOptions options_;
  DeviceInfo info_;
  mutable std::atomic<Nanoseconds> clock_{0};
  std::function<void()> clock_hook_;
  std::vector<Call> calls_;
  std::vector<Planned> failures_;
  std::vector<std::pair<CallKind, std::function<void()>>> hooks_;
  std::vector<CopyDescriptors> pending_;
  std::vector<PinnedRange> pinned_;
  bool lost_ = false;
  std::atomic<std::size_t> injected_{0};
  std::atomic<std::size_t> unpinned_copies_{0}, idle_sleeps_{0};
  std::atomic<std::ptrdiff_t> live_events_{0}, live_streams_{0};
};

inline bool ScriptedDevice::run(StreamHandle stream) {
  const UncountedAllocations own;
  {
    const Lock held = lock();
    if (lost_) return false;
    const auto found = std::ranges::find_if(model_.runnable(), [&](const ModelCopy* copy) {
      return stream == any_stream || copy->number == stream;
    });
    if (found == model_.runnable().end()) return false;
    const CopyDescriptors batch = (*found)->batch;
    for (std::size_t i = 0; options_.moves_bytes && i < batch.count; ++i) {
      std::memcpy(batch.targets[i], batch.sources[i], batch.sizes[i]);
    }
    // The arrays of two copies that are both pending are never the same.
    std::erase_if(pending_,
                  [&](const CopyDescriptors& pending) { return pending.targets == batch.targets; });
    model_.ended(*found, now_with_lock());
  }
  idle_sleeps_ = 0;
  progress().bump();
  return true;
}

}  // namespace kvmem::test
