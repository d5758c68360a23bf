// A second mapping of a shared pool: what another process has, here within one.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <optional>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "base/error.hpp"
#include "host/block_pool.hpp"
#include "support/child_process.hpp"
#include "support/fake_device.hpp"

namespace kvmem {
namespace {

constexpr std::size_t slot_bytes = 4096;
constexpr std::uint32_t slot_count = 8;

PoolOptions options_of(std::size_t capacity_bytes = slot_count * slot_bytes) {
  PoolOptions options;
  options.block_bytes = slot_bytes - 100;
  options.capacity_bytes = capacity_bytes;
  return options;
}

std::string refusal(int descriptor, PoolOptions options = options_of()) {
  options.region.attach = descriptor;
  try {
    const BlockPool pool(std::make_shared<test::FakeDevice>(), options);
  } catch (const InvalidArgument& error) {
    return error.what();
  }
  return "";
}

class AttachedPool : public ::testing::Test {
 protected:
  AttachedPool() {
    PoolOptions options = options_of();
    options.region.shared = true;
    maker_.emplace(device_, options);
    attach();
  }
  ~AttachedPool() override {
    if (pool_) pool_->check();
  }
  void attach(Pin pin = Pin::automatic) {
    PoolOptions options = options_of();
    options.region.attach = maker_->stats().region.memfd;
    options.pin = pin;
    pool_.emplace(device_, options);
  }

  std::shared_ptr<test::FakeDevice> device_ = std::make_shared<test::FakeDevice>();
  std::optional<BlockPool> maker_, pool_;
};

TEST_F(AttachedPool, HasTheSameBytesAtTheSameNumbers) {
  const HostBlocks lease = maker_->try_acquire(3).value();
  const HostBlocks same = pool_->share_indices(lease.slots());
  for (std::size_t i = 0; i < lease.size(); ++i) {
    ASSERT_NE(lease.data(i), same.data(i));
    std::memset(lease.data(i), static_cast<int>(i + 1), slot_bytes / 2);
    std::memset(same.data(i) + slot_bytes / 2, static_cast<int>(i + 101), slot_bytes / 2);
    EXPECT_EQ(std::memcmp(lease.data(i), same.data(i), slot_bytes), 0);
    EXPECT_EQ(same.data(i)[0], std::byte(i + 1));
    EXPECT_EQ(lease.data(i)[slot_bytes - 1], std::byte(i + 101));
  }
}

TEST_F(AttachedPool, HandsNothingOut) {
  EXPECT_EQ(pool_->free(), 0U);
  EXPECT_FALSE(pool_->try_acquire(1).has_value());
  EXPECT_THROW((void)pool_->enqueue(1), CapacityError);  // at once: nobody waits for ever
  const std::vector<SlotIndex> slots{0};
  EXPECT_THROW(pool_->release(slots), InvalidArgument);
  EXPECT_EQ(pool_->stats().slots.held, slot_count);
}

TEST_F(AttachedPool, SharesSlotsThatNobodyHereHoldsAndNeverLetsThemGoFree) {
  const std::vector<SlotIndex> slots{7, 0};
  HostBlocks blocks = pool_->share_indices(slots);
  HostBlocks copy = blocks.hold_for_copy();
  blocks.release();
  EXPECT_EQ(pool_->stats().slots.quarantined, 0U);  // the owner elsewhere still has them
  copy.release();
  EXPECT_EQ(pool_->stats().slots.held, slot_count);
  EXPECT_FALSE(pool_->try_acquire(1).has_value());
  const std::vector<SlotIndex> beyond{slot_count};
  EXPECT_THROW((void)pool_->share_indices(beyond), InvalidArgument);
}

TEST_F(AttachedPool, LeavesTheBooksOfItsMakerAlone) {
  const std::vector<SlotIndex> slots{1};
  const HostBlocks blocks = pool_->share_indices(slots);
  EXPECT_EQ(maker_->stats().slots.free, slot_count);
  EXPECT_THROW((void)maker_->share_indices(slots), InvalidArgument);
}

TEST_F(AttachedPool, OutlivesItsMaker) {
  const HostBlocks blocks = pool_->share_indices(std::vector<SlotIndex>{2});
  std::memset(maker_->try_acquire(slot_count).value().data(0), 0, 1);
  std::memset(maker_->data() + 2 * slot_bytes, 0x5a, slot_bytes);
  maker_.reset();
  EXPECT_EQ(blocks.data(0)[slot_bytes - 1], std::byte{0x5a});
  const int memfd = pool_->stats().region.memfd;  // its own: others may attach by it
  PoolOptions options = options_of();
  options.region.attach = memfd;
  const BlockPool third(device_, options);
  EXPECT_EQ(third.data()[2 * slot_bytes], std::byte{0x5a});
}

TEST_F(AttachedPool, LeavesNothingBehindUnlessACopyWasLost) {
  const std::uint64_t leaked = leaked_region_bytes();
  const int memfd = pool_->stats().region.memfd;
  pool_.reset();
  EXPECT_EQ(fcntl(memfd, F_GETFD), -1);
  EXPECT_EQ(leaked_region_bytes(), leaked);
  attach();
  pool_->share_indices(std::vector<SlotIndex>{3}).hold_for_copy().poison();
  EXPECT_EQ(pool_->stats().slots.poisoned, 1U);
  pool_->check();
  pool_.reset();
  EXPECT_EQ(leaked_region_bytes(), leaked + slot_count * slot_bytes);
}

TEST_F(AttachedPool, IsPinnedByItself) {
  EXPECT_FALSE(pool_->pinned());
  attach(Pin::required);
  EXPECT_TRUE(pool_->pinned());
  EXPECT_FALSE(maker_->pinned());
  ASSERT_EQ(device_->pinned().size(), 1U);
  EXPECT_EQ(device_->pinned()[0].base, pool_->data());
}

// Reserved ones where there are any: then both are longer than the slots.
TEST_F(AttachedPool, IsOfThePagesOfItsMaker) {
  PoolOptions options = options_of();
  options.region.shared = true;
  options.region.hugepages = HugePages::attempt;
  pool_.reset();
  maker_.emplace(device_, options);
  attach();
  const RegionFacts facts = pool_->stats().region, makers = maker_->stats().region;
  EXPECT_EQ(facts.page_bytes, makers.page_bytes);
  EXPECT_EQ(facts.bytes, makers.bytes);
  maker_->data()[(slot_count - 1) * slot_bytes] = std::byte{3};
  EXPECT_EQ(pool_->data()[(slot_count - 1) * slot_bytes], std::byte{3});
}

// A view in the child would write to slots that are somebody else's by then.
TEST_F(AttachedPool, IsNotMappedInAForkedChildNorIsItsMaker) {
  EXPECT_TRUE(test::true_in_child([&] {
    unsigned char page = 0;
    return mincore(pool_->data(), slot_bytes, &page) != 0 &&
           mincore(maker_->data(), slot_bytes, &page) != 0;
  }));
}

TEST_F(AttachedPool, CanBeMadeInAForkedChildFromTheDescriptorThatItInherited) {
  const HostBlocks lease = maker_->try_acquire(slot_count).value();
  const SlotIndex last = slot_count - 1;
  EXPECT_TRUE(test::true_in_child([&, memfd = maker_->stats().region.memfd] {
    PoolOptions options = options_of();
    options.region.attach = memfd;
    BlockPool pool(std::make_shared<test::FakeDevice>(), options);
    pool.share_indices(std::vector<SlotIndex>{last}).data(0)[0] = std::byte{9};
    return true;
  }));
  EXPECT_EQ(maker_->data()[last * slot_bytes], std::byte{9});
}

// ---- what is refused ----

class Memfd {
 public:
  explicit Memfd(std::size_t bytes, int seals, bool reserved = true)
      : descriptor_(memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING)) {
    const auto size = static_cast<off_t>(bytes);
    EXPECT_EQ(ftruncate(descriptor_, size), 0);
    EXPECT_EQ(reserved ? fallocate(descriptor_, 0, 0, size) : 0, 0);
    EXPECT_EQ(fcntl(descriptor_, F_ADD_SEALS, seals), 0);
  }
  Memfd(const Memfd&) = delete;
  Memfd& operator=(const Memfd&) = delete;
  ~Memfd() { close(descriptor_); }
  [[nodiscard]] int get() const { return descriptor_; }

 private:
  int descriptor_;
};

TEST(AttachingMemory, IsRefusedForADescriptorThatIsNoMemfd) {
  const int null = open("/dev/null", O_RDWR | O_CLOEXEC);
  EXPECT_NE(refusal(null).find("is no memfd (Invalid argument)"), std::string::npos);
  close(null);
  EXPECT_NE(refusal(null).find("is no memfd (Bad file descriptor)"), std::string::npos);
  EXPECT_NE(refusal(-1).find("descriptor -1 is no memfd"), std::string::npos);
}

// Public failure 61: shared memory that can shrink ends in SIGBUS.
TEST(AttachingMemory, IsRefusedUnlessTheMemoryIsSealedAgainstShrinking) {
  const Memfd open_ended(slot_count * slot_bytes, F_SEAL_GROW);
  EXPECT_NE(refusal(open_ended.get()).find("F_SEAL_SHRINK"), std::string::npos);
  const Memfd sealed(slot_count * slot_bytes, F_SEAL_SHRINK);
  EXPECT_EQ(refusal(sealed.get()), "");
}

TEST(AttachingMemory, IsRefusedWhereNothingCanBeWritten) {
  const Memfd sealed(slot_count * slot_bytes, F_SEAL_SHRINK | F_SEAL_WRITE);
  EXPECT_NE(refusal(sealed.get()).find("sealed against writing"), std::string::npos);
}

TEST(AttachingMemory, IsRefusedForAnotherSizeAndNamesBoth) {
  const Memfd sealed(slot_count * slot_bytes, F_SEAL_SHRINK);
  for (const std::size_t slots : {slot_count - 1, slot_count + 1}) {
    const std::string why = refusal(sealed.get(), options_of(slots * slot_bytes));
    EXPECT_NE(why.find(" 32768 bytes"), std::string::npos) << why;
    EXPECT_NE(why.find(std::to_string(slots * slot_bytes)), std::string::npos) << why;
  }
  EXPECT_EQ(refusal(sealed.get(), options_of(slot_count * slot_bytes + 4095)), "");
}

// Public failure 61: shared memory was sized without being reserved, and a copy ended in SIGBUS.
TEST(AttachingMemory, IsRefusedForMemoryThatWasSizedAndNotReserved) {
  const Memfd sparse(slot_count * slot_bytes, F_SEAL_SHRINK, false);
  EXPECT_NE(refusal(sparse.get()).find("has holes: 0 of its 32768 bytes"), std::string::npos);
}

TEST(AttachingMemory, IsRefusedForADeviceWithoutBytes) {
  const Memfd sealed(slot_count * slot_bytes, F_SEAL_SHRINK);
  const auto device = std::make_shared<test::FakeDevice>();
  device->change_info().has_bytes = false;
  PoolOptions options = options_of();
  options.region.attach = sealed.get();
  EXPECT_THROW(BlockPool(device, options), InvalidArgument);
}

TEST(AttachingMemory, LeavesTheDescriptorToTheCallerAlsoWhenItIsRefused) {
  const Memfd sealed(slot_count * slot_bytes, F_SEAL_SHRINK);
  EXPECT_EQ(refusal(sealed.get()), "");
  EXPECT_NE(refusal(sealed.get(), options_of(slot_bytes)), "");
  EXPECT_GE(fcntl(sealed.get(), F_GETFD), 0);
}

}  // namespace
}  // namespace kvmem
