// The reference: what the engine knows of its own doings, in plain structures without threads,
// queues or guards. The checks hold the real thing against it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <list>
#include <memory>
#include <optional>
#include <vector>

#include "model/sim/world.hpp"

namespace kvmem::sim {

// Which bytes a block holds: a key names them. Bytes that a restore brings are there only if that
// ended done.
using Key = std::uint64_t;
struct Content {
  Key key = 0;                // 0: undefined
  std::uint64_t restore = 0;  // the transfer, by `seq`, on whose end it hangs; 0: none
};

// The engine has let go of slots, as of these points.
struct Releasing {
  std::vector<SlotIndex> slots;
  std::vector<std::shared_ptr<Event>> until;
};

struct SimTransfer {
  std::uint64_t seq = 0;
  std::shared_ptr<Transfer> handle;  // null: dropped
  std::shared_ptr<TransferJob> job;
  bool restores = false;
  bool ended = false;      // and that was seen
  bool cancelled = false;  // by the engine
  bool tagged = false;
  std::vector<BlockId> blocks;
  std::vector<SlotIndex> slots;
  std::vector<Content> contents;   // of the blocks: captured, or to be brought
  std::weak_ptr<HostCopy> result;  // once it was asked for
  bool result_taken = false;
  TransferState end = TransferState::queued;
  unsigned waited = 0;  // engine streams that wait for all of it, a bit each
  std::array<unsigned, 2> waited_stage{};
  std::uint64_t token = 0;  // woken by the end; 0: nobody asked
  Nanoseconds requested = 0;

  // What it runs behind; an event that is gone was reached.
  std::vector<std::weak_ptr<Event>> after;
  std::vector<std::uint64_t> behind;  // transfers, by seq
  bool born_ready = false;            // nothing that it runs behind was pending at acceptance
  bool ready = false;                 // is pending; as of the last check
  bool begun = false;                 // the same
  bool alone = false;                 // began before it was ready, so in a lane of its own
  bool hurried = false;               // somebody waits for its submission: no window holds it back

  [[nodiscard]] bool touches(BlockId block) const {
    return std::ranges::find(blocks, block) != blocks.end();
  }
};

// Work of the engine's own on a stream: writes a block, or reads it.
struct Kernel {
  std::vector<std::byte*> targets;
  std::vector<const std::byte*> sources;
  std::vector<std::size_t> sizes;
  std::byte* scratch = nullptr;
  Event event;
  bool reads = false;
  bool arrived = false;
  BlockId block = 0;
  unsigned stream = 0;
  std::optional<std::size_t> stage;  // only the regions of that stage
  Content expected;
};

// A tagged transfer that was not reported yet.
struct Unreported {
  std::uint64_t seq;  // the tag
  TransferKind kind;
  bool ended = false;
};

struct WaitingTicket {
  PoolTicket ticket;
  std::size_t wanted;
  std::uint64_t token;
};

struct WaitingOffload {
  Admission admission;
  std::vector<BlockId> blocks;
  bool tagged;
  Nanoseconds requested;
  std::uint64_t token;
  bool granted;  // when last asked
};

}  // namespace kvmem::sim
