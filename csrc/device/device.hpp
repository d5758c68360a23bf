// The seam: everything that kvmem asks of a device, about twenty calls. No CUDA header here.
//
// A device has memory, streams and events that behave as CUDA's do (docs/ARCHITECTURE.md lists the
// facts and the contract suite checks them on every kind): a stream is a FIFO; record() marks the
// end of what the stream holds now; wait() snapshots the event's latest record; a never-recorded
// event counts as complete. Completion is learnt by query(), never by callback.
//
// Threads: every call is thread-safe. Calls on one stream by several threads at once have no
// defined order. Errors: InvalidArgument for a handle that is not this device's; CopyFailed for a
// refused submission (the whole batch may be in flight all the same); DeviceLost once nothing on
// the device can be trusted. noexcept calls never throw.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <optional>
#include <string>

#include "base/progress.hpp"
#include "base/types.hpp"

namespace kvmem {

enum class EventState : std::uint8_t {
  pending,
  done,    // observed: all that was recorded before it has ended
  failed,  // this query learnt nothing; work before it may still run
  lost,    // the device is lost
};

// May the source of a copy be read before the stream reaches the copy?
enum class SourceAccess : std::uint8_t {
  stream_order,
  any,  // only for a source whose bytes the host has observed complete
};

// A batch of copies without an order among themselves. The arrays are the caller's and must live,
// unchanged, until an event recorded behind the batch has been observed.
struct CopyDescriptors {
  std::byte* const* targets = nullptr;
  const std::byte* const* sources = nullptr;
  const std::size_t* sizes = nullptr;
  std::size_t count = 0;
};

struct DeviceInfo {
  std::string kind;  // "host", "virtual", "cuda"
  std::string name;  // "host", "cuda:0": the memory kind that layouts name
  std::size_t memory_bytes = 0;
  unsigned copy_engines = 0;        // copy workers on the host device
  bool needs_pinned_host = false;   // host memory must be pinned for a copy to be asynchronous
  std::size_t max_descriptors = 0;  // per submission
  std::string copy_kernel;          // what moves the bytes
  bool wakes_sleepers = true;       // progress() moves when an event is reached; else: poll
  // now() moves only where somebody sleeps with `help` or moves it: no thread of kvmem's runs.
  bool virtual_time = false;
  bool has_bytes = true;  // false: memory is addresses only, and copies move nothing
  // A call may wait for a driver: the GIL and the short locks are not held across one.
  bool calls_block = false;
  // With more of them on a stream that waits, a submission may wait for the driver.
  std::size_t most_waiting_copies = std::numeric_limits<std::size_t>::max();
  std::optional<int> numa_node;  // of the host memory that is closest to the device
};

// What any device checks of a batch before it is queued. Throws InvalidArgument.
void expect_descriptors(const CopyDescriptors& batch, const DeviceInfo& info);

class Device {
 public:
  Device() = default;
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;
  // Streams, events and memory must be gone; may be skipped when the process exits.
  virtual ~Device() = default;

  [[nodiscard]] virtual const DeviceInfo& info() const noexcept = 0;
  // This device's clock: monotonic, or virtual.
  [[nodiscard]] virtual Nanoseconds now() const noexcept = 0;

  // Device memory, for tools and tests; engines bring their own. 256 bytes aligned, contents
  // undefined.
  [[nodiscard]] virtual void* allocate(std::size_t bytes) = 0;  // throws CapacityError
  // Never under a copy: that either ends first, or the memory is leaked.
  virtual void deallocate(void* base, std::size_t bytes) noexcept = 0;

  // Page-locks host memory for this device. Ranges are whole pages and never overlap. pin() leaves
  // no error pending.
  virtual void pin(void* base, std::size_t bytes) = 0;  // throws CapacityError
  // False: it may still be pinned, so it must not be unmapped: its addresses would come again.
  virtual bool unpin(void* base, std::size_t bytes) noexcept = 0;
  // Of memory that this process may only read: sources of restores. A device that cannot throws
  // CapacityError; such memory is then staged.
  virtual void pin_read_only(void* base, std::size_t bytes) { pin(base, bytes); }

  [[nodiscard]] virtual StreamHandle create_stream() = 0;
  virtual void destroy_stream(StreamHandle stream) noexcept = 0;  // pending work still ends
  // Identifies a stream for the life of the process, though handles are reused. Also the check that
  // a foreign stream may be used here: throws InvalidArgument for an unknown one, another device's,
  // or one that is capturing.
  [[nodiscard]] virtual std::uint64_t stream_id(StreamHandle stream) = 0;

  [[nodiscard]] virtual EventHandle create_event(bool timing) = 0;
  virtual void destroy_event(EventHandle event) noexcept = 0;  // also while pending
  virtual void record(EventHandle event, StreamHandle stream) = 0;
  virtual void wait(StreamHandle stream, EventHandle event) = 0;
  [[nodiscard]] virtual EventState query(EventHandle event) noexcept = 0;
  // False is certain, true may be a guess.
  [[nodiscard]] virtual bool recorded(EventHandle event) const = 0;
  // When the latest record of a timing event that is done was reached, on now()'s clock.
  [[nodiscard]] virtual Nanoseconds event_time(EventHandle event) = 0;

  // Called at the start of a thread of kvmem's own that is for this device alone.
  virtual void adopt_thread() noexcept {}

  // Queues the batch on the stream and returns.
  virtual void copy(const CopyDescriptors& batch, Direction direction, SourceAccess access,
                    StreamHandle stream) = 0;

  // Sleeps until progress() has moved from `seen`, or about `at_most` of wall time has gone by. Who
  // says `help` reaps and submits whenever it wakes, so that the reaper, who does not, need not be
  // woken as well. A device may use a helper's time: the host device copies, a virtual device
  // advances its clock.
  virtual void sleep(std::uint64_t seen, Nanoseconds at_most, bool help) = 0;

  [[nodiscard]] Progress& progress() noexcept { return progress_; }

 private:
  Progress progress_;
};

}  // namespace kvmem
