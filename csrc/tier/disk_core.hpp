// The queue of a disk tier, its workers, and what is known of its health.
#pragma once

#include <chrono>
#include <condition_variable>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "tier/slot_scan.hpp"

namespace kvmem::detail {

using DiskClock = std::chrono::steady_clock;

struct DiskCall {
  enum class Kind : std::uint8_t { read, write, erase };
  Kind kind = Kind::read;
  SlotHeader header;  // to be written; or expected, and once moved found
  const std::byte* source = nullptr;
  std::optional<std::uint32_t> source_sum;  // once summed: what it is
  std::byte* target = nullptr;
  DiskDone done;
  bool probe = false;        // a degraded tier's attempt
  std::uint64_t volume = 0;  // that it ran on: how often it had been remade by then
  DiskClock::time_point queued;

  [[nodiscard]] bool reads() const noexcept { return kind == Kind::read; }
  [[nodiscard]] SlotIndex slot() const noexcept { return static_cast<SlotIndex>(header.slot); }
};

// Passed from list to list without needing memory.
using DiskCalls = std::list<DiskCall>;

// A large write is summed and then moved to the disk, a large read moved and then summed, each step
// by whichever worker is free: one whose move has ended begins the next at once, so that no move
// waits for a worker to wake. What is small is summed by the worker that moves it, which takes less
// time than to wake another; so is all of a tier without workers, by whoever calls.
//
// A write is summed shortly before its turn, so that where the disk's driver reads by the processor
// it still is in the caches; and no more are summed at once than keep the disk at work, because it
// reads the same memory. Together 0.02 to 0.04 of a virtual disk's speed, and 0.1 of a tmpfs's.
struct DiskStep {
  enum class Kind : std::uint8_t { move, sum };
  Kind kind = Kind::move;
  DiskCalls one;
};

class DiskCore : public std::enable_shared_from_this<DiskCore> {
 public:
  explicit DiskCore(const DiskOptions& options);
  void start();  // the workers, which hold the core; it is closed or abandoned after that

  [[nodiscard]] std::vector<FoundSlot> take_found();
  [[nodiscard]] std::vector<FoundSlot> take_superseded();
  // With the call checked by itself. Takes it if it is accepted.
  [[nodiscard]] DiskSubmit submit(DiskCall& call);
  std::size_t expire();
  [[nodiscard]] bool is_retired(SlotIndex slot) const;
  [[nodiscard]] DiskStats stats() const;
  DiskCloseReport close(std::chrono::nanoseconds within);
  void abandon() noexcept;  // workers that did not end are on their own

  [[nodiscard]] const DiskOptions& options() const noexcept { return options_; }
  [[nodiscard]] const DiskGeometry& geometry() const noexcept { return geometry_; }

 private:
  struct SlotUse {
    std::uint16_t readers = 0;
    bool writing = false, retired = false;
  };
  struct Worker {
    std::thread thread;
    bool busy = false;  // with a call, since:
    DiskClock::time_point since;
  };
  struct Ended {
    DiskResult result;
    std::string trouble;  // of a volume that could not be remade
  };
  // Put into words by stats() only: workers must not need memory to say that there is trouble.
  struct Trouble {
    const char* doing = nullptr;  // null: healthy
    int error = 0;
    std::string words;  // instead
  };

  void work(std::size_t number);
  void work_now(DiskCalls& one);
  void sync_beside(std::shared_ptr<Volume> volume);
  [[nodiscard]] bool is_summed_apart(const DiskCall& call) const noexcept {
    return options_.workers > 0 && call.header.payload_bytes >= 256 << 10;
  }
  [[nodiscard]] bool next(std::size_t number, DiskStep& step);
  void take(DiskStep& step, HeaderBlock& block) noexcept;
  [[nodiscard]] static DiskResult sum(DiskCall& call) noexcept;
  [[nodiscard]] Ended move(DiskCall& call, HeaderBlock& block) noexcept;
  [[nodiscard]] DiskResult read(Volume& volume, DiskCall& call, HeaderBlock& block);
  [[nodiscard]] DiskResult write(Volume& volume, DiskCall& call, HeaderBlock& block);
  [[nodiscard]] std::shared_ptr<Volume> volume_for(DiskCall& call) const;
  [[nodiscard]] std::shared_ptr<Volume> remake(const Volume& former, DiskCall& call);

  // With the lock held.
  [[nodiscard]] DiskSubmit admit(DiskCall& call);
  [[nodiscard]] DiskCalls* ready(DiskStep::Kind& kind);
  [[nodiscard]] DiskCalls& next_write();
  [[nodiscard]] bool may_sum_write() const;
  [[nodiscard]] bool is_more_ready();
  [[nodiscard]] bool begin(DiskStep& step);
  void settle(const DiskCall& call, Ended& ended) noexcept;
  void settle_read(const DiskCall& call, const DiskResult& result) noexcept;
  void settle_write(const DiskCall& call, Ended& ended) noexcept;
  void degrade(Trouble trouble) noexcept;
  [[nodiscard]] DiskClock::time_point next_probe() const noexcept;
  [[nodiscard]] bool is_of_now(const DiskCall& call) const noexcept {
    return call.volume == stats_.remade;
  }
  [[nodiscard]] bool is_stalled() const;
  [[nodiscard]] std::size_t writes_waiting() const;
  [[nodiscard]] std::size_t running() const;

  // Without it.
  void finish(DiskCall& call, Ended ended) noexcept;  // settles and tells one of `callers_`
  static void tell(DiskCall& call, DiskResult result) noexcept;

  const DiskOptions options_;
  const DiskGeometry geometry_;
  std::shared_ptr<DiskCore> self_;  // until all workers have ended
  mutable std::mutex mutex_;        // over what follows
  std::condition_variable work_, quiet_;
  std::shared_ptr<Volume> volume_;
  std::vector<FoundSlot> found_, superseded_;
  std::vector<SlotUse> slots_;
  DiskCalls reads_, writes_, summed_;     // to be moved; in `summed_` writes, as in:
  DiskCalls unverified_, unsummed_;       // reads and writes, to be summed
  std::size_t moving_ = 0, summing_ = 0;  // of `summing_` only writes
  std::size_t callers_ = 0;  // calls in the hands of who called: there are no workers, or they were
                             // dropped and are being told
  std::vector<Worker> workers_;
  std::size_t alive_ = 0;
  bool closed_ = false, syncing_ = false;
  int sync_error_ = 0;
  std::uint64_t generation_ = 0;
  Trouble trouble_;
  bool probing_ = false;
  DiskClock::time_point next_probe_;
  DiskStats stats_;  // what stats() does not ask elsewhere
};

}  // namespace kvmem::detail
