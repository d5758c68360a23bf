// What a region asks of the device that pins it.

#include <sys/mman.h>
#include <sys/syscall.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <optional>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include "base/error.hpp"
#include "host/budget.hpp"
#include "host/pinned_region.hpp"
#include "support/child_process.hpp"
#include "support/fake_device.hpp"
#include "support/wait_for.hpp"

namespace kvmem {
namespace {

using test::FakeDevice;

constexpr std::size_t KiB = 1024, MiB = 1024 * KiB, GiB = 1024 * MiB;

TEST(Pinning, CoversTheRegionOnceAndIsUndoneBeforeItIsUnmapped) {
  const auto device = std::make_shared<FakeDevice>();
  {
    PinnedRegion region = PinnedRegion::map(5 * MiB, {});
    region.pin(device, 3 * MiB);
    EXPECT_TRUE(region.facts().pinned);
    EXPECT_EQ(device->pinned(), (std::vector<FakeDevice::Range>{{region.data(), 5 * MiB}}));
    EXPECT_THROW(region.pin(device), InvalidArgument);
    const PinnedRegion moved = std::move(region);
    EXPECT_EQ(device->pinned().size(), 1U);
  }
  EXPECT_TRUE(device->pinned().empty());
  EXPECT_EQ(device->wrong_unpins(), 0U);
}

// Public failure 63: memory was registered in one piece that was too large.
TEST(Pinning, GoesInChunksAndAFailedOneUndoesThoseBefore) {
  const std::size_t slot_bytes = 520 * MiB,
                    bytes = 2 * slot_bytes + MiB;  // the fewest bytes of three chunks
  try {
    expect_memory_for(2 * bytes);
  } catch (const CapacityError& error) {
    GTEST_SKIP() << error.what();
  }
  PinnedRegion region = PinnedRegion::map(bytes, {});
  for (std::size_t kth = 1; kth <= 3; ++kth) {
    const auto device = std::make_shared<FakeDevice>();
    device->refuse_pin(kth);
    EXPECT_THROW(region.pin(device, slot_bytes), CapacityError);
    EXPECT_EQ(device->pin_calls(), kth);
    EXPECT_TRUE(device->pinned().empty());
    EXPECT_EQ(device->wrong_unpins(), 0U);
    EXPECT_FALSE(region.facts().pinned);
  }
  const auto device = std::make_shared<FakeDevice>();
  region.pin(device, slot_bytes);
  EXPECT_EQ(device->pinned(),
            (std::vector<FakeDevice::Range>{{region.data(), slot_bytes},
                                            {region.data() + slot_bytes, slot_bytes},
                                            {region.data() + 2 * slot_bytes, MiB}}));
  {
    const PinnedRegion gone = std::move(region);
  }
  EXPECT_TRUE(device->pinned().empty());
  EXPECT_EQ(device->wrong_unpins(), 0U);
}

// Public failure 63: memory was registered in one piece that was too large.
TEST(Pinning, AChunkIsWholeSlotsUpTo1GiBElseOneSlotUpTo64GiB) {
  EXPECT_EQ(PinnedRegion::bytes_a_pin(4096), GiB);
  EXPECT_EQ(PinnedRegion::bytes_a_pin(12 * KiB), GiB / (12 * KiB) * (12 * KiB));
  EXPECT_EQ(PinnedRegion::bytes_a_pin(600 * MiB), 600 * MiB);
  EXPECT_EQ(PinnedRegion::bytes_a_pin(GiB), GiB);
  EXPECT_EQ(PinnedRegion::bytes_a_pin(3 * GiB), 3 * GiB);
  EXPECT_EQ(PinnedRegion::bytes_a_pin(64 * GiB), 64 * GiB);
  EXPECT_THROW((void)PinnedRegion::bytes_a_pin(64 * GiB + 4096), InvalidArgument);
  EXPECT_THROW((void)PinnedRegion::bytes_a_pin(0), InvalidArgument);
}

TEST(Pinning, GoesChunkByChunkAndAChunkThatFailsChangesNothing) {
  const auto device = std::make_shared<FakeDevice>();
  device->refuse_pin(2);
  PinnedRegion region = PinnedRegion::map(5 * MiB, {});
  region.start_pinning(device, 2 * MiB);
  EXPECT_EQ(region.pin_chunk_bytes(), 2 * MiB);
  EXPECT_EQ(region.pinned_bytes(), 0U);
  EXPECT_TRUE(region.pin_next());
  EXPECT_THROW(region.pin_next(), CapacityError);
  EXPECT_EQ(region.pinned_bytes(), 2 * MiB);
  EXPECT_TRUE(region.pin_next());
  EXPECT_FALSE(region.facts().pinned);
  EXPECT_TRUE(region.pin_next());
  EXPECT_FALSE(region.pin_next());
  EXPECT_TRUE(region.facts().pinned);
  EXPECT_EQ(device->pinned(), (std::vector<FakeDevice::Range>{{region.data(), 2 * MiB},
                                                              {region.data() + 2 * MiB, 2 * MiB},
                                                              {region.data() + 4 * MiB, MiB}}));
  region.unpin();
  EXPECT_TRUE(device->pinned().empty());
  EXPECT_EQ(region.pinned_bytes(), 0U);
  region.pin(device);
  EXPECT_TRUE(region.facts().pinned);
}

// ---- letting go of what is pinned takes seconds ----

bool mapped(const std::byte* base) {
  unsigned char state = 0;
  return mincore(const_cast<std::byte*>(base), 4096, &state) == 0;
}

class LettingGo : public ::testing::Test {
 protected:
  explicit LettingGo(bool calls_block = true) { device_->change_info().calls_block = calls_block; }
  const std::byte* map_and_pin() {
    region_.emplace(PinnedRegion::map(5 * MiB, {}));
    region_->start_pinning(device_, 2 * MiB);
    region_->pin_next();
    region_->pin_next();
    return region_->data();
  }
  void expect_that_all_is_gone(const std::byte* base) {
    EXPECT_FALSE(mapped(base));
    EXPECT_TRUE(device_->pinned().empty());
    EXPECT_EQ(device_->wrong_unpins(), 0U);
    EXPECT_EQ(device_->unpinned_by().size(), 2U);
  }

  std::shared_ptr<FakeDevice> device_ = std::make_shared<FakeDevice>();
  std::optional<PinnedRegion> region_;
};
struct LettingGoInPlace : LettingGo {
  LettingGoInPlace() : LettingGo(false) {}
};

// Public failure 144: the whole process stood still while a region was unregistered.
TEST_F(LettingGo, IsNotWaitedForWhereTheDevicesCallsBlock) {
  const std::byte* const base = map_and_pin();
  device_->hold_unpins();
  region_.reset();
  EXPECT_TRUE(mapped(base)) << "unmapped while it is pinned";
  EXPECT_EQ(device_->pinned().size(), 2U);
  device_->let_unpins(100);
  ASSERT_TRUE(test::comes_true([&] { return device_.use_count() == 1; }));
  expect_that_all_is_gone(base);
  for (const std::thread::id thread : device_->unpinned_by())
    EXPECT_NE(thread, std::this_thread::get_id());
}

TEST_F(LettingGoInPlace, HasHappenedWhenTheRegionIsGone) {
  const std::byte* const base = map_and_pin();
  region_.reset();
  expect_that_all_is_gone(base);
}

TEST_F(LettingGo, OfWhatIsNotPinnedHasHappenedWhenTheRegionIsGone) {
  const std::byte* const base = map_and_pin();
  region_->unpin();
  region_.reset();
  expect_that_all_is_gone(base);
}

TEST_F(LettingGo, HappensInPlaceWithoutAThreadForIt) {
  EXPECT_TRUE(test::true_in_child([] {
    const auto device = std::make_shared<FakeDevice>();
    device->change_info().calls_block = true;
    std::optional<PinnedRegion> region(PinnedRegion::map(MiB, {}));
    region->pin(device);
    const std::byte* const base = region->data();
    if (!test::refuse_call(SYS_clone3, 1, 88, EAGAIN)) return false;
    region.reset();
    return !mapped(base) && device->pinned().empty() &&
           device->unpinned_by().front() == std::this_thread::get_id();
  }));
}

TEST_F(LettingGo, StopsAtExitBetweenTwoCalls) {
  EXPECT_TRUE(test::true_in_child([] {
    const auto device = std::make_shared<FakeDevice>();
    device->change_info().calls_block = true;
    device->hold_unpins();
    std::optional<PinnedRegion> region(PinnedRegion::map(5 * MiB, {}));
    region->start_pinning(device, MiB);
    while (region->pin_next()) {
    }
    const std::byte* const base = region->data();
    region.reset();
    device->let_unpins(1);
    if (!test::comes_true([&] { return device->pinned().size() == 4; })) return false;
    set_process_exiting();
    device->let_unpins(1);  // it may be in the second call already
    return test::comes_true([&] { return device.use_count() == 1; }) &&
           device->pinned().size() >= 3 && mapped(base);
  }));
}

// Else a pool that takes the place of another would be refused for want of the other's memory.
TEST_F(LettingGo, IsWaitedForByWhoeverFindsTooLittleMemory) {
  static_cast<void>(map_and_pin());
  device_->hold_unpins();
  region_.reset();
  std::atomic<bool> refused{false};
  std::size_t still_pinned = 0;
  std::thread next([&] {
    try {
      static_cast<void>(PinnedRegion::map(std::size_t{1} << 55, {}));
    } catch (const CapacityError&) {
      still_pinned = device_->pinned().size();
      refused = true;
    }
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(20));  // to come to that point
  EXPECT_FALSE(refused);
  device_->let_unpins(100);
  next.join();
  EXPECT_TRUE(refused);
  EXPECT_EQ(still_pinned, 0U);
}

// The driver knows memory by its addresses: whoever got these next would be taken for pinned.
TEST_F(LettingGo, OfWhatCannotBeUnpinnedLeaksIt) {
  const std::byte* const base = map_and_pin();
  const std::uint64_t leaked = leaked_region_bytes();
  device_->fail_unpins();
  region_.reset();
  ASSERT_TRUE(test::comes_true([&] { return device_.use_count() == 1; }));
  EXPECT_TRUE(mapped(base));
  EXPECT_EQ(leaked_region_bytes(), leaked + 5 * MiB);
}

TEST_F(LettingGoInPlace, OfWhatCannotBeUnpinnedLeaksIt) {
  const std::byte* const base = map_and_pin();
  device_->fail_unpins();
  region_.reset();
  EXPECT_TRUE(mapped(base));
}

TEST_F(LettingGoInPlace, AFailedPinWhoseRollbackFailsLeaksTheRegion) {
  region_.emplace(PinnedRegion::map(5 * MiB, {}));
  const std::byte* const base = region_->data();
  device_->refuse_pin(2);
  device_->fail_unpins();
  region_->start_pinning(device_, 2 * MiB);
  region_->pin_next();
  EXPECT_THROW(region_->pin_next(), CapacityError);
  region_->unpin();
  region_.reset();
  EXPECT_TRUE(mapped(base));
}

TEST_F(LettingGo, OfALeakedRegionNeverHappens) {
  const std::byte* const base = map_and_pin();
  region_->leak();
  region_.reset();
  EXPECT_EQ(device_.use_count(), 1) << "a thread has it";
  EXPECT_TRUE(mapped(base));
  EXPECT_EQ(device_->pinned().size(), 2U);
  munmap(const_cast<std::byte*>(base), 5 * MiB);
}

}  // namespace
}  // namespace kvmem
