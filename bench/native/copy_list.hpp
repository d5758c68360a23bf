// The bare copy of a few segments on the calling thread: what an offload or restore is beside it.
#pragma once

#include <cstdint>
#include <cstring>
#include <vector>

#include "device/host_copy.hpp"

namespace kvmem::bench {

class CopyList {
 public:
  void add(std::uintptr_t target, std::uintptr_t source, std::size_t bytes) {
    all_.push_back(
        {reinterpret_cast<std::byte*>(target), reinterpret_cast<const std::byte*>(source), bytes});
  }
  void with_kernel() const {  // the one that the host device uses
    for (std::size_t i = 0; i < all_.size(); ++i) {
      const std::byte* next = i + 1 < all_.size() ? all_[i + 1].source : nullptr;
      copy_bytes(all_[i].target, all_[i].source, all_[i].bytes, next);
    }
    store_fence();
  }
  void with_memcpy() const {
    for (const Segment& one : all_) std::memcpy(one.target, one.source, one.bytes);
  }

 private:
  struct Segment {
    std::byte* target;
    const std::byte* source;
    std::size_t bytes;
  };
  std::vector<Segment> all_;
};

}  // namespace kvmem::bench
