// One run of the simulation: an engine that does legal things in any order, on a device that does
// any legal thing, against the reference. After every operation the invariants must hold.
//
// Throws Violation at the first that does not. Deterministic: the same shape and operations give
// the same run.
#pragma once

#include <map>
#include <set>
#include <stdexcept>

#include "base/error.hpp"
#include "model/sim/operations.hpp"
#include "model/sim/reference.hpp"

namespace kvmem::sim {

struct Violation : std::logic_error {
  using std::logic_error::logic_error;
};

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
  void lift();          // every stall, hold and planned fault
  void let_all_end();   // and expects that it does
  void let_go();        // of every lease, copy, handle and place in a queue
  void expect_quiet();  // nothing held, nothing in flight, each report seen once
  void tear_down();
  void count_faults();
  void lose_device(const Draw& draw);

  // ---- transfers ----
  struct Wish {
    bool restores = false;
    std::vector<BlockId> blocks;
    std::vector<SlotIndex> slots;  // given, not acquired
    std::vector<Content> contents;
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
  void offloaded(SimTransfer& transfer);
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
  void check_manager();
  void check_no_reuse();
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

  std::vector<HostBlocks> leases_;
  std::vector<Releasing> releasing_;
  std::vector<std::shared_ptr<HostCopy>> stored_;
  std::vector<SimTransfer> transfers_;
  std::vector<std::unique_ptr<Kernel>> kernels_;
  std::list<WaitingTicket> tickets_;
  std::list<WaitingOffload> waiting_offloads_;
  std::map<std::uint64_t, bool> unreported_;  // tagged transfers by id: has it ended?
  std::array<DirectionStats, 2> expected_;    // accepted, done, failed, cancelled
};

}  // namespace kvmem::sim
