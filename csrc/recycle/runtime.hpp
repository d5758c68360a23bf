// What all users of one device share: its events, the one recycle queue, at most one reaper thread,
// and waiting.
//
// Whoever reaps also submits: advance() lets every registered submitter hand its next slices to the
// device and reaps what has ended. It is called by the reaper thread, by poll(), and by any thread
// that waits. Without a reaper there is no thread at all, and the engine's own calls drive it. The
// reaper sleeps while nothing is in flight or queued.
//
// Always held by shared_ptr. Any thread; never call under a lock of your own.
#pragma once

#include <atomic>
#include <condition_variable>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "host/block_pool.hpp"
#include "recycle/recycle_queue.hpp"

namespace kvmem {

// Hands queued work to the device.
class Submitter {
 public:
  virtual ~Submitter() = default;
  virtual void submit_ready() noexcept = 0;
  // Work that was accepted and not yet submitted.
  [[nodiscard]] virtual bool has_waiting() const noexcept = 0;
};

class Runtime : public std::enable_shared_from_this<Runtime> {
 public:
  // Called now and then while a thread waits; may throw, which ends the wait (a signal in Python).
  using Interrupt = std::function<void()>;

  [[nodiscard]] static std::shared_ptr<Runtime> make(std::shared_ptr<Device> device);
  explicit Runtime(std::shared_ptr<Device> device);

  [[nodiscard]] Device& device() const noexcept { return *device_; }
  [[nodiscard]] const std::shared_ptr<Device>& device_ptr() const noexcept { return device_; }
  [[nodiscard]] const std::shared_ptr<EventPool>& events() const noexcept { return events_; }
  [[nodiscard]] RecycleQueue& recycle() noexcept { return recycle_; }

  void add(std::weak_ptr<Submitter> submitter);
  bool advance() noexcept;  // whether accepted work still waits for submission
  // The same, and waits for its turn to reap: what the device has finished before the call has
  // ended behind it.
  void catch_up() noexcept;

  // Advances and sleeps until done() or the device's clock passes `deadline` (none: for ever).
  // Returns done().
  bool wait_until(const std::function<bool()>& done, std::optional<Nanoseconds> deadline,
                  const Interrupt& interrupt);
  // On the device's clock; saturates.
  [[nodiscard]] std::optional<Nanoseconds> deadline_after(std::optional<double> seconds) const;

  // The reaper lives while anybody holds one of these; dropping the last waits for its end (not
  // from itself). A device in virtual time has no reaper: whoever moves its clock advances.
  class ReaperLease;
  [[nodiscard]] std::unique_ptr<ReaperLease> lease_reaper();

  // An event of ours that stands for what a foreign stream holds now, or what a foreign event
  // stands for now. What happens later to that stream or event changes nothing. Throws
  // InvalidArgument for a stream or event that may not be used here, and for an event that was
  // never recorded.
  struct Mark {
    std::shared_ptr<Event> event;  // null: nothing is pending
    std::uint64_t stream_id = 0;   // the stream it was recorded on
    StreamHandle stream = 0;
    bool ours = false;  // that stream is kvmem's own
  };
  [[nodiscard]] Mark mark_stream(StreamHandle stream);
  [[nodiscard]] Mark mark_event(EventHandle event);

  // Lets the blocks go when the device has reached these marks. On an error nothing is released:
  // the blocks are still the caller's.
  void release_after(HostBlocks& blocks, const std::vector<Mark>& marks);

  // Waits for slots; throws PoolExhausted at the deadline.
  [[nodiscard]] HostBlocks acquire(BlockPool& pool, std::size_t count,
                                   std::optional<Nanoseconds> deadline, const Interrupt& interrupt);

 private:
  static constexpr std::size_t most_spare_streams = 64;
  struct Spare {
    Stream stream;
    std::shared_ptr<Event> last;  // recorded on it; the stream is free when that is done
  };
  Spare& spare_stream();  // with spare_mutex_ held
  void run_reaper();
  // By a thread that leaves off waiting: what it was woken for, the reaper was not. `waiting`: what
  // its last advance() said.
  void hand_over(bool waiting) noexcept;

  std::shared_ptr<Device> device_;
  std::shared_ptr<EventPool> events_;
  RecycleQueue recycle_;

  std::mutex mutex_;  // over what follows
  std::vector<std::weak_ptr<Submitter>> submitters_;
  std::size_t leases_ = 0;
  bool reaper_runs_ = false;
  std::thread::id reaper_id_;
  std::atomic<bool> reaper_sleeps_soundly_{false};  // until somebody wakes it
  std::condition_variable reaper_ended_;

  std::mutex spare_mutex_;
  std::list<Spare> spares_;
};

class Runtime::ReaperLease {
 public:
  explicit ReaperLease(std::shared_ptr<Runtime> runtime) : runtime_(std::move(runtime)) {}
  ReaperLease(const ReaperLease&) = delete;
  ReaperLease& operator=(const ReaperLease&) = delete;
  ~ReaperLease();

 private:
  std::shared_ptr<Runtime> runtime_;
  ProcessMark mark_;
};

}  // namespace kvmem
