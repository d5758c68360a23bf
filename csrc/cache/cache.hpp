// An index, managers and a disk in one process: an engine gives the hashes of its blocks and where
// they are on the device, and needs to know nothing else.
//
//   store()    device blocks whose keys are missing -> host; the disk follows on its own
//   reserve()  the longest usable prefix over host and disk, held
//   load()     what a hit holds -> device blocks; from disk through landing blocks, block by block
//
// A key is found only when its bytes have been observed to be there, and a load ends done only if
// every one of its blocks was delivered: loaded() is the prefix that was. Slots of the pools are
// the cache's until it is closed or gone, and go home like any: when no copy touches them.
//
// Always held by shared_ptr; unfinished transfers keep it alive. Any thread. It has no thread of
// its own: whoever advances the runtime (its reaper, poll(), any thread that waits) moves it on.
#pragma once

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "base/gate.hpp"
#include "cache/cache_options.hpp"
#include "cache/cache_transfer.hpp"
#include "cache/disk_feed.hpp"
#include "cache/index.hpp"
#include "cache/key_memory.hpp"
#include "cache/owner_books.hpp"
#include "cache/store_turns.hpp"

namespace kvmem {

// A prefix that is held. Ends with the object unless it was loaded. One thread at a time.
class CacheHit {  // move-only
 public:
  CacheHit() = default;
  CacheHit(CacheHit&& other) noexcept { *this = std::move(other); }
  CacheHit& operator=(CacheHit&& other) noexcept;
  ~CacheHit() { let_go(); }

  [[nodiscard]] std::size_t length() const noexcept { return length_; }  // keys
  [[nodiscard]] bool pending() const noexcept { return pending_; }       // see Reservation
  // Blocks of all groups that are in host memory, and on disk alone; 0 once it is gone.
  [[nodiscard]] std::size_t host_blocks() const { return blocks(false); }
  [[nodiscard]] std::size_t disk_blocks() const { return blocks(true); }
  std::size_t keep(std::size_t length);  // see Index::keep; throws AlreadyReleased
  void release();                        // throws AlreadyReleased the second time

 private:
  friend class Cache;
  void let_go() noexcept;
  [[nodiscard]] std::size_t blocks(bool on_disk) const;

  std::shared_ptr<Cache> cache_;  // null: it holds nothing
  PlanId plan_ = 0;
  std::size_t length_ = 0;
  bool pending_ = false, released_ = false;
  std::string owner_;
  std::vector<std::byte> keys_;
};

enum class AdviceKind : std::uint8_t { restore, recompute, wait };
struct Advice {
  AdviceKind kind = AdviceKind::recompute;
  std::size_t restorable = 0, pending = 0;  // keys: now; and more once what is in flight arrived
  // Predicted, for all the keys: what is not restored is recomputed.
  double restore_seconds = 0, recompute_seconds = 0, wait_seconds = 0;
};

struct Miss {
  MissReason why = MissReason::never_stored;
  std::optional<DiskOutcome> disk;   // of disk_failed
  std::optional<Digest16> manifest;  // of other_manifest
};

struct CacheStats {
  IndexStats index;  // a disk's groups stand behind those of the host
  std::size_t transfers = 0, landing_free = 0;
  std::size_t waiters = 0;  // stores that wait for room
  std::uint64_t stores = 0, stores_failed = 0, loads = 0, loads_failed = 0, cancelled = 0;  // ended
  std::uint64_t keys_loaded = 0;  // delivered, by loads that ended done or failed
  std::uint64_t blocks_stored = 0, blocks_from_host = 0, blocks_from_disk = 0;  // the same
  std::uint64_t keys_not_admitted = 0, keys_refused = 0;  // by the filter; by the budget
  std::uint64_t disk_promoted = 0, disk_reads_failed = 0;
  OwnerCounts owners;  // of all together
  std::optional<DiskFeedStats> feed;
  std::optional<DiskStats> disk;
  double host_bytes_per_second = 0, disk_bytes_per_second = 0;  // measured, once there is something
};

struct CacheCloseReport {
  bool quiet = false;         // all transfers had ended in time
  std::size_t cancelled = 0;  // at the deadline
  std::size_t in_flight = 0;  // whose copies have still not been observed to end
  std::size_t unwritten = 0;  // keys that waited for the disk; what it was writing is in `disk`
  std::optional<DiskCloseReport> disk;
};

class Cache final : public Submitter, public std::enable_shared_from_this<Cache> {
 public:
  // Throws InvalidArgument, CapacityError (a pool cannot give the slots), what DiskSlots throws.
  [[nodiscard]] static std::shared_ptr<Cache> make(CacheOptions options);
  ~Cache() override;

  // Device blocks of each group, one a key, each once. Less than 0 where a group has none for a
  // key; the others are one range then.
  using Blocks = std::vector<std::vector<BlockId>>;
  struct Request {
    KeyPointers keys;
    std::size_t key_bytes = 0;
    std::string owner = {};
    After after = {};
    Priority priority = Priority::background;
    double value = 1.0;  // see Policy::insert
  };

  // Stores the longest leading part that is admitted and finds room. Ended at once where there is
  // nothing to copy; job().refused may say why. Nothing when the first missing key finds no room,
  // or other stores wait for some, or max_transfers are unfinished. Throws InvalidArgument, Busy (a
  // device block is being written), Closed, DeviceLost; nothing has changed then.
  [[nodiscard]] std::shared_ptr<CacheTransfer> try_store(const Request& request,
                                                         const Blocks& blocks);
  // Waits for room, behind those that came before. Throws PoolExhausted at the deadline, which says
  // who holds what. PendingStore does the same without blocking.
  [[nodiscard]] std::shared_ptr<CacheTransfer> store(const Request& request, const Blocks& blocks,
                                                     std::optional<double> timeout_seconds,
                                                     const Runtime::Interrupt& interrupt = {});

  [[nodiscard]] CacheHit reserve(KeyPointers keys, std::size_t key_bytes, const std::string& owner,
                                 Pending pending = Pending::stop,
                                 std::optional<double> expires_seconds = std::nullopt);

  // Blocks of a group that the hit does not need are not looked at. Waits (without blocking) for
  // keys in flight that the hit attached to. The hit is the load's from then on. Throws
  // InvalidArgument, AlreadyReleased, Busy, Closed, DeviceLost, PoolExhausted (max_transfers); the
  // hit is as it was then.
  [[nodiscard]] std::shared_ptr<CacheTransfer> load(CacheHit& hit, const Blocks& blocks,
                                                    After after,
                                                    Priority priority = Priority::demand);

  // Of blocks of `block_tokens` tokens, in this order. Holds and counts nothing.
  [[nodiscard]] Advice advise(KeyPointers keys, std::size_t key_bytes,
                              double prefill_tokens_per_second, double block_tokens) const;
  void note_tokens(const std::string& owner, std::uint64_t count);  // generated
  // Ends its reservations and its books; its counts stay in the total. How many reservations.
  std::size_t drop_owner(const std::string& owner);
  [[nodiscard]] std::optional<OwnerCounts> owner(const std::string& owner) const;

  // No longer found, on no tier, and erased on disk behind the call, of which flush() waits for the
  // end. How many entries.
  std::size_t evict(KeyPointers keys, std::size_t key_bytes);
  std::size_t clear();
  [[nodiscard]] Miss why_miss(const std::byte* key, std::size_t key_bytes) const;

  std::size_t poll();  // moves on; how many transfers are unfinished
  // Writes what the disk does not have and erases what it must not have. False at the deadline, or
  // when the disk does not take it, or somebody still holds what is to be erased.
  bool flush(std::optional<double> timeout_seconds, const Runtime::Interrupt& interrupt = {});
  // Stops new work, waits for the old, cancels the rest, flushes in what is left of the time, and
  // closes the disk. Then its slots are the pools' again, unless a copy or the disk still has some.
  // The managers stay open. Twice is fine.
  CacheCloseReport close(std::optional<double> timeout_seconds,
                         const Runtime::Interrupt& interrupt = {});

  [[nodiscard]] Index& index() noexcept { return *index_; }
  [[nodiscard]] const std::shared_ptr<Runtime>& runtime() const noexcept { return runtime_; }
  [[nodiscard]] const CacheOptions& options() const noexcept { return options_; }
  [[nodiscard]] CacheStats stats() const;
  void check() const;  // the index's, and that each slot of a pool has one place here

  void submit_ready() noexcept override;
  [[nodiscard]] bool has_waiting() const noexcept override;

 private:
  friend class CacheHit;
  friend class CacheTransfer;
  friend class PendingStore;
  struct Group {
    std::shared_ptr<Manager> manager;
    HostBlocks slots;  // all that is the cache's: of the index, and landing blocks
    std::size_t most_blocks_a_part = 1;
    // Under mutex_: the pool's slot of each of the index, and of the landing blocks that are free.
    std::vector<SlotIndex> places, landing_free;
  };
  struct Rate {  // of a path, from what it carried
    double bytes_per_second;
    bool measured = false;
    void note(std::size_t bytes, Nanoseconds took) noexcept;
  };

  explicit Cache(CacheOptions options);
  void take_slots();
  [[nodiscard]] GroupIndex disk_group(GroupIndex group) const noexcept {
    return static_cast<GroupIndex>(group + groups_.size());
  }
  [[nodiscard]] bool is_disk(std::size_t group) const noexcept { return group >= groups_.size(); }
  [[nodiscard]] Gate::Pass enter();
  std::size_t remove(const std::function<std::size_t(std::vector<Index::Place>*)>& from);
  void close_disk(CacheCloseReport& report, std::optional<Nanoseconds> deadline,
                  const Runtime::Interrupt& interrupt);

  // ---- the calls ----
  [[nodiscard]] std::vector<KeyRange> ranges_of(std::size_t keys, const Blocks& blocks) const;
  struct Admitted {
    std::size_t keys = 0;
    std::string refused;  // why not the rest
  };
  [[nodiscard]] std::size_t in_host_memory(const Request& request) const;
  [[nodiscard]] Admitted admit(const Request& request);
  // Of those that are not there. Throws as claim() does, before anything has changed.
  void expect_free(const Request& request, const Blocks& blocks,
                   const std::vector<KeyRange>& ranges) const;
  [[nodiscard]] std::shared_ptr<CacheTransfer> store_some(const Request& request,
                                                          const Blocks& blocks,
                                                          std::optional<Admitted>& admitted,
                                                          bool has_turn);
  void tell_stores() noexcept;  // that there may be room
  [[nodiscard]] std::shared_ptr<CacheJob> new_job(CacheKind kind, const std::string& owner,
                                                  const After& after, Priority priority);
  void add_parts(CacheJob& job, GroupIndex group, const PlannedSlots& planned, bool from_disk);
  // One of the max_transfers, of a job that is not there yet.
  class Place {
   public:
    explicit Place(Cache& cache) : cache_(cache), had_(cache.take_place()) {}
    Place(const Place&) = delete;
    Place& operator=(const Place&) = delete;
    ~Place() {
      if (had_) --cache_.unfinished_;
    }
    [[nodiscard]] bool had() const noexcept { return had_; }
    void give_to_job() noexcept { had_ = false; }

   private:
    Cache& cache_;
    bool had_;
  };
  [[nodiscard]] bool take_place() noexcept;
  [[nodiscard]] PoolExhausted no_place() const;
  void start(const std::shared_ptr<CacheJob>& job, Place& place);

  // ---- moving on: by one thread at a time ----
  void move_on() noexcept;
  void take_turn() noexcept;
  bool move_job(CacheJob& job);  // true: it can end
  bool begin_load(CacheJob& job);
  void claim_targets(CacheJob& job, std::size_t length);  // throws as load()
  void drop_parts(CacheJob& job);
  void move_part(CacheJob& job, std::size_t number);
  void move_read(CacheJob& job, std::size_t number);
  void start_read(CacheJob& job, std::size_t number);
  void end_reads();
  void end_read(CacheJob* job, const DiskFeed::Read& read);
  void forget_corrupt(GroupIndex group, std::span<const std::byte> key);
  void forget_on_disk(std::span<const std::byte> key, const DiskFeed::Read& read) noexcept;
  void submit_part(CacheJob& job, CachePart& part);
  // Where a slot of the index is in host memory, and a holder of it.
  [[nodiscard]] std::pair<const std::byte*, HostBlocks> place(GroupIndex group, SlotIndex slot);
  void cut_part(CacheJob& job, std::size_t number, std::size_t length, std::exception_ptr error);
  void end_part(CacheJob& job, CachePart& part, bool ok, std::exception_ptr error);
  void promote(CacheJob& job, const CachePart& part);
  void end_job(const std::shared_ptr<CacheJob>& job) noexcept;
  void settle_store(CacheJob& job, bool ok);
  void settle_load(CacheJob& job, bool cancelled);
  [[nodiscard]] std::size_t delivered(const CacheJob& job) const;
  [[nodiscard]] std::optional<SlotIndex> take_landing(GroupIndex group);
  void give_landing(GroupIndex group, SlotIndex slot) noexcept;

  CacheOptions options_;
  ProcessMark mark_;
  Gate gate_;
  std::shared_ptr<Runtime> runtime_;
  std::unique_ptr<Index> index_;
  std::vector<Group> groups_;
  std::vector<GroupNeed> needs_;
  std::unique_ptr<DiskFeed> feed_;
  StoreTurns store_turns_;

  std::mutex moving_;
  std::atomic<bool> again_{false};  // somebody came while another one was moving it on
  std::atomic<int> flushing_{0};    // calls of flush()
  std::atomic<std::size_t> unfinished_{0};
  std::vector<std::shared_ptr<CacheJob>> turn_;  // of whoever moves on

  mutable std::mutex mutex_;  // over what follows; a leaf but for the index's and the pool's
  std::map<std::uint64_t, std::shared_ptr<CacheJob>> jobs_;  // unfinished, in their order
  std::uint64_t last_id_ = 0;
  KeyMemory memory_;
  OwnerBooks owners_;
  CacheStats counts_;
  Rate host_rate_, disk_rate_;
};

}  // namespace kvmem
