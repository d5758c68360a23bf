// Blocks in preallocated files: a slot has a number, a header that says what it holds, and bytes
// that come back right or not at all. It keeps no index: which key is in which slot is the owner's
// to know, and the disk's to tell it once, at the start.
//
// On disk: a folder with `lock`, `superblock` and `slots-NNNN.kv`; docs/DISK_FORMAT.md. Their size
// never changes while in use. A write is one call: header, payload and the header again. A process
// killed within it leaves a slot whose two headers differ, which is known to be torn. A power cut
// may also lose or reorder what the device had not made durable; then headers and a payload that do
// not belong together meet, and the sum over both tells, when the slot is read. So starting reads
// headers only, and every read verifies header and payload before it says ok. A target whose read
// did not end ok holds undefined bytes.
//
// Buffers are the caller's, and stay so until the completion has been called: page-aligned, with
// room for whole pages (what a slot of a BlockPool is). `done` is called exactly once for an
// accepted call, by a worker or by close() and expire(), under no lock; it must not throw or close
// the tier. What it holds (a lease of the buffer) goes with it. A worker in a stalled mount keeps
// its buffer for as long: a deadline lets the caller go on, never the buffer.
//
// Trouble: a slot whose data or header cannot be read is retired until the tier is opened again. A
// failed write, and folders that are gone, degrade the tier: reads go on, writes are refused at
// once, except one in `probe_after` that tries, remaking what is gone. When it succeeds all is well
// again. Workers never end, and run no signal handlers.
//
// Threads: any call from any thread; one short leaf lock. In a forked child calls throw Forked and
// the destructor does nothing; a child keeps the lock of the folder until it ends or executes.
#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/process.hpp"
#include "base/types.hpp"
#include "tier/file_system.hpp"
#include "tier/slot_header.hpp"

namespace kvmem {

// When written slots are made to survive a power cut. Whatever it says: after one, each slot that
// reads ok is right.
enum class DiskSync : std::uint8_t {
  never,       // when the kernel and the device get to it
  on_close,    // and by close()
  each_write,  // before its completion
};

struct DiskOptions {
  std::string path;  // a folder; made if missing. A relative one is looked up once
  std::size_t block_bytes = 0;
  std::size_t capacity_bytes = 0;  // on disk, headers included
  std::size_t key_bytes = 16;
  Digest16 manifest{};
  // Calls of the system at a time; there are a quarter more threads (at least one), for the sums.
  // 0: a call is done, its completion called, within try_*().
  int workers = 8;
  std::size_t max_queued = 64;  // reads, and as many writes, whose turn at the disk has not come
  DiskSync sync = DiskSync::never;
  bool direct = true;  // past the page cache, where the file system lets us
  bool keep = true;    // false: begin empty
  std::chrono::nanoseconds probe_after = std::chrono::seconds(1);
  std::chrono::nanoseconds stall_after = std::chrono::seconds(10);
  std::chrono::nanoseconds close_within = std::chrono::seconds(30);  // by the destructor
  std::size_t file_bytes = std::size_t{4} << 30;                     // at most, of one file
  // Of opening, in slots, from the calling thread; returning false cancels (throws Cancelled), and
  // what it throws passes through.
  std::function<bool(std::size_t done, std::size_t total)> progress = nullptr;
  std::shared_ptr<FileSystem> files = nullptr;  // null: the kernel's
};

struct FoundSlot {
  SlotIndex slot = 0;
  std::uint32_t group = 0;
  std::uint64_t generation = 0;
  std::uint64_t payload_bytes = 0;
  Digest16 manifest{};  // another one than ours: the owner decides; it cannot be read
  DiskKey key{};
};

struct DiskRecord {
  std::span<const std::byte> key;  // copied
  std::uint32_t group = 0;
  std::size_t payload_bytes = 0;  // at most block_bytes
  // Of a write, the payload's CRC32C where it is known: what does not have it when it is summed is
  // not written, and ends bad_data_sum.
  std::optional<std::uint32_t> payload_sum = std::nullopt;
};

struct DiskResult {
  DiskOutcome outcome = DiskOutcome::ok;
  int error = 0;                  // of the system, with io_error and shortage
  std::uint64_t generation = 0;   // of what was written or read
  std::uint32_t payload_sum = 0;  // CRC32C, of a read that ended ok
};
// It must not throw, wait for another call, or close the tier.
using DiskDone = std::function<void(const DiskResult&)>;

enum class DiskSubmit : std::uint8_t {
  accepted,
  full,      // max_queued
  busy,      // an unfinished call writes this slot, or this is a write and one reads it
  retired,   // the slot: never read or written again
  degraded,  // the tier: stats() says why
  closed,
};

struct DiskCounts {
  std::uint64_t calls = 0, bytes = 0;  // that ended ok
  std::array<std::uint64_t, disk_outcomes> ended{};
};

struct DiskStats {
  std::uint64_t slots = 0, retired = 0;
  std::size_t slot_bytes = 0;  // on disk
  DiskCounts reads, writes;    // an erasure is a write of no bytes
  std::size_t queued = 0, running = 0, peak_queued = 0;
  std::uint64_t refused = 0;            // not accepted, for whatever reason
  std::optional<std::string> degraded;  // why
  std::uint64_t degradations = 0, remade = 0;
  bool direct = false;
  std::string why_not_direct;
  std::string why_empty;  // what was there when it was opened or remade and not kept, or nothing
  std::uint64_t recovered = 0, superseded = 0;
  std::array<std::uint64_t, disk_outcomes> scanned{};  // headers at the start, by what they were
  double open_seconds = 0, scan_seconds = 0;
};

struct DiskCloseReport {
  std::size_t dropped = 0;  // in the queue; each was told `closed`
  // Still in a call of the system, each with a thread and its buffers; or being told by another
  // close() or by expire(); or the sync.
  std::size_t running = 0;
  int sync_error = 0;  // of the sync, once it has ended
};

namespace detail {
class DiskCore;
}

class DiskSlots {
 public:
  // Makes or checks the folder, reserves the space, reads every header. Throws InvalidArgument
  // (options; a path that is a file, somebody else's or not ours to use; a folder that another
  // process has open, named by its id), CapacityError (less than one slot, or than the file system
  // has free: nothing is filled then), Cancelled, Error.
  //
  // A superblock that is damaged, of another version or of another geometry means that the tier
  // begins empty; stats().why_empty says so. Capacity may change: slots that still fit are kept.
  explicit DiskSlots(const DiskOptions& options);
  ~DiskSlots();
  DiskSlots(const DiskSlots&) = delete;
  DiskSlots& operator=(const DiskSlots&) = delete;

  // What the headers told, once: of a key in a group and manifest only the latest. Slots not listed
  // are free.
  [[nodiscard]] std::vector<FoundSlot> take_found();
  // Of those keys the older slots, once. When the latest is erased and one of these is not, the
  // next start finds that one.
  [[nodiscard]] std::vector<FoundSlot> take_superseded();

  // Throw InvalidArgument for a slot out of range, a key or payload of the wrong size, a buffer
  // that is null or not page-aligned; then nothing was accepted.
  [[nodiscard]] DiskSubmit try_write(SlotIndex slot, const DiskRecord& record,
                                     const std::byte* source, DiskDone done);
  // Reads go ahead of writes. `generation`: what the write, or take_found(), said.
  [[nodiscard]] DiskSubmit try_read(SlotIndex slot, const DiskRecord& expected,
                                    std::uint64_t generation, std::byte* target, DiskDone done);
  // What it holds is not found at the next start. Not needed before a slot is written again. Of a
  // retired slot too; that it cannot be erased does not degrade the tier.
  [[nodiscard]] DiskSubmit try_erase(SlotIndex slot, DiskDone done);

  // Ends what has been in the queue for stall_after as timed_out; whoever waits for completions
  // calls it now and then. While a worker is in one call for that long, the tier is degraded for
  // reads too.
  std::size_t expire();

  [[nodiscard]] std::uint32_t capacity() const noexcept;
  [[nodiscard]] bool is_retired(SlotIndex slot) const;
  [[nodiscard]] DiskStats stats() const;
  // Drops what waits, waits for what runs, and for the sync of DiskSync::on_close, which a thread
  // of its own makes. Again: finds less to do. Whatever runs behind its back keeps the lock of the
  // folder.
  DiskCloseReport close(std::chrono::nanoseconds within);

 private:
  std::shared_ptr<detail::DiskCore> core_;
  ProcessMark mark_;
};

}  // namespace kvmem
