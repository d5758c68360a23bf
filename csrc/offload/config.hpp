// What a manager is made with: fixed at construction, checked once, units in every name.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvmem {

// Which blocks of an offload get a checksum; a restore verifies those that have one.
enum class Checksum : std::uint8_t { off, sampled, always };

struct ManagerConfig {
  std::size_t max_queued_bytes = std::size_t{2} << 30;  // accepted and not ended, each direction
  std::size_t max_transfers = 4096;                     // the same, in transfers
  std::size_t window_bytes = std::size_t{256} << 20;    // handed to the device, each direction
  std::size_t window_descriptors = 8192;
  std::size_t max_reports = 4096;        // tagged transfers accepted and not yet polled
  std::size_t timeline_records = 65536;  // the last ones are kept
  std::size_t staging_pieces = 4;        // of pinned memory, where the pool is not pinned
  std::size_t staging_piece_bytes = std::size_t{4} << 20;
  Checksum checksum = Checksum::off;
  std::size_t checksum_every = 16;   // sampled: the first block offloaded and each nth behind it
  std::size_t checksum_workers = 2;  // threads; none when off, and none in virtual time
  bool reaper = true;                // false: no thread; the caller's own calls drive everything
  bool timeline = false;             // timing events: started, completed, first use
};

inline constexpr std::size_t most_reports = std::size_t{1}
                                            << 20;  // room for all of them is reserved
inline constexpr std::size_t most_checksum_workers = 64;
inline constexpr std::size_t smallest_window_bytes = std::size_t{64} << 10;

}  // namespace kvmem
