// One run of the simulation: an engine that does legal things in any order, on a device that does
// any legal thing, against the reference. After every operation the invariants must hold.
//
// Throws Violation at the first that does not. Deterministic: the same shape and operations give
// the same run.
#pragma once

#include <map>
#include <set>

#include "model/sim/operations.hpp"
#include "model/sim/reference.hpp"
#include "model/sim/wakes.hpp"

namespace kvmem::sim {

struct Tally {
  std::array<std::uint64_t, kinds> tried{}, accepted{};
  std::uint64_t faults = 0, done = 0, failed = 0, cancelled = 0, blocks_compared = 0;
  void add(const Tally& other);
};

class Simulation {
 public:
  explicit Simulation(const WorldShape& shape);
  ~Simulation();
  Simulation(const Simulation&) = delete;
  Simulation& operator=(const Simulation&) = delete;

  void run(const Operation& operation);  // and check
  // Lets everything end, lets go of everything, and checks that nothing is left. The simulation can
  // go on behind it.
  void finish();
  [[nodiscard]] const Tally& tally() const noexcept { return tally_; }

 private:
  using Draw = std::array<std::uint32_t, 4>;
  static constexpr std::size_t most_stored = 4, most_remembered = 8;

  // Each says whether it was accepted.
  bool apply(const Operation& operation);
  bool acquire(const Draw& draw);
  bool ticket(const Draw& draw);
  bool share(const Draw& draw);
  bool release(const Draw& draw);
  bool release_after(const Draw& draw);
  bool offload(const Draw& draw);
  bool offload_into(const Draw& draw);
  bool admit(const Draw& draw);
  bool restore(const Draw& draw);
  bool wait_on(const Draw& draw);
  bool wait(const Draw& draw);
  bool cancel(const Draw& draw);
  bool drop(const Draw& draw);
  bool poll();
  bool drain(const Draw& draw);
  bool rebind(const Draw& draw);
  bool close(const Draw& draw);
  bool write(const Draw& draw);
  bool read(const Draw& draw);
  bool stall(const Draw& draw);
  bool step(const Draw& draw);
  bool advance(const Draw& draw);
  bool hold(const Draw& draw);
  bool fail(const Draw& draw);
  bool lose(const Draw& draw);

  // ---- the life of a world ----
  void open();
  void open_manager();
  void lift();              // every stall, hold and planned fault
  void lift_what_blocks();  // but for the faults
  void let_all_end();       // and expects that it does
  void let_go();            // of every lease, copy, handle and place in a queue
  void expect_quiet();      // nothing held, nothing in flight, each report seen once
  void tear_down();
  [[nodiscard]] std::vector<std::string> violations();  // of what hardware asks for
  void count_faults();
  void lose_device(const Draw& draw);
  void expect_waiters_told_of_poison();
  [[nodiscard]] std::set<SlotIndex> pending_slots();
  void close_pool();
  void forget_transfers();

  // ---- transfers ----
  struct Wish {
    bool restores = false;
    std::vector<BlockId> blocks;
    std::vector<SlotIndex> slots;  // given, not acquired
    std::vector<Content> contents;
    std::optional<Nanoseconds> requested{};  // none: now
  };
  [[nodiscard]] std::vector<BlockId> some_blocks(const Draw& draw, std::size_t count);
  [[nodiscard]] TransferRequest request_for(const Wish& wish, std::uint32_t draw);
  [[nodiscard]] std::vector<Content> contents_of(const std::vector<BlockId>& blocks) const;
  // The unfinished transfers that `wish` must not run beside; those that `after` names are left
  // out.
  [[nodiscard]] std::vector<SimTransfer*> conflicts(const Wish& wish, const After& after);
  template <class Start>
  bool start(const Wish& wish, const TransferRequest& request, Start&& start);
  void accepted(const Wish& wish, const TransferRequest& request, std::shared_ptr<Transfer> made);
  [[nodiscard]] bool bounds_are_free(std::size_t slots, std::size_t blocks, bool restores,
                                     bool tagged) const;
  [[nodiscard]] SimTransfer* some_transfer(std::uint32_t draw, bool mostly_unfinished);
  void note_ends();
  void ended(SimTransfer& transfer);
  [[nodiscard]] TimelineRecord expected_record(const SimTransfer& transfer) const;
  void offloaded(SimTransfer& transfer);
  void hurry(SimTransfer& transfer);  // and all that it runs behind
  [[nodiscard]] bool may_run(const SimTransfer& transfer);
  [[nodiscard]] bool must_wait(const SimTransfer& transfer);
  [[nodiscard]] bool is_staged() const {
    return shape_.device.needs_pinned_host && !pool_->pinned();
  }
  void restored(const SimTransfer& transfer);

  void leased(HostBlocks blocks);

  // ---- the engine ----
  [[nodiscard]] static unsigned stream_of(BlockId block) {
    return static_cast<unsigned>(block) % 2;
  }
  void launch(Kernel made);
  void note_kernels();
  [[nodiscard]] bool idle(unsigned stream) const;
  [[nodiscard]] Key key_of(const Content& content) const;  // 0: undefined, or not settled
  [[nodiscard]] bool settled(const Content& content) const;
  [[nodiscard]] Key new_key(const BlockBytes& bytes);
  [[nodiscard]] BlockBytes fresh_bytes();
  [[nodiscard]] bool may_write(BlockId block) const;

  // ---- checks ----
  void check();
  void check_pool();
  void check_tickets();
  void check_manager(const ManagerStats& now);
  void check_no_reuse();
  void check_record(const TimelineRecord& record, const TimelineRecord& expected);
  void check_records();  // of what ended since the last check
  void check_uses();     // that each transfer's first use was recorded
  void check_wakes();
  void check_order();  // of submission
  void check_windows(const ManagerStats& now);
  void expect_submitted();  // all that can be
  void check_bytes();
  void expect_slots_were_free(std::span<const SlotIndex> slots);
  void expect_bytes(const std::byte* at, Key key, const char* what);
  [[nodiscard]] std::vector<bool> owners() const;  // by slot: the engine holds it
  [[nodiscard]] std::vector<bool> copies() const;  // by slot: a copy holds it
  [[nodiscard]] std::size_t granted_slots() const;

  template <class Call>
  auto without_faults(Call&& call) {
    struct Paused {
      explicit Paused(VirtualDevice& on) : device(on) { device.pause_faults(true); }
      ~Paused() { device.pause_faults(false); }
      VirtualDevice& device;
    } paused(*device_);
    return call();
  }

  WorldShape shape_;
  Tally tally_;
  std::string violation_;  // seen when a world was torn down
  std::uint64_t last_seq_ = 0;
  std::uint64_t steps_ = 0;
  std::uint64_t faults_counted_ = 0;
  std::uint64_t faults_planned_ = 0;  // in this world, and what they may have hit has not ended

  std::shared_ptr<VirtualDevice> device_;
  std::shared_ptr<Runtime> runtime_;
  std::shared_ptr<BlockPool> pool_;
  std::shared_ptr<Manager> manager_;
  std::shared_ptr<EventPool> engine_events_;
  std::unique_ptr<Cache> cache_;
  std::unique_ptr<Scratch> scratch_;
  std::vector<Stream> streams_;
  std::array<std::optional<EventHandle>, 2> stalls_;

  std::vector<BlockId> all_blocks_;
  std::vector<Content> content_;  // by block: what a reader sees that is queued on its stream now
  std::vector<Key> slot_keys_;    // by slot: what it holds; 0: undefined
  std::map<Key, BlockBytes> bytes_;
  std::vector<TransferState> restore_ends_;  // by seq
  Key last_key_ = 0;

  Wakes wakes_;
  std::vector<HostBlocks> leases_;
  std::vector<Releasing> releasing_;
  std::vector<std::shared_ptr<HostCopy>> stored_;
  std::vector<SimTransfer> transfers_;
  std::vector<std::unique_ptr<Kernel>> kernels_;
  std::list<WaitingTicket> tickets_;
  std::list<WaitingOffload> waiting_offloads_;
  std::map<std::uint64_t, Unreported> unreported_;  // tagged transfers by id
  std::array<DirectionStats, 2> expected_;          // what adds up
  std::vector<TimelineRecord> ended_now_;  // since the last check: what their records must say
  std::uint64_t records_ = 0;              // that the timeline was given
  struct Used {
    bool all,
        surely;  // all of it at first; no call failed then, which may have been the measurement
  };
  std::map<std::uint64_t, Used> used_;  // by id: was waited for
  Nanoseconds checked_at_ = 0;
  PoolStats pool_seen_;
};

}  // namespace kvmem::sim
