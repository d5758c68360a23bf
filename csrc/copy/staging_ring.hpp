// A few pinned pieces of memory that copies from and to pageable memory go through.
//
// Pageable memory never goes to an asynchronous copy: the driver would make it synchronous behind
// our back, or read it while it moves. A piece belongs to one slice until the slice's own event has
// been observed. Any thread.
#pragma once

#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "host/pinned_region.hpp"

namespace kvmem {

class StagingRing {
 public:
  class Piece {  // move-only; goes back when dropped
   public:
    Piece(Piece&& other) noexcept
        : ring_(std::exchange(other.ring_, nullptr)), data_(other.data_) {}
    Piece& operator=(Piece&&) = delete;
    ~Piece() {
      if (ring_) ring_->give_back(data_);
    }
    [[nodiscard]] std::byte* data() const noexcept { return data_; }
    // Never used again, nor its memory unmapped: a lost device may still touch it.
    void abandon() noexcept {
      if (auto* const ring = std::exchange(ring_, nullptr)) ring->leak();
    }

   private:
    friend class StagingRing;
    Piece(StagingRing* ring, std::byte* data) noexcept : ring_(ring), data_(data) {}
    StagingRing* ring_;
    std::byte* data_;
  };

  // Throws CapacityError when the memory cannot be had or pinned.
  StagingRing(std::shared_ptr<Device> device, std::size_t pieces, std::size_t piece_bytes)
      : piece_bytes_(round_up(piece_bytes, slot_alignment_bytes)),
        region_(PinnedRegion::map(pieces * piece_bytes_,
                                  {.preferred_node = device->info().numa_node})) {
    region_.pin(std::move(device), piece_bytes_);
    for (std::size_t i = 0; i < pieces; ++i) free_.push_back(region_.data() + i * piece_bytes_);
  }

  [[nodiscard]] std::size_t piece_bytes() const noexcept { return piece_bytes_; }

  [[nodiscard]] std::optional<Piece> try_take() {
    const std::lock_guard lock(mutex_);
    if (free_.empty()) return std::nullopt;
    std::byte* const data = free_.back();
    free_.pop_back();
    return Piece(this, data);
  }

 private:
  void leak() noexcept {
    const std::lock_guard lock(mutex_);
    region_.leak();
  }

  void give_back(std::byte* data) noexcept {
    const std::lock_guard lock(mutex_);
    free_.push_back(data);  // has room: it held every piece
  }

  std::size_t piece_bytes_;
  PinnedRegion region_;
  std::mutex mutex_;
  std::vector<std::byte*> free_;
};

}  // namespace kvmem
