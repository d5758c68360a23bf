#include "recycle/runtime.hpp"

#include <algorithm>
#include <limits>

#include "base/check.hpp"
#include "base/signals.hpp"

namespace kvmem {

namespace {
constexpr Nanoseconds millisecond = 1'000'000;
// Between two looks at a device that must be polled, while something is in flight.
constexpr Nanoseconds shortest_poll = 50'000, longest_poll = millisecond;
constexpr Nanoseconds interrupt_every = 20 * millisecond;
// Of a waiter: signals are looked for in between.
constexpr Nanoseconds longest_sleep = 50 * millisecond;
constexpr Nanoseconds longest_unasked = 100 * millisecond;  // for what no event stands behind yet
constexpr Nanoseconds idle_sleep = 3'600'000 * millisecond;
// So that what takes long is seen late by a small part of its time only.
Nanoseconds poll_after(Nanoseconds waited) {
  return std::clamp(waited / 64, shortest_poll, longest_poll);
}

}  // namespace

std::shared_ptr<Runtime> Runtime::make(std::shared_ptr<Device> device) {
  return std::make_shared<Runtime>(std::move(device));
}

Runtime::Runtime(std::shared_ptr<Device> device)
    : device_(std::move(device)),
      events_(std::make_shared<EventPool>(device_, false)),
      recycle_(events_) {}

void Runtime::add(std::weak_ptr<Submitter> submitter) {
  const std::lock_guard lock(mutex_);
  std::erase_if(submitters_, [](const auto& other) { return other.expired(); });
  submitters_.push_back(std::move(submitter));
  device_->progress().bump();  // who walks over them just now may have missed one
}

bool Runtime::advance() noexcept {
  bool waiting = false;
  do {
    waiting = false;
    for (std::size_t i = 0;; ++i) {
      std::shared_ptr<Submitter> submitter;
      {
        const std::lock_guard lock(mutex_);
        if (i >= submitters_.size()) break;
        submitter = submitters_[i].lock();
      }
      if (!submitter) continue;
      submitter->submit_ready();
      waiting |= submitter->has_waiting();
    }
  } while (recycle_.reap() > 0);  // what ended made room in a window
  return waiting;
}

void Runtime::catch_up() noexcept {
  recycle_.reap_in_turn();
  advance();
}

// ---- waiting ----

std::optional<Nanoseconds> Runtime::deadline_after(std::optional<double> seconds) const {
  if (!seconds) return std::nullopt;
  const Nanoseconds now = device_->now();
  const double ns = std::max(*seconds, 0.0) * 1e9;
  constexpr Nanoseconds latest = std::numeric_limits<Nanoseconds>::max();
  return ns < static_cast<double>(latest - now) ? now + static_cast<Nanoseconds>(ns) : latest;
}

bool Runtime::wait_until(const std::function<bool()>& done, std::optional<Nanoseconds> deadline,
                         const Interrupt& interrupt) {
  struct Leaving {
    Runtime& runtime;
    bool waiting = false;
    ~Leaving() { runtime.hand_over(waiting); }
  } leaving{*this};
  // Signals come in real time, whatever the device's clock is.
  using Clock = std::chrono::steady_clock;
  auto last_look = Clock::now();
  const bool polls = !device_->info().wakes_sleepers;
  const Nanoseconds began = polls ? device_->now() : 0;
  for (;;) {
    const std::uint64_t seen = device_->progress().value();
    leaving.waiting = advance();
    if (done()) return true;
    if (process_is_exiting()) return false;  // nothing moves any more
    Nanoseconds most = polls ? poll_after(device_->now() - began) : longest_sleep;
    // Virtual time is passed at once, or not at all.
    if (device_->info().virtual_time) most = std::numeric_limits<Nanoseconds>::max();
    if (deadline) {
      const Nanoseconds left = *deadline - device_->now();
      if (left <= 0) {
        catch_up();  // another thread may be about to observe the end
        return done();
      }
      most = std::min(most, left);
    }
    if (interrupt && Clock::now() - last_look > std::chrono::nanoseconds(interrupt_every)) {
      interrupt();
      last_look = Clock::now();
    }
    device_->sleep(seen, most, true);
  }
}

void Runtime::hand_over(bool waiting) noexcept {
  if (reaper_sleeps_soundly_.load() && (waiting || recycle_.in_flight() > 0))
    device_->progress().bump();
}

HostBlocks Runtime::acquire(BlockPool& pool, std::size_t count, std::optional<Nanoseconds> deadline,
                            const Interrupt& interrupt) {
  PoolTicket ticket = pool.enqueue(count);
  if (!wait_until([&] { return ticket.granted(); }, deadline, interrupt)) {
    throw PoolExhausted("the pool did not have the blocks in time", pool.shortage(count));
  }
  return ticket.take();
}

// ---- the reaper ----

std::unique_ptr<Runtime::ReaperLease> Runtime::lease_reaper() {
  auto lease = std::make_unique<ReaperLease>(shared_from_this());
  const std::lock_guard lock(mutex_);
  ++leases_;
  if (!reaper_runs_ && !device_->info().virtual_time) {
    // Detached: it keeps the runtime alive by itself, and it may be the one to let go of the last
    // manager.
    const SignalsBlocked blocked;
    std::thread([self = shared_from_this()] { self->run_reaper(); }).detach();
    reaper_runs_ = true;
  }
  return lease;
}

Runtime::ReaperLease::~ReaperLease() {
  if (mark_.must_leak()) return;
  std::unique_lock lock(runtime_->mutex_);
  if (--runtime_->leases_ > 0) return;
  lock.unlock();
  runtime_->device().progress().bump_for_all();
  lock.lock();
  // It let go of the last manager: it ends by itself.
  if (runtime_->reaper_id_ == std::this_thread::get_id()) return;
  runtime_->reaper_ended_.wait(lock,
                               [&] { return !runtime_->reaper_runs_ || runtime_->leases_ > 0; });
}

void Runtime::run_reaper() {
  {
    const std::lock_guard lock(mutex_);
    reaper_id_ = std::this_thread::get_id();
  }
  device_->adopt_thread();
  const bool polls = !device_->info().wakes_sleepers;
  Nanoseconds since = device_->now();  // the last end, or nothing was in flight
  for (;;) {
    const std::uint64_t seen = device_->progress().value();
    const std::size_t before = recycle_.in_flight();
    const bool waiting = advance();
    {
      const std::lock_guard lock(mutex_);
      if (leases_ == 0) {
        reaper_runs_ = false;
        reaper_ended_.notify_all();
        return;
      }
    }
    const bool in_flight = waiting || recycle_.in_flight() > 0;
    if (!in_flight || recycle_.in_flight() < before) since = device_->now();
    const Nanoseconds asking = polls ? poll_after(device_->now() - since) : longest_unasked;
    reaper_sleeps_soundly_.store(!in_flight);
    device_->sleep(seen, in_flight ? asking : idle_sleep, false);
    reaper_sleeps_soundly_.store(false);
  }
}

// ---- foreign streams and events ----

Runtime::Mark Runtime::mark_stream(StreamHandle stream) {
  Mark mark{std::make_shared<Event>(events_->acquire()), device_->stream_id(stream), stream};
  mark.event->record(stream);
  return mark;
}

Runtime::Mark Runtime::mark_event(EventHandle event) {
  KVMEM_EXPECTS(device_->recorded(event), "event ", event,
                " was never recorded: a wait on it would wait for nothing");
  if (device_->query(event) == EventState::done) return {};
  const std::lock_guard lock(spare_mutex_);
  Spare& spare = spare_stream();
  Mark mark{std::make_shared<Event>(events_->acquire()), spare.stream.id(), spare.stream.handle(),
            true};
  device_->wait(mark.stream, event);
  mark.event->record(mark.stream);
  spare.last = mark.event;
  return mark;
}

Runtime::Spare& Runtime::spare_stream() {
  for (Spare& spare : spares_) {
    if (!spare.last || spare.last->query() == EventState::done) return spare;
  }
  // At the bound the least recently used one serves again: its order is then stricter than asked
  // for, never weaker.
  if (spares_.size() == most_spare_streams)
    spares_.splice(spares_.end(), spares_, spares_.begin());
  else
    spares_.push_back({Stream(device_), nullptr});
  return spares_.back();
}

namespace {

// Blocks whose owner let go of them as of a point on a stream.
struct ReleaseGuard final : Parked {
  explicit ReleaseGuard(HostBlocks held) : blocks(std::move(held)) {}
  void ended(bool lost) noexcept override {
    if (lost)
      blocks.poison();
    else
      blocks.release();
  }
  HostBlocks blocks;
};

}  // namespace

void Runtime::release_after(HostBlocks& blocks, const std::vector<Mark>& marks) {
  struct Prepared {
    std::shared_ptr<RecycleQueue::Line> line;
    std::unique_ptr<ReleaseGuard> guard;
  };
  std::vector<Prepared> prepared;
  for (const Mark& mark : marks) {
    if (!mark.event) continue;
    // The caller may destroy its stream, so nothing more is recorded on that.
    prepared.push_back({recycle_.line(mark.stream_id, mark.stream, mark.ours),
                        std::make_unique<ReleaseGuard>(blocks.hold_for_copy())});
    prepared.back().guard->event = mark.event;
  }
  for (auto& [line, guard] : prepared) recycle_.park(line, std::move(guard));
  blocks.release();
}

}  // namespace kvmem
