// Ordinary memory of this machine, mapped and locked for a device: what the host device calls
// device memory, and its page-locking.
//
// Threads: any. Sizes are rounded up to whole pages. The throwing calls leave nothing behind.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvmem {

[[nodiscard]] std::uint64_t machine_memory_bytes();

// Page aligned, zeroed on first touch, on huge pages where the kernel has them. Throws
// InvalidArgument for zero bytes, CapacityError for more than is available now.
[[nodiscard]] void* map_memory(std::size_t bytes);
// The same without memory behind it, so that terabytes fit: whoever touches a byte crashes.
[[nodiscard]] void* map_addresses(std::size_t bytes);
void unmap_memory(void* base, std::size_t bytes) noexcept;

// Throws InvalidArgument unless the range is whole pages, CapacityError when the kernel refuses.
void lock_memory(void* base, std::size_t bytes);
void unlock_memory(void* base, std::size_t bytes) noexcept;

}  // namespace kvmem
