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
#include <list>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <utility>
#include <vector>

#include "base/error.hpp"
#include "device/model_device.hpp"
#include "device/model.hpp"

namespace kvmem::test {

enum class CallKind : std::uint8_t { create_stream, create_event, record, wait, query, copy, pin };

enum class Failure : std::uint8_t {
  refused,    // nothing happened
  in_flight,  // it happened, and the device says that it failed
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
  // The nth call of that kind from now on fails, counted from 1.
  void fail(CallKind kind, std::size_t nth, Failure how = Failure::refused) {
    const std::lock_guard lock(mutex_);
    failures_.push_back({kind, nth, how, false});
  }
  void fail_always(CallKind kind, Failure how = Failure::refused) {
    const std::lock_guard lock(mutex_);
    failures_.push_back({kind, 1, how, true});
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
  // May a copy that was queued and has not run still read or write there?
  [[nodiscard]] bool may_touch(const std::byte* base, std::size_t bytes) const {
    const std::lock_guard lock(mutex_);
    return std::ranges::any_of(pending_, [&](const Pending& pending) {
      return std::ranges::any_of(pending.ranges, [&](const auto& range) {
        return range.first < base + bytes && base < range.first + range.second;
      });
    });
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
    const auto held = let_in({.kind = CallKind::pin});
    if (held.verdict != std::nullopt) throw CapacityError("scripted", {.bound = "pins"});
    pinned_.emplace_back(static_cast<std::byte*>(base), bytes);
  }
  void unpin(void* base, std::size_t bytes) noexcept override {
    const std::lock_guard lock(mutex_);
    std::erase(pinned_, std::pair(static_cast<std::byte*>(base), bytes));
  }

  StreamHandle create_stream() override {
    const auto held = let_in({.kind = CallKind::create_stream});
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
    const std::lock_guard lock(mutex_);
    return model_.stream_id(stream);
  }

  EventHandle create_event(bool timing) override {
    const auto held = let_in({.kind = CallKind::create_event});
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
      const auto held = let_in({.kind = CallKind::record, .stream = stream, .event = event});
      if (held.verdict != Failure::refused) reached = model_.record(event, stream, tick());
      if (held.verdict) throw CopyFailed("scripted: record");
    }
    if (reached) progress().bump();
  }
  void wait(StreamHandle stream, EventHandle event) override {
    const auto held = let_in({.kind = CallKind::wait, .stream = stream, .event = event});
    if (held.verdict != Failure::refused) model_.wait(stream, event);
    if (held.verdict) throw CopyFailed("scripted: wait");
  }
  EventState query(EventHandle event) noexcept override {
    try {
      const auto held = let_in({.kind = CallKind::query, .event = event});
      if (held.verdict) return EventState::failed;
      return model_.done(event) ? EventState::done : EventState::pending;
    } catch (const DeviceLost&) {
      return EventState::lost;
    } catch (...) {
      return EventState::failed;
    }
  }
  bool recorded(EventHandle event) const override {
    const std::lock_guard lock(mutex_);
    return model_.recorded(event);
  }
  Nanoseconds event_time(EventHandle event) override {
    const std::lock_guard lock(mutex_);
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
    const auto held = let_in(call);
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
    std::vector<std::pair<const std::byte*, std::size_t>> ranges;
  };
  struct Planned {
    CallKind kind;
    std::size_t left;
    Failure how;
    bool always;
  };
  struct Entered {
    std::unique_lock<std::mutex> lock;
    std::optional<Failure> verdict;
  };

  Entered let_in(const Call& call) {
    run_hook(call.kind);
    Entered entered{std::unique_lock(mutex_), std::nullopt};
    calls_.push_back(call);
    for (Planned& planned : failures_) {
      if (planned.kind != call.kind || planned.left == 0) continue;
      if (!planned.always && --planned.left > 0) continue;
      entered.verdict = planned.how;
      ++injected_;
    }
    if (entered.verdict == Failure::lost) lost_ = true;
    if (lost_) throw DeviceLost("scripted: the device is lost");
    return entered;
  }

  void run_hook(CallKind kind) {
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
  std::vector<Call> calls_;
  std::vector<Planned> failures_;
  std::vector<std::pair<CallKind, std::function<void()>>> hooks_;
  std::list<Pending> pending_;
  std::vector<std::pair<std::byte*, std::size_t>> pinned_;
  bool lost_ = false;
  std::atomic<std::size_t> unpinned_copies_{0}, injected_{0}, idle_sleeps_{0};
  std::atomic<std::ptrdiff_t> live_events_{0}, live_streams_{0};
};

}  // namespace kvmem::test
