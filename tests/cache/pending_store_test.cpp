// Stores that wait for room: whose turn it is, and who is told.
#include "cache/pending_store.hpp"

#include <algorithm>
#include <array>
#include <memory>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include "base/error.hpp"
#include "cache/cache_world.hpp"
#include "device/host_device.hpp"
#include "support/wait_for.hpp"

namespace kvmem::test {
namespace {

// One key of one device block, and the bytes that the store must find alive.
class Waiting {
 public:
  Waiting(CacheWorld& world, std::uint64_t number, std::uint64_t token = 0)
      : keys_{number}, pointers_(keys_.pointers()), token_(token), list_(list_of(token)) {
    const auto block = static_cast<BlockId>(number % 32);
    world.world().cache().fill(block, number);
    store_ = std::make_unique<PendingStore>(
        world.cache().shared_from_this(),
        Cache::Request{.keys = pointers_, .key_bytes = Keys::bytes, .owner = "waits"},
        Cache::Blocks{{block}});
  }
  bool accepted() { return store_->accepted(list_, token_); }
  // Whether it was told since the last time.
  bool told() {
    const auto tokens = list_->drain();
    return std::ranges::find(tokens, token_) != tokens.end();
  }
  std::shared_ptr<CacheTransfer> take() { return store_->take(); }
  void end() { store_.reset(); }

 private:
  static std::shared_ptr<WakeList> list_of(std::uint64_t token) {
    return token == 0 ? nullptr : std::make_shared<WakeList>();
  }

  Keys keys_;
  std::vector<const std::byte*> pointers_;
  std::uint64_t token_;
  std::shared_ptr<WakeList> list_;
  std::unique_ptr<PendingStore> store_;
};

// Two slots, and a hit holds both.
class PendingStores : public ::testing::Test {
 protected:
  PendingStores() {
    world_.store({1, 2});
    hit_ = world_.reserve({1, 2});
  }
  CacheWorld world_{{.slots = 2}};
  CacheHit hit_;
};

TEST_F(PendingStores, ComeInTheirOrder) {
  Waiting first(world_, 11), second(world_, 12);
  EXPECT_FALSE(first.accepted());
  EXPECT_FALSE(second.accepted());
  EXPECT_EQ(world_.cache().stats().waiters, 2U);
  hit_.release();
  EXPECT_FALSE(second.accepted()) << "it is not its turn";
  EXPECT_TRUE(first.accepted());
  EXPECT_TRUE(second.accepted());
  EXPECT_EQ(world_.cache().stats().waiters, 0U);
  first.take()->wait(10);
  second.take()->wait(10);
  EXPECT_EQ(world_.load_all({11}, 20), 1U);
  EXPECT_EQ(world_.load_all({12}, 20), 1U);
}

TEST_F(PendingStores, AreNotOvertaken) {
  Waiting first(world_, 11);
  EXPECT_FALSE(first.accepted());
  EXPECT_EQ(world_.try_store({1, 2})->state(), TransferState::done) << "it needs no room";
  hit_.release();
  EXPECT_EQ(world_.try_store({12}), nullptr);
  EXPECT_TRUE(first.accepted());
  EXPECT_NE(world_.try_store({12}), nullptr);
}

TEST_F(PendingStores, GiveUpTheirPlace) {
  Waiting first(world_, 11), second(world_, 12, 7);
  EXPECT_FALSE(first.accepted());
  EXPECT_FALSE(second.accepted());
  EXPECT_FALSE(second.told());
  first.end();
  EXPECT_TRUE(second.told()) << "it is its turn now";
  EXPECT_FALSE(second.accepted());
  hit_.release();
  EXPECT_TRUE(second.told());
  second.end();
  EXPECT_NE(world_.try_store({12}), nullptr);
}

TEST_F(PendingStores, AreToldWhatMayMakeRoom) {
  Waiting first(world_, 11, 7);
  EXPECT_FALSE(first.accepted());
  EXPECT_FALSE(first.told());
  EXPECT_EQ(hit_.keep(1), 1U);
  EXPECT_TRUE(first.told()) << "the hit holds less";
  EXPECT_TRUE(first.accepted());
  first.take()->wait(10);

  auto other = world_.reserve({11}, "b");
  Waiting again(world_, 12, 8);
  EXPECT_FALSE(again.accepted());
  EXPECT_EQ(world_.cache().drop_owner("b"), 1U);
  EXPECT_TRUE(again.told()) << "its reservations have ended";
  EXPECT_TRUE(again.accepted());
  auto stored = again.take();

  Waiting behind(world_, 13, 9);
  EXPECT_FALSE(behind.accepted()) << "one slot is held and one is being written";
  stored->wait(10);
  EXPECT_TRUE(behind.told()) << "a store has ended";
  EXPECT_TRUE(behind.accepted());
  behind.take()->wait(10);
}

TEST_F(PendingStores, AreToldOfAnEviction) {
  Waiting first(world_, 11, 7);
  EXPECT_FALSE(first.accepted());
  hit_.release();
  EXPECT_TRUE(first.told());
  hit_ = world_.reserve({1});
  auto second = world_.reserve({2});
  EXPECT_FALSE(first.accepted());
  const Keys keys{1};
  const auto pointers = keys.pointers();
  EXPECT_EQ(world_.cache().evict(pointers, Keys::bytes), 1U);
  EXPECT_TRUE(first.told());
  EXPECT_FALSE(first.accepted()) << "the hit holds the slot still";
  second.release();
  EXPECT_TRUE(first.accepted());
}

TEST_F(PendingStores, HearThatTheCacheIsClosed) {
  Waiting first(world_, 11, 7), second(world_, 12, 8);
  EXPECT_FALSE(first.accepted());
  EXPECT_FALSE(second.accepted());
  EXPECT_TRUE(world_.cache().close(10).quiet);
  EXPECT_TRUE(second.told());
  EXPECT_THROW(static_cast<void>(second.accepted()), Closed);
  EXPECT_TRUE(first.told());
  EXPECT_THROW(static_cast<void>(first.accepted()), Closed);
}

TEST_F(PendingStores, AskTheAdmissionFilterOnce) {
  hit_.release();
  CacheWorldOptions options{.slots = 1};
  options.cache.admit_after = 2;
  CacheWorld world(options);
  EXPECT_EQ(world.store({1})->job().covered, 0U);
  world.store({1});
  auto held = world.reserve({1});
  Waiting first(world, 11);
  EXPECT_TRUE(first.accepted()) << "not admitted, so it waits for nothing";
  Waiting second(world, 11);
  for (int i = 0; i < 3; ++i) EXPECT_FALSE(second.accepted());
  held.release();
  EXPECT_TRUE(second.accepted());
}

// Nobody but the reaper looks, and it sleeps soundly where nothing waits.
TEST(PendingStoresWithAReaper, AreToldThatAReservationHasExpired) {
  CacheWorldOptions options{.slots = 1, .config = {}};
  CacheWorld world(options, make_host_device({.workers = 1}));
  world.store({1});
  const Keys keys{1};
  const auto pointers = keys.pointers();
  const CacheHit hit = world.cache().reserve(pointers, Keys::bytes, "a", Pending::stop, 0.3);
  Waiting first(world, 11, 7);
  while (!first.accepted()) ASSERT_TRUE(comes_true([&] { return first.told(); }));
  first.take()->wait(10);
}

TEST(PendingStoresWithAReaper, BlockInTheirOrder) {
  CacheWorld world({.slots = 1, .config = {}}, make_host_device({.workers = 1}));
  world.store({1});
  CacheHit hit = world.reserve({1});
  std::array<std::shared_ptr<CacheTransfer>, 2> stored;
  std::vector<std::thread> threads;
  for (std::size_t i = 0; i < stored.size(); ++i) {
    world.world().cache().fill(static_cast<BlockId>(i), 11 + i);
    threads.emplace_back([&, i] {
      const Keys keys{11 + i};
      const auto pointers = keys.pointers();
      stored[i] = world.cache().store({.keys = pointers, .key_bytes = Keys::bytes, .owner = "a"},
                                      {{static_cast<BlockId>(i)}}, 30);
      stored[i]->wait(30);
    });
    EXPECT_TRUE(comes_true([&] { return world.cache().stats().waiters == i + 1; }));
  }
  hit.release();
  for (std::thread& thread : threads) thread.join();
  EXPECT_LT(stored[0]->job().id, stored[1]->job().id);
  EXPECT_EQ(world.load_all({12}, 20), 1U) << "it came last, into the one slot";
}

}  // namespace
}  // namespace kvmem::test
