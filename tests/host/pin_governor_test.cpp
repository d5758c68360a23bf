// Pinning while the pool is in use. Chunks are made small by a limit; the device's clock says that
// each took long enough, so that nobody pauses. The test says when a chunk is pinned.

#include <sys/mman.h>
#include <sys/syscall.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <random>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include "base/error.hpp"
#include "host/block_pool.hpp"
#include "support/child_process.hpp"
#include "support/fake_device.hpp"
#include "support/wait_for.hpp"

namespace kvmem {
namespace {

using test::comes_true;
using test::FakeDevice;

constexpr std::size_t page = 4096;
constexpr Nanoseconds second = 1'000'000'000;
constexpr double one_byte_a_second = 1;  // hours between two chunks

PoolOptions behind(std::size_t slots, double bytes_per_second) {
  PoolOptions options;
  options.block_bytes = page;
  options.capacity_bytes = slots * page;
  options.pin = Pin::background;
  options.pin_bytes_per_second = bytes_per_second;
  return options;
}

// What is pinned in half a second is a chunk.
PoolOptions behind_in_chunks(std::size_t slots, std::size_t slots_a_chunk) {
  return behind(slots, 2.0 * static_cast<double>(slots_a_chunk * page));
}

std::vector<SlotIndex> slots_of(const HostBlocks& blocks) {
  return {blocks.slots().begin(), blocks.slots().end()};
}

bool mapped(const std::byte* base) {
  unsigned char state = 0;
  return mincore(const_cast<std::byte*>(base), page, &state) == 0;
}

std::size_t threads() {
  const std::filesystem::directory_iterator folder("/proc/self/task");
  return static_cast<std::size_t>(std::distance(begin(folder), end(folder)));
}

class BackgroundPinning : public ::testing::Test {
 protected:
  BackgroundPinning() {
    device_->pins_take(second);
    device_->hold_pins();
  }
  // The thread that pins may be about to leave: it holds the pool until then.
  void TearDown() override {
    device_->let_pins(1000);
    pool_.reset();
    EXPECT_TRUE(all_is_gone());
  }
  void make(const PoolOptions& options) { pool_ = std::make_unique<BlockPool>(device_, options); }
  [[nodiscard]] bool has_begun_chunk(std::size_t number) const {  // so those before are handed out
    return comes_true([&] { return device_->pin_calls() >= number; });
  }
  [[nodiscard]] std::size_t pinned_bytes() const { return pool_->stats().region.pinned_bytes; }
  // Nobody has the pool, nor its memory, any more.
  [[nodiscard]] bool all_is_gone() const {
    return comes_true([&] { return device_.use_count() == 1; });
  }

  std::shared_ptr<FakeDevice> device_ = std::make_shared<FakeDevice>(true);
  std::unique_ptr<BlockPool> pool_;
};

TEST_F(BackgroundPinning, ThePoolIsInUseBeforeAnythingIsPinned) {
  make(behind_in_chunks(6, 2));
  ASSERT_TRUE(has_begun_chunk(1));
  EXPECT_EQ(pinned_bytes(), 0U);
  EXPECT_FALSE(pool_->pinned());
  auto blocks = pool_->try_acquire(6);
  ASSERT_TRUE(blocks);
  EXPECT_EQ(slots_of(*blocks), (std::vector<SlotIndex>{0, 1, 2, 3, 4, 5}));
  EXPECT_FALSE(blocks->pinned());
  std::memset(blocks->data(5), 1, page);

  device_->let_pins(1);
  ASSERT_TRUE(has_begun_chunk(2));
  EXPECT_EQ(pinned_bytes(), 2 * page);
  EXPECT_EQ(device_->pinned(), (std::vector<FakeDevice::Range>{{pool_->data(), 2 * page}}));
  EXPECT_TRUE(blocks->share(0, 2).pinned());
  EXPECT_FALSE(blocks->share(1, 2).pinned());
  EXPECT_FALSE(blocks->share(2, 1).pinned());
  EXPECT_FALSE(pool_->pinned());

  device_->let_pins(2);
  ASSERT_TRUE(comes_true([&] { return pool_->pinned(); }));
  EXPECT_EQ(pinned_bytes(), 6 * page);
  EXPECT_TRUE(blocks->pinned());
  EXPECT_EQ(pool_->stats().pin_error, std::nullopt);
  EXPECT_EQ(device_->pin_calls(), 3U);
  EXPECT_EQ(pool_->pin_chunk_bytes(), 2 * page);
}

TEST_F(BackgroundPinning, WhatIsPinnedGoesOutFirst) {
  make(behind_in_chunks(6, 2));
  ASSERT_TRUE(has_begun_chunk(1));
  pool_->try_acquire(6)->release();
  device_->let_pins(1);
  ASSERT_TRUE(has_begun_chunk(2));
  auto first = pool_->try_acquire(1);
  const auto second_one = pool_->try_acquire(1);
  auto third = pool_->try_acquire(1);
  EXPECT_TRUE(first->pinned());
  EXPECT_TRUE(second_one->pinned());
  EXPECT_FALSE(third->pinned());
  device_->let_pins(1);
  ASSERT_TRUE(has_begun_chunk(3));
  EXPECT_TRUE(third->pinned()) << "it is of the chunk that was pinned next";
  const std::vector<SlotIndex> last = slots_of(*third);
  first->release();
  third->release();
  EXPECT_EQ(slots_of(*pool_->try_acquire(1)), last) << "what came back last, of either chunk";
  const auto three = pool_->try_acquire(3);
  EXPECT_TRUE(three->pinned()) << "what comes back is as good as its chunk is by now";
  const auto rest = pool_->try_acquire(2);
  EXPECT_EQ(slots_of(*rest), (std::vector<SlotIndex>{4, 5}));
  EXPECT_FALSE(pool_->try_acquire(1));
  pool_->check();
}

TEST_F(BackgroundPinning, AChunkThatFailsIsTheLastAndTheRestStaysInUse) {
  device_->refuse_pin(2);
  make(behind_in_chunks(6, 2));
  device_->let_pins(100);
  ASSERT_TRUE(comes_true([&] { return pool_->stats().pin_error.has_value(); }));
  EXPECT_NE(pool_->stats().pin_error->find("pinning failed"), std::string::npos);
  EXPECT_EQ(pinned_bytes(), 2 * page);
  EXPECT_EQ(device_->pin_calls(), 2U);
  {
    const auto blocks = pool_->try_acquire(6);
    ASSERT_TRUE(blocks);
    EXPECT_FALSE(blocks->pinned());
    EXPECT_TRUE(blocks->share(0, 2).pinned());
  }
  pool_.reset();
  ASSERT_TRUE(all_is_gone());
  EXPECT_TRUE(device_->pinned().empty());
  EXPECT_EQ(device_->wrong_unpins(), 0U);
}

TEST_F(BackgroundPinning, EndsWithTheChunkThatItIsInWhenThePoolIsClosed) {
  make(behind_in_chunks(6, 2));
  auto held = pool_->try_acquire(1);
  ASSERT_TRUE(has_begun_chunk(1));
  pool_->close();
  device_->let_pins(100);
  ASSERT_TRUE(comes_true([&] { return pinned_bytes() == 2 * page; }));
  EXPECT_TRUE(held->pinned());
  pool_.reset();
  std::memset(held->data(0), 1, page);
  held.reset();
  ASSERT_TRUE(all_is_gone());
  EXPECT_EQ(device_->pin_calls(), 1U);
  EXPECT_TRUE(device_->pinned().empty());
  EXPECT_EQ(device_->wrong_unpins(), 0U);
}

TEST_F(BackgroundPinning, NobodyWaitsForItAndTheMemoryStaysAsLongAsItsChunkTakes) {
  make(behind_in_chunks(6, 2));
  const std::byte* const base = pool_->data();
  ASSERT_TRUE(has_begun_chunk(1));
  pool_.reset();
  EXPECT_TRUE(mapped(base));
  device_->let_pins(100);
  ASSERT_TRUE(all_is_gone());
  EXPECT_FALSE(mapped(base));
  EXPECT_EQ(device_->pin_calls(), 1U);
  EXPECT_TRUE(device_->pinned().empty());
  EXPECT_EQ(device_->wrong_unpins(), 0U);
}

TEST_F(BackgroundPinning, APauseEndsWhenThePoolIsClosed) {
  device_->pins_take(0);
  make(behind(4, one_byte_a_second));
  device_->let_pins(100);
  ASSERT_TRUE(comes_true([&] { return pinned_bytes() == page; }));
  pool_.reset();
  ASSERT_TRUE(all_is_gone());
  EXPECT_EQ(device_->pin_calls(), 1U);
}

TEST_F(BackgroundPinning, PinsAllOfItWhereTheDeviceDoesNotAskForItToo) {
  device_->change_info().needs_pinned_host = false;
  make(behind(5, 0));
  device_->let_pins(1);
  ASSERT_TRUE(comes_true([&] { return pool_->pinned(); }));
  EXPECT_EQ(device_->pin_calls(), 1U);
}

TEST_F(BackgroundPinning, EndsAtExitWithoutAnotherCall) {
  EXPECT_TRUE(test::true_in_child([] {
    const auto device = std::make_shared<FakeDevice>(true);
    device->pins_take(second);
    device->hold_pins();
    auto pool = std::make_unique<BlockPool>(device, behind_in_chunks(6, 2));
    if (!comes_true([&] { return device->pin_calls() == 1; })) return false;
    const std::byte* const base = pool->data();
    const std::size_t with_it = threads();
    set_process_exiting();
    pool.reset();
    device->let_pins(100);
    return comes_true([&] { return threads() < with_it; }) && device->pin_calls() == 1 &&
           device->pinned().size() == 1 && mapped(base);
  }));
}

TEST_F(BackgroundPinning, IsNoMatterOfAForkedChild) {
  make(behind_in_chunks(6, 2));
  ASSERT_TRUE(has_begun_chunk(1));
  EXPECT_TRUE(test::true_in_child([&] {
    const std::byte* const base = pool_->data();
    pool_.reset();
    return mapped(base);
  }));
  device_->let_pins(100);
  EXPECT_TRUE(comes_true([&] { return pool_->pinned(); }));
}

TEST_F(BackgroundPinning, WithoutAThreadForItThePoolStaysAsItIsAndSaysSo) {
  EXPECT_TRUE(test::true_in_child([] {
    const auto device = std::make_shared<FakeDevice>(true);
    device->change_info().has_bytes = false;  // else threads would have to touch pages
    if (!test::refuse_call(SYS_clone3, 1, 88, EAGAIN)) return false;
    const BlockPool pool(device, behind(6, 0));
    return pool.stats().pin_error.has_value() && device->pin_calls() == 0;
  }));
}

TEST_F(BackgroundPinning, ASpeedBelowAByteASecondIsRefused) {
  for (const double bad : {-1.0, 0.5, std::numeric_limits<double>::quiet_NaN()})
    EXPECT_THROW(make(behind(4, bad)), InvalidArgument) << bad;
}

// Who finds a slot pinned finds it so for ever, and no slot is lost between the lists.
TEST_F(BackgroundPinning, ThreadsTakeAndGiveBackWhileChunkAfterChunkIsPinned) {
  constexpr std::size_t slots = 64, chunks = 16;
  make(behind_in_chunks(slots, slots / chunks));
  std::atomic<bool> stop{false};
  std::atomic<int> wrong{0};
  const auto churn = [&](unsigned seed) {
    std::mt19937 random(seed);
    std::vector<bool> pinned(slots);
    std::vector<HostBlocks> held;
    while (!stop) {
      if (auto blocks = pool_->try_acquire(1 + random() % 8)) {
        for (const SlotIndex slot : blocks->slots()) {
          const bool now = pool_->pinned({&slot, 1});
          if (pinned[slot] && !now) ++wrong;
          pinned[slot] = now;
          std::memset(pool_->data() + slot * page, static_cast<int>(seed), 64);
        }
        held.push_back(std::move(*blocks));
      }
      while (held.size() > random() % 6) held.erase(held.begin());
      if (random() % 64 == 0) pool_->check();
    }
  };
  std::thread one(churn, 1U), other(churn, 2U);
  for (std::size_t chunk = 1; chunk <= chunks; ++chunk) {
    EXPECT_TRUE(has_begun_chunk(chunk));
    const std::uint64_t acquired = pool_->stats().acquired;
    EXPECT_TRUE(comes_true([&] { return pool_->stats().acquired > acquired + 200; }));
    device_->let_pins(1);
  }
  EXPECT_TRUE(comes_true([&] { return pool_->pinned(); }));
  stop = true;
  one.join();
  other.join();
  EXPECT_EQ(wrong, 0);
  const SlotCounts expected{.capacity = slots, .free = slots};
  EXPECT_EQ(pool_->stats().slots, expected);
  pool_->check();
  EXPECT_TRUE(pool_->try_acquire(slots)->pinned());
}

}  // namespace
}  // namespace kvmem
