// The checksum workers of a manager. They sum the blocks of an offload between the observed end of
// its copies and its own end, and verify those of a restore before any of it is submitted.
//
// Work waits in two FIFOs, verifications first; each transfer stands there at most once and brings
// its place along, so both are bounded by max_transfers and start() cannot fail. Workers touch the
// bytes of blocks, the pool's sums and the device's progress, nothing else: what they have done
// with waits for whoever advances the manager. In virtual time there is no thread: start() does it
// all.
//
// Any thread.
#pragma once

#include <cstdint>
#include <exception>
#include <list>
#include <memory>
#include <vector>

#include "host/block_pool.hpp"

namespace kvmem {

class TransferJob;

struct BlockCheck {
  std::uint32_t position = 0;  // in the transfer
  std::uint32_t expected = 0;  // of a restore: the sum that the block had when it was accepted
};

// The checksum work of one transfer.
struct BlockChecks {
  std::vector<BlockCheck> blocks;  // those to be summed or verified

 private:
  friend class Checksums;
  // Under the workers' lock.
  std::list<TransferJob*> place;      // one node, while it stands in no list
  std::shared_ptr<TransferJob> self;  // from start() until it is taken or withdrawn
  std::size_t next = 0, working = 0;
  bool begun = false;
  std::size_t bad_position = 0;
  std::exception_ptr error;
};

struct ChecksumStats {
  std::uint64_t blocks_summed = 0, blocks_verified = 0, blocks_corrupt = 0;
  std::uint64_t busy_total_us = 0;  // of all workers
  std::size_t waiting = 0;          // transfers that wait for a worker
};

class Checksums {
 public:
  // Throws Error when there can be no thread at all. `workers` 0: in virtual time.
  Checksums(std::shared_ptr<BlockPool> pool, std::size_t workers);
  Checksums(const Checksums&) = delete;
  Checksums& operator=(const Checksums&) = delete;
  ~Checksums();  // waits for the workers, who have nothing left to do

  static void prepare(TransferJob& job);  // its place; before start()
  // The check of an offload has begun by then. A restore that was cancelled is not taken.
  void start(const std::shared_ptr<TransferJob>& job) noexcept;
  // Of a restore that was cancelled before its check began.
  void withdraw(TransferJob& job) noexcept;
  // One whose check has ended, or null.
  [[nodiscard]] std::shared_ptr<TransferJob> take_ended() noexcept;
  [[nodiscard]] bool has_ended() const noexcept;
  [[nodiscard]] static std::exception_ptr error(
      const TransferJob& job) noexcept;  // of an ended one
  void stop() noexcept;                  // the threads end; nothing is to be started any more
  [[nodiscard]] ChecksumStats stats() const;

 private:
  class Core;
  const std::shared_ptr<Core> core_;  // the threads' too
  const bool has_threads_;
  const ProcessMark mark_;
};

}  // namespace kvmem
