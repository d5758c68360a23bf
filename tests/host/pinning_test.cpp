// What a region asks of the device that pins it.

#include <vector>

#include <gtest/gtest.h>

#include "base/error.hpp"
#include "host/budget.hpp"
#include "host/pinned_region.hpp"
#include "support/fake_device.hpp"

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

}  // namespace
}  // namespace kvmem
