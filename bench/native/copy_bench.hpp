// Segments scattered at random, copied from one arena into another by this library and by the loops
// that one would write by hand. No timing here: each call moves all segments once, then returns.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "device/host_device.hpp"

namespace kvmem::bench {

// Every way but the device has `threads` threads of its own, one a core, each with the same share
// of the segments in the same order; what starting them costs is in all of them. The arenas are on
// huge pages and touched. One call at a time.
class ScatteredCopy {
 public:
  // Throws std::invalid_argument for what does not fit, std::bad_alloc.
  ScatteredCopy(std::size_t segment_bytes, std::size_t bytes, unsigned threads, unsigned seed);
  ~ScatteredCopy();
  ScatteredCopy(const ScatteredCopy&) = delete;
  ScatteredCopy& operator=(const ScatteredCopy&) = delete;

  void copy_with_memcpy();
  void copy_with_nt();     // one stream of non-temporal stores
  void copy_with_kvmem();  // the kernel of the host device
  // The host device, with `threads` threads that copy: its workers and one that waits and helps.
  void copy_with_device();
  // These return the CRC32C of all segments, each by itself, XORed: equal for all of them.
  std::uint32_t copy_with_crc();    // summed while it is copied
  std::uint32_t memcpy_then_crc();  // each segment read twice
  std::uint32_t crc_only();

  void clear_targets();
  [[nodiscard]] bool all_copied() const;  // does every target have its bytes?

 private:
  class Arena {
   public:
    explicit Arena(std::size_t bytes);
    ~Arena();
    Arena(const Arena&) = delete;
    Arena& operator=(const Arena&) = delete;
    std::byte* base;
    std::size_t bytes;
  };
  struct Share {
    std::byte* const* targets;
    const std::byte* const* sources;
    std::size_t count;
  };

  // Runs `copy` on each share, on a thread of its core, and XORs what it returns.
  std::uint32_t on_each_share(const std::function<std::uint32_t(const Share&)>& copy) const;
  void start_device();
  void submit_and_help() const;

  std::size_t segment_bytes_;
  unsigned threads_;
  Arena from_, to_;
  std::vector<std::byte*> targets_;
  std::vector<const std::byte*> sources_;
  std::vector<std::size_t> sizes_;
  std::shared_ptr<Device> device_;  // made by the first who needs it
  StreamHandle stream_ = 0;
  EventHandle end_ = 0;
};

}  // namespace kvmem::bench
