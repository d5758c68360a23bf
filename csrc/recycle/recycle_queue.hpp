// Steps 3 and 4: COMPLETE, RECYCLE. The only way back for blocks that a copy may still touch.
//
// What is in flight is parked here with the event recorded behind it. reap() asks each event; when
// the end has been observed, ended() is called once and the holder is destroyed, which sends its
// blocks home. Nothing else ends it: no time-out, no dropped handle. Where no event could be
// recorded, or asking fails, a new one is recorded behind the work on the same stream, tried again
// by each reap. One FIFO a stream: a slow stream keeps nobody else waiting.
//
// Holders are allocated before the work is submitted, so park() cannot fail. What is still parked
// when the queue dies is leaked, with its blocks: a copy may still touch them. Any thread.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <vector>

#include "device/stream.hpp"

namespace kvmem {

class Parked {
 public:
  Parked() = default;
  Parked(const Parked&) = delete;
  Parked& operator=(const Parked&) = delete;
  virtual ~Parked() = default;
  // Called once, by the reaping thread, which holds no lock but its turn. `lost`: the device was
  // lost, the end was not observed and never will be.
  virtual void ended(bool lost) noexcept = 0;

  std::shared_ptr<Event> event;  // recorded behind the work; null or not recorded when that failed

 private:
  friend class RecycleQueue;
  std::unique_ptr<Parked> behind_;  // the next one in its line
};

class RecycleQueue {
 public:
  struct Line;  // what is parked behind one stream, in order

  explicit RecycleQueue(std::shared_ptr<EventPool> events) : events_(std::move(events)) {}
  ~RecycleQueue();
  RecycleQueue(const RecycleQueue&) = delete;
  RecycleQueue& operator=(const RecycleQueue&) = delete;

  // The line of a stream; to be had before anything is submitted. `ours`: the stream is kvmem's own
  // and outlives the line, so that a new event may be recorded on it.
  [[nodiscard]] std::shared_ptr<Line> line(std::uint64_t stream_id, StreamHandle stream, bool ours);
  void park(const std::shared_ptr<Line>& line, std::unique_ptr<Parked> parked) noexcept;

  // Asks the events, in order of each line, until none has ended. Returns how many ended. If
  // another thread is at it, returns 0 at once: that thread asks all of them once more before it
  // leaves.
  std::size_t reap() noexcept;
  // The same, but waits for its turn: what the device has finished before the call has ended behind
  // it. Not from ended().
  void reap_in_turn() noexcept;

  [[nodiscard]] std::size_t in_flight() const noexcept { return in_flight_.load(); }
  [[nodiscard]] bool device_lost() const noexcept { return lost_.load(); }  // seen by a reap

 private:
  enum class Head : std::uint8_t { waits, ended, lost };
  [[nodiscard]] Head ask(const Line& line, Parked& head) noexcept;
  [[nodiscard]] std::unique_ptr<Parked> pop(Line& line) noexcept;
  std::size_t pass() noexcept;

  std::shared_ptr<EventPool> events_;
  ProcessMark mark_;
  std::mutex reaping_;               // one reaper at a time
  std::atomic<bool> wanted_{false};  // somebody came while another one was at it
  std::mutex mutex_;                 // over the lines; no device call under it
  std::vector<std::shared_ptr<Line>> lines_;
  std::atomic<std::size_t> in_flight_{0};
  std::atomic<bool> lost_{false};
};

}  // namespace kvmem
