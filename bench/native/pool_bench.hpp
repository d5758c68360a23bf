// Allocators under random churn: `live` blocks are held, and each operation gives one of them back
// and takes another. No timing here: the harness times run().
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>

namespace kvmem::bench {

struct PoolSetup {
  std::uint32_t capacity = 4096;  // of those contenders that have one
  std::uint32_t live = 512;       // of all threads together
  std::size_t block_bytes = 4096;
  unsigned threads = 1;
};

class PoolBench {
 public:
  virtual ~PoolBench() = default;
  virtual void run(std::uint64_t operations) = 0;  // that many by each thread
};

struct NotInstalled : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// "bare list": a LIFO list of indices behind one mutex, what any pool comes down to.
// "indices", "handles": a BlockPool, by slots and by HostBlocks.
// "glibc", "mimalloc", "tcmalloc": memory of that size that nobody touches.
// Throws NotInstalled for an allocator that is not there, std::invalid_argument for no contender.
[[nodiscard]] std::unique_ptr<PoolBench> make_pool_bench(const std::string& contender,
                                                         const PoolSetup& setup);

}  // namespace kvmem::bench
