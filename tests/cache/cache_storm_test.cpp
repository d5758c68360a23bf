// Threads store, load, cancel and evict the same keys at once, over a reaper and a disk that fails
// now and then; every delivered block is verified, and at the end every slot is free.
#include <array>
#include <atomic>
#include <random>
#include <thread>

#include "cache/cache_world.hpp"

namespace kvmem::test {
namespace {

constexpr std::size_t crew = 4;
constexpr std::size_t longest_chain = 6;

class CacheStorm {
 public:
  explicit CacheStorm(CacheWorld& world) : world_(world) {}

  void sail(unsigned number) {
    std::mt19937 random(number);
    const auto pick = [&](std::size_t below) { return random() % below; };
    const auto first_block = static_cast<BlockId>(number * longest_chain);
    for (int round = 0; round < 1500; ++round) {
      const auto keys = numbers(longest_chain * pick(4), 1 + pick(longest_chain));
      switch (pick(8)) {
        case 0:
        case 1:
        case 2:
          store(keys, first_block, pick(4) == 0);
          break;
        case 3:
        case 4:
        case 5:
          load(keys, first_block, pick(2) ? Pending::attach : Pending::stop, pick(4) == 0);
          break;
        case 6:
          world_.evict(keys, pick(3) ? std::optional<GroupIndex>(0) : std::nullopt);
          break;
        default:
          look(pick(4), pick(crew));
      }
    }
  }

  void forget() { shared_ = {}; }  // what has ended still holds its cache

  std::atomic<std::size_t> stored{0}, delivered{0}, from_others{0}, cancelled{0}, failed{0};

 private:
  // Seen by all for as long as it runs; anybody may cancel it.
  void wait(const std::shared_ptr<CacheTransfer>& transfer, bool cancel) {
    {
      const std::lock_guard lock(mutex_);
      shared_[next_++ % crew] = transfer;
    }
    if (cancel) static_cast<void>(transfer->cancel());
    try {
      transfer->wait(60);
    } catch (const Cancelled&) {
      ++cancelled;
    } catch (const CopyFailed&) {  // of the disk, or of a store that it attached to
      ++failed;
    }
    EXPECT_TRUE(transfer->done());
  }
  void store(const std::vector<std::uint64_t>& keys, BlockId first, bool cancel) {
    const auto transfer = world_.try_store(keys, first);
    if (!transfer) return;
    wait(transfer, cancel);
    if (transfer->state() == TransferState::done) stored += transfer->job().covered;
  }
  void load(const std::vector<std::uint64_t>& keys, BlockId first, Pending pending, bool cancel) {
    CacheHit hit = world_.reserve(keys, "a", pending);
    if (hit.length() == 0) return;
    const auto transfer = world_.load(hit, first);
    wait(transfer, cancel);
    for (std::size_t i = 0; i < transfer->loaded(); ++i) {
      EXPECT_TRUE(world_.world().cache().holds(first + static_cast<BlockId>(i), keys[i]))
          << "key " << keys[i];
      ++delivered;
    }
  }
  void look(std::size_t what, std::size_t whose) {
    if (what == 0) static_cast<void>(world_.cache().flush(0.001));
    if (what == 1) world_.cache().check();
    if (what == 2) static_cast<void>(world_.cache().stats());
    if (what != 3) return;
    std::shared_ptr<CacheTransfer> other;
    {
      const std::lock_guard lock(mutex_);
      other = shared_[whose];
    }
    if (other && other->cancel() != CancelOutcome::already_done) ++from_others;
  }

  CacheWorld& world_;
  std::mutex mutex_;
  std::array<std::shared_ptr<CacheTransfer>, crew> shared_;
  std::size_t next_ = 0;
};

TEST(CacheStorms, EveryDeliveredBlockIsRightAndEverySlotComesHome) {
  CacheWorldOptions options{.device_blocks = crew * longest_chain, .slots = 16, .disk_slots = 20};
  options.config.reaper = true;
  options.config.max_queued_bytes = 8 * CacheMemory::block_bytes();
  CacheWorld world(options, make_host_device({}));
  std::atomic<unsigned> calls{0};
  world.files->set_plan([&](const MemoryFiles::Call& call) -> std::optional<std::int64_t> {
    if (std::string_view(call.what) != "write" || ++calls % 16 != 0) return std::nullopt;
    return -EIO;
  });
  CacheStorm storm(world);
  std::vector<std::thread> threads;
  for (unsigned number = 0; number < crew; ++number)
    threads.emplace_back([&, number] { storm.sail(number); });
  for (auto& thread : threads) thread.join();
  EXPECT_GT(storm.stored, 100U);
  EXPECT_GT(storm.delivered, 100U);
  EXPECT_GT(storm.cancelled, 10U);
  EXPECT_TRUE(comes_true([&] {
    const CacheStats stats = world.cache().stats();
    return stats.transfers == 0 && stats.landing_free == options.landing_blocks;
  }));
  EXPECT_EQ(world.cache().stats().keys_loaded, storm.delivered);
  world.files->set_plan(nullptr);
  storm.forget();
  world.close();
  EXPECT_TRUE(comes_true([&] { return world.world().slots().free == 18; }));
  world.world().pool().check();
}

}  // namespace
}  // namespace kvmem::test
