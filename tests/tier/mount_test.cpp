// File systems that are too small or turn read-only under a tier.
#include <cerrno>
#include <cstring>

#include <gtest/gtest.h>

#include "base/error.hpp"
#include "tier/disk_world.hpp"
#include "tier/mounts.hpp"

namespace kvmem::test {
namespace {

// A tier over a folder that the body, in a child, mounts something on.
struct MountTest : testing::Test {
  Folder folder;
  const std::string place = folder.path() + "/mounted";
  World world;

  // `prepare` says whether the file system is there.
  void in_child(const std::function<bool()>& prepare, const std::function<void()>& body) {
    std::filesystem::create_directory(place);
    world.options.path = place + "/tier";
    world.options.files = nullptr;
    const std::optional<bool> passed = passes_in_child(prepare, [&] {
      body();
      world.tier.reset();
    });
    if (!passed) GTEST_SKIP() << "such a file system cannot be mounted here";
    EXPECT_TRUE(*passed);
  }
  [[nodiscard]] bool mount_small() const {
    return mount("none", place.c_str(), "tmpfs", 0, "size=1m") == 0;
  }
  [[nodiscard]] int remount(unsigned long flags) const {
    return mount("none", place.c_str(), nullptr, MS_REMOUNT | flags, nullptr) == 0 ? 0 : errno;
  }
};

TEST_F(MountTest, ASmallFileSystemIsSaidToBeTooSmall) {
  in_child([&] { return mount_small(); },
           [&] {
             world.options.capacity_bytes = 2 << 20;
             EXPECT_THROW(world.open(), CapacityError);
             world.options.capacity_bytes = 500 << 10;
             world.open();
             const DiskResult put = world.put(0);
             EXPECT_EQ(put.outcome, DiskOutcome::ok);
             EXPECT_EQ(world.get(0, put.generation).outcome, DiskOutcome::ok);
             // Deleted, and then there is no room to make it again.
             std::filesystem::remove_all(world.options.path);
             std::FILE* const filler = std::fopen((place + "/filler").c_str(), "w");
             ASSERT_NE(filler, nullptr);
             const std::vector<char> megabyte(1 << 20);
             EXPECT_LT(std::fwrite(megabyte.data(), 1, megabyte.size(), filler), megabyte.size());
             EXPECT_EQ(world.put(1).outcome, DiskOutcome::io_error);
             EXPECT_EQ(world.put(1).outcome, DiskOutcome::io_error);
             EXPECT_NE(world.tier->stats().degraded, std::nullopt);
             std::fclose(filler);
             std::filesystem::remove(place + "/filler");
             world.put(1);  // the files that were deleted go with this one, if not with the last
             EXPECT_EQ(world.put(1).outcome, DiskOutcome::ok);
             EXPECT_EQ(world.tier->stats().degraded, std::nullopt);
           });
}

TEST_F(MountTest, ADeletedTierIsMadeAgainInTheSpaceOfItsOwnFiles) {
  in_child([&] { return mount_small(); },
           [&] {
             world.options.capacity_bytes = 40 * World::slot_bytes;  // 640 KiB
             world.open();
             const std::uint64_t old = world.put(0).generation;
             std::filesystem::remove_all(world.options.path);
             EXPECT_EQ(world.put(1).outcome, DiskOutcome::io_error);
             EXPECT_EQ(world.get(0, old).outcome, DiskOutcome::ok);
             EXPECT_EQ(world.put(1).outcome, DiskOutcome::ok);
             EXPECT_EQ(world.get(0, old).outcome, DiskOutcome::empty);
             EXPECT_EQ(world.tier->stats().degraded, std::nullopt);
           });
}

// What has a name is somebody's.
TEST_F(MountTest, ATierThatWasMovedAwayKeepsItsSpaceAndWhatItHolds) {
  in_child([&] { return mount_small(); },
           [&] {
             world.options.capacity_bytes = 40 * World::slot_bytes;
             world.open();
             const std::uint64_t old = world.put(0).generation;
             std::filesystem::rename(world.options.path, place + "/away");
             for (int attempt = 0; attempt < 3; ++attempt)
               EXPECT_EQ(world.put(1).outcome, DiskOutcome::io_error);
             EXPECT_EQ(world.get(0, old).outcome, DiskOutcome::ok);
             world.options.path = place + "/away";
             EXPECT_EQ(world.open().take_found().size(), 1);
             EXPECT_EQ(world.get(0, old).outcome, DiskOutcome::ok);
           });
}

TEST_F(MountTest, ASuperblockForWhichThereIsNoRoomIsSaidBeforeAnythingIsReserved) {
  in_child([&] { return mount_small(); },
           [&] {
             world.options.block_bytes = 4096;
             world.options.capacity_bytes = 85 * 3 * 4096;  // of 256 pages, one of them the lock's
             world.options.file_bytes = 1 << 20;
             EXPECT_THROW(world.open(), CapacityError);
             EXPECT_FALSE(std::filesystem::exists(world.options.path + "/slots-0000.kv"));
             world.options.capacity_bytes -= 3 * 4096;
             EXPECT_NO_THROW(world.open());
           });
}

// The folder of the mount is still there, on a file system that is not the tier's to fill.
TEST_F(MountTest, AFileSystemThatIsGoneDegradesUntilItIsThereAgain) {
  in_child([&] { return mount_small(); },
           [&] {
             world.options.capacity_bytes = 500 << 10;
             DiskSlots& tier = world.open();
             ASSERT_EQ(world.put(0).outcome, DiskOutcome::ok);
             ASSERT_EQ(umount2(place.c_str(), MNT_DETACH), 0);
             for (int attempt = 0; attempt < 3; ++attempt)
               EXPECT_EQ(world.put(1).outcome, DiskOutcome::io_error);
             EXPECT_EQ(tier.stats().degraded,
                       text("disk tier: nothing is mounted at ", place, " any more"));
             EXPECT_FALSE(std::filesystem::exists(world.options.path));
             ASSERT_TRUE(mount_small());
             const DiskResult put = world.put(1);
             EXPECT_EQ(put.outcome, DiskOutcome::ok);
             EXPECT_EQ(tier.stats().degraded, std::nullopt);
             EXPECT_EQ(world.get(1, put.generation).outcome, DiskOutcome::ok);
           });
}

TEST_F(MountTest, AFileSystemThatIsReadOnlyIsRefusedAndOneWithAnOpenTierStaysWritable) {
  in_child([&] { return mount_small(); },
           [&] {
             world.open();
             const std::uint64_t generation = world.put(0).generation;
             EXPECT_EQ(remount(MS_RDONLY),
                       EBUSY);  // the kernel's word, for as long as the files are open
             EXPECT_EQ(world.put(1).outcome, DiskOutcome::ok);
             world.tier.reset();
             ASSERT_EQ(remount(MS_RDONLY), 0);
             EXPECT_THROW(world.open(), InvalidArgument);
             ASSERT_EQ(remount(0), 0);
             world.open();
             EXPECT_EQ(world.get(0, generation).outcome, DiskOutcome::ok);
           });
}

// What is left when nobody asked the files that are open: the kernel found damage.
TEST_F(MountTest, AFileSystemThatTurnsReadOnlyDegradesUntilItIsMountedAnew) {
  ImageFiles image(folder.path() + "/image", place);
  in_child([&] { return image.make() && image.mount(); },
           [&] {
             DiskSlots& tier = world.open();
             const std::uint64_t generation = world.put(0).generation;
             ASSERT_TRUE(image.turn_read_only());
             for (int attempt = 0; attempt < 2; ++attempt) {
               const DiskResult put = world.put(1);
               EXPECT_EQ(put.outcome, DiskOutcome::io_error);
               EXPECT_EQ(put.error, EROFS);
               EXPECT_EQ(tier.stats().degraded, text("writing: ", std::strerror(EROFS)));
               EXPECT_EQ(world.get(0, generation).outcome, DiskOutcome::ok);
             }
             ASSERT_TRUE(image.unmount());
             ASSERT_TRUE(image.mount());
             const DiskResult put = world.put(1);
             EXPECT_EQ(put.outcome, DiskOutcome::ok);
             EXPECT_EQ(tier.stats().degraded, std::nullopt);
             EXPECT_EQ(world.get(1, put.generation).outcome, DiskOutcome::ok);
             EXPECT_EQ(world.get(0, generation).outcome, DiskOutcome::ok);
           });
}

}  // namespace
}  // namespace kvmem::test
