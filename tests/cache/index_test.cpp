#include "cache/index.hpp"

#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <thread>

#include <gtest/gtest.h>

#include "cache/index_keys.hpp"

namespace kvmem::test {
namespace {

IndexOptions one_group(SlotIndex slots, std::size_t ranks = 1) {
  IndexOptions options;
  options.groups = {{"full", {NeedKind::all, 0}, slots}};
  options.ranks = ranks;
  return options;
}

// An index and what a caller does with it, in one word each.
class World {
 public:
  explicit World(IndexOptions options) : index(std::move(options)) {}

  std::optional<StorePlan> plan(const Keys& keys, const std::string& owner = "a") {
    auto made = index.try_plan_store(keys.pointers(), Keys::bytes, owner);
    index.check();
    return made;
  }
  void store(const Keys& keys) {
    const auto made = plan(keys);
    ASSERT_TRUE(made.has_value());
    index.finish(made->id, 0, true);
    index.check();
  }
  Reservation reserve(const Keys& keys, const std::string& owner = "a",
                      Pending pending = Pending::stop,
                      std::optional<double> expires = std::nullopt) {
    return index.reserve(keys.pointers(), Keys::bytes, owner, pending, expires);
  }
  std::size_t found(const Keys& keys) { return index.peek(keys.pointers(), Keys::bytes); }
  GroupStats group(std::size_t i = 0) { return index.stats().groups[i]; }

  Index index;
};

TEST(Index, FindsWhatEveryRankHasStored) {
  World world(one_group(8, 3));
  const auto plan = world.plan(Keys::chain(1, 4));
  ASSERT_TRUE(plan.has_value());
  EXPECT_EQ(plan->groups[0].positions, (std::vector<std::uint32_t>{0, 1, 2, 3}));
  EXPECT_EQ(world.found(Keys::chain(1, 4)), 0U);
  EXPECT_FALSE(world.index.finish(plan->id, 2, true));
  EXPECT_FALSE(world.index.finish(plan->id, 0, true));
  EXPECT_EQ(world.found(Keys::chain(1, 4)), 0U) << "published before the last rank";
  EXPECT_TRUE(world.index.finish(plan->id, 1, true));
  EXPECT_EQ(world.found(Keys::chain(1, 6)), 4U);
}

TEST(Index, AStoreThatFailsOnOneRankIsAMissAndItsSlotsComeBackWithTheLastRank) {
  World world(one_group(4, 2));
  const auto plan = world.plan(Keys::chain(1, 4));
  world.index.finish(plan->id, 0, false);
  EXPECT_EQ(world.group().free, 0U) << "rank 1 may still write into the slots";
  EXPECT_FALSE(world.plan(Keys::chain(10, 1)).has_value());
  world.index.finish(plan->id, 1, true);
  EXPECT_EQ(world.group().free, 4U);
  EXPECT_EQ(world.found(Keys::chain(1, 4)), 0U);
  EXPECT_EQ(world.index.stats().blocks_store_failed, 4U);
}

// Public failure 37: a second put of a key spoiled the data of the first.
// Public failure 118: a key that was stored twice was charged twice.
TEST(Index, TheFirstWriterWinsAndTheSecondAttaches) {
  World world(one_group(8));
  const auto first = world.plan(Keys::chain(1, 4), "a");
  const auto second = world.plan(Keys::chain(1, 6), "b");
  EXPECT_EQ(second->attached, 4U);
  EXPECT_EQ(second->groups[0].positions, (std::vector<std::uint32_t>{4, 5}));
  EXPECT_EQ(world.group().free, 2U);
  world.index.finish(second->id, 0, true);
  EXPECT_EQ(world.found(Keys::chain(1, 6)), 0U);
  world.index.finish(first->id, 0, true);
  EXPECT_EQ(world.found(Keys::chain(1, 6)), 6U);
  const auto third = world.plan(Keys::chain(1, 6), "c");
  EXPECT_EQ(third->id, 0U) << "there is nothing to do";
  EXPECT_EQ(third->present, 6U);
  EXPECT_TRUE(world.index.finish(third->id, 0, true));
}

// Public failure 178: a lookup promised what was evicted before the load.
TEST(Index, WhatIsReservedIsNotEvictedUntilItIsLetGo) {
  World world(one_group(4));
  world.store(Keys::chain(1, 4));
  const Reservation hit = world.reserve(Keys::chain(1, 3));
  EXPECT_EQ(hit.length, 3U);
  world.index.release(world.reserve(Keys::chain(4, 1)).id);  // now key 3 would be the first to go
  EXPECT_EQ(world.plan(Keys::chain(10, 4))->covered, 1U) << "only key 4 may go";
  EXPECT_EQ(world.found(Keys::chain(1, 3)), 3U);
  const auto load = world.index.begin(hit.id);
  EXPECT_FALSE(world.plan(Keys::chain(20, 1)).has_value());
  EXPECT_THROW(world.index.release(hit.id), InvalidArgument) << "copies may run";
  world.index.finish(hit.id, 0, true);
  EXPECT_EQ(world.plan(Keys::chain(20, 4))->covered, 3U);
  EXPECT_EQ(world.index.stats().blocks_loaded, 3U);
}

// Public failure 45: the victims were keys of the very request that was being stored.
TEST(Index, NeverEvictsWhatTheCallItselfIsAbout) {
  World world(one_group(4));
  world.store(Keys::chain(3, 4));
  const auto plan = world.plan(Keys::chain(1, 6));  // 1 and 2 are new, 3 to 6 are all there is
  EXPECT_FALSE(plan.has_value());
  EXPECT_EQ(world.found(Keys::chain(3, 4)), 4U);
}

// Public failure 46: nothing could be evicted, and the call tried for ever.
TEST(Index, WhenEverythingIsHeldTheErrorSaysByWhom) {
  World world(one_group(4));
  world.store(Keys::chain(1, 3));
  static_cast<void>(world.reserve(Keys::chain(1, 3), "request 7"));
  static_cast<void>(world.plan(Keys::chain(10, 1), "request 9"));
  EXPECT_FALSE(world.plan(Keys::chain(20, 2)).has_value());
  const PoolExhausted error = world.index.exhausted(2);
  const std::string what = error.what();
  EXPECT_NE(what.find("'request 7': 3, 'request 9': 1"), std::string::npos) << what;
  EXPECT_EQ(error.shortage.wanted, 2U);
  EXPECT_EQ(error.shortage.free, 0U);
  EXPECT_EQ(error.shortage.held, 4U);
}

// Public failure 22: what a lookup had pinned was never released when no load followed.
TEST(Index, AReservationThatWasNotBegunExpires) {
  Nanoseconds now = 0;
  auto options = one_group(2);
  options.clock = [&] { return now; };
  World world(options);
  world.store(Keys::chain(1, 2));
  const Reservation hit = world.reserve(Keys::chain(1, 2), "a", Pending::stop, 1.5);
  const Reservation begun = world.reserve(Keys::chain(1, 1), "a", Pending::stop, 1.5);
  static_cast<void>(world.index.begin(begun.id));
  now = 1'400'000'000;
  EXPECT_FALSE(world.plan(Keys::chain(10, 1)).has_value());
  now = 1'500'000'000;
  EXPECT_TRUE(world.plan(Keys::chain(10, 1)).has_value()) << "key 2 is free to go";
  EXPECT_THROW(static_cast<void>(world.index.begin(hit.id)), InvalidArgument);
  EXPECT_FALSE(world.plan(Keys::chain(20, 1)).has_value()) << "begun, so copies may run";
  EXPECT_EQ(world.index.stats().expired, 1U);
}

TEST(Index, AnOwnerThatIsDroppedLosesItsOwnReservationsAndNobodyElses) {
  World world(one_group(4));
  world.store(Keys::chain(1, 4));
  const Reservation mine = world.reserve(Keys::chain(1, 2), "a");
  const Reservation yours = world.reserve(Keys::chain(1, 4), "b");
  const Reservation begun = world.reserve(Keys::chain(1, 1), "a");
  static_cast<void>(world.index.begin(begun.id));
  EXPECT_EQ(world.index.drop_owner("a"), 1U);
  EXPECT_THROW(world.index.release(mine.id), InvalidArgument);
  EXPECT_FALSE(world.plan(Keys::chain(10, 1)).has_value());
  world.index.release(yours.id);
  EXPECT_EQ(world.plan(Keys::chain(10, 4))->covered, 3U) << "what was begun stays";
}

TEST(Index, TheHeadOfAChainOutlivesItsTail) {
  World world(one_group(6));
  world.store(Keys::chain(1, 6));
  world.store(Keys::chain(10, 2));
  EXPECT_EQ(world.found(Keys::chain(1, 6)), 4U);
  world.index.release(world.reserve(Keys::chain(1, 4)).id);
  world.store(Keys::chain(20, 4));
  EXPECT_EQ(world.found(Keys::chain(1, 6)), 2U);
}

TEST(Index, AHitStopsBeforeAKeyInFlightAndSaysSo) {
  World world(one_group(8));
  world.store(Keys::chain(1, 2));
  const auto plan = world.plan(Keys::chain(1, 4));
  const Reservation stopped = world.reserve(Keys::chain(1, 6));
  EXPECT_EQ(stopped.length, 2U);
  EXPECT_TRUE(stopped.pending);
  const Reservation attached = world.reserve(Keys::chain(1, 6), "b", Pending::attach);
  EXPECT_EQ(attached.length, 4U);
  EXPECT_FALSE(world.index.begin(attached.id).has_value()) << "read before it was complete";
  world.index.finish(plan->id, 0, true);
  EXPECT_EQ(world.index.begin(attached.id)->groups[0].slots.size(), 4U);
}

// Public failure 105: a load failed, and counted as a full hit.
TEST(Index, WhoAttachedToAStoreThatFailsGetsWhatIsThere) {
  World world(one_group(8));
  world.store(Keys::chain(1, 2));
  const auto plan = world.plan(Keys::chain(1, 4));
  const Reservation attached = world.reserve(Keys::chain(1, 4), "b", Pending::attach);
  world.index.finish(plan->id, 0, false);
  EXPECT_EQ(world.group().leaving, 2U) << "the reservation still holds them";
  const auto load = world.index.begin(attached.id);
  EXPECT_EQ(load->length, 2U);
  EXPECT_EQ(load->groups[0].slots.size(), 2U);
  EXPECT_EQ(world.group().leaving, 0U);
  world.index.finish(attached.id, 0, false);
  EXPECT_EQ(world.index.stats().blocks_loaded, 0U);
  EXPECT_EQ(world.index.stats().blocks_load_failed, 2U);
}

IndexOptions three_groups() {
  IndexOptions options;
  options.groups = {{"full", {NeedKind::all, 0}, 16},
                    {"window", {NeedKind::last, 2}, 16},
                    {"state", {NeedKind::state, 0}, 16}};
  return options;
}

TEST(Index, AHitNeedsOfEachGroupWhatItSays) {
  World world(three_groups());
  // State after keys 3 and 6, as an engine leaves it at the ends of its steps.
  for (const std::size_t end : {3U, 6U}) world.store(Keys::chain(1, end));
  EXPECT_EQ(world.found(Keys::chain(1, 8)), 6U);
  EXPECT_EQ(world.found(Keys::chain(1, 5)), 3U) << "there is no state after keys 4 and 5";
  const Reservation hit = world.reserve(Keys::chain(1, 8));
  const auto load = world.index.begin(hit.id);
  EXPECT_EQ(load->groups[0].positions.size(), 6U);
  EXPECT_EQ(load->groups[1].positions, (std::vector<std::uint32_t>{4, 5}));
  EXPECT_EQ(load->groups[2].positions, (std::vector<std::uint32_t>{5}));
}

TEST(Index, KeepingLessOfAHitHoldsWhatTheShorterOneNeeds) {
  World world(three_groups());
  for (const std::size_t end : {3U, 6U}) world.store(Keys::chain(1, end));
  const Reservation hit = world.reserve(Keys::chain(1, 6));
  EXPECT_EQ(world.index.keep(hit.id, 5), 3U) << "the longest one with its state";
  const auto load = world.index.begin(hit.id);
  EXPECT_EQ(load->groups[1].positions, (std::vector<std::uint32_t>{1, 2}));
  EXPECT_EQ(load->groups[2].positions, (std::vector<std::uint32_t>{2}));
  const Reservation none = world.reserve(Keys::chain(1, 6));
  EXPECT_EQ(world.index.keep(none.id, 2), 0U);
  EXPECT_THROW(world.index.release(none.id), InvalidArgument) << "nothing is left of it";
}

TEST(Index, RangesSayWhichKeysAGroupHasBlocksFor) {
  World world(three_groups());
  const Keys keys = Keys::chain(1, 6);
  const std::vector<KeyRange> ranges{{0, 6}, {4, 6}, {6, 6}};
  const auto plan = world.index.try_plan_store(keys.pointers(), Keys::bytes, "a", ranges);
  EXPECT_EQ(plan->groups[1].positions, (std::vector<std::uint32_t>{4, 5}));
  EXPECT_TRUE(plan->groups[2].positions.empty());
  const std::vector<KeyRange> beyond{{0, 7}, {4, 6}, {6, 6}};
  EXPECT_THROW(
      static_cast<void>(world.index.try_plan_store(keys.pointers(), Keys::bytes, "a", beyond)),
      InvalidArgument);
}

TEST(Index, StoresTheLeadingPartThatFindsRoom) {
  World world(one_group(4));
  const auto plan = world.plan(Keys::chain(1, 6));
  EXPECT_EQ(plan->covered, 4U);
  EXPECT_EQ(plan->groups[0].slots.size(), 4U);
}

TEST(Index, AKeyThatStandsTwiceIsOneBlock) {
  World world(one_group(4));
  const Keys twice({1, 2, 1});
  const auto plan = world.plan(twice);
  EXPECT_EQ(plan->covered, 3U);
  EXPECT_EQ(plan->groups[0].slots.size(), 2U);
  world.index.finish(plan->id, 0, true);
  const Reservation hit = world.reserve(twice);
  EXPECT_EQ(hit.length, 3U);
  world.index.release(hit.id);
  world.index.check();
}

// Public failure 113: a request tried the same unloadable block for ever.
TEST(Index, WhatIsRemovedIsAMissAtOnceAndStaysGoodForWhoHoldsIt) {
  World world(one_group(4));
  world.store(Keys::chain(1, 2));
  const Reservation hit = world.reserve(Keys::chain(1, 2));
  EXPECT_EQ(world.index.remove(Keys::chain(2, 5).pointers(), Keys::bytes), 1U);
  EXPECT_EQ(world.found(Keys::chain(1, 2)), 1U);
  EXPECT_EQ(world.group().leaving, 1U);
  const auto again = world.plan(Keys::chain(1, 2));
  EXPECT_EQ(again->groups[0].positions, (std::vector<std::uint32_t>{1})) << "in another slot";
  EXPECT_EQ(world.index.begin(hit.id)->length, 2U);
  world.index.finish(hit.id, 0, true);
  world.index.check();
  EXPECT_EQ(world.group().leaving, 0U);
}

TEST(Index, WhatIsRemovedWhileItIsInFlightIsNotPublished) {
  World world(one_group(4));
  const auto plan = world.plan(Keys::chain(1, 2));
  EXPECT_EQ(world.index.clear(), 2U);
  world.index.finish(plan->id, 0, true);
  EXPECT_EQ(world.found(Keys::chain(1, 2)), 0U);
  EXPECT_EQ(world.group().free, 4U);
}

TEST(Index, APlanThatHasEndedIsRefusedByNumber) {
  World world(one_group(4, 2));
  const auto plan = world.plan(Keys::chain(1, 1));
  world.index.finish(plan->id, 0, true);
  EXPECT_THROW(world.index.finish(plan->id, 0, true), InvalidArgument) << "twice";
  EXPECT_THROW(world.index.finish(plan->id, 2, true), InvalidArgument) << "no such rank";
  world.index.finish(plan->id, 1, true);
  const auto next = world.plan(Keys::chain(2, 1));  // in the place of the first
  EXPECT_NE(next->id, plan->id);
  EXPECT_THROW(world.index.finish(plan->id, 1, true), InvalidArgument) << "a stale generation";
  EXPECT_THROW(static_cast<void>(world.index.begin(next->id)), InvalidArgument) << "a store";
  EXPECT_THROW(world.index.finish(12345, 0, true), InvalidArgument);
}

TEST(Index, TrimEvictsAheadOfNeedBetweenTheWatermarks) {
  auto options = one_group(10);
  options.low_free = 0.2;
  options.high_free = 0.4;
  World world(options);
  world.store(Keys::chain(1, 8));
  EXPECT_FALSE(world.index.wants_trim());
  EXPECT_EQ(world.index.trim(100), 0U);
  world.store(Keys::chain(10, 1));
  EXPECT_TRUE(world.index.wants_trim());
  EXPECT_EQ(world.index.trim(2), 2U);
  EXPECT_EQ(world.group().free, 3U);
  EXPECT_EQ(world.index.trim(100), 0U) << "no longer below the lower one";
}

TEST(Index, TellsWhatBecameReadableAndWhatWent) {
  auto options = one_group(2);
  options.max_events = 4;
  World world(options);
  world.store(Keys::chain(1, 2));
  world.store(Keys::chain(3, 1));
  auto taken = world.index.take_events();
  ASSERT_EQ(taken.events.size(), 4U);
  EXPECT_EQ(std::ranges::count(taken.events, IndexEvent::Kind::stored, &IndexEvent::kind), 3);
  const IndexEvent& removed =
      *std::ranges::find(taken.events, IndexEvent::Kind::removed, &IndexEvent::kind);
  EXPECT_TRUE(
      std::equal(removed.key.begin(), removed.key.begin() + Keys::bytes, Keys({2}).pointers()[0]));
  for (int i = 10; i < 16; ++i) world.store(Keys::chain(static_cast<std::uint64_t>(i), 1));
  taken = world.index.take_events();
  EXPECT_GT(taken.lost, 0U);
  EXPECT_EQ(taken.lost + taken.events.size(), 12U);
}

TEST(Index, RefusesWhatCannotBeByName) {
  EXPECT_THROW(Index(IndexOptions{}), InvalidArgument);
  EXPECT_THROW(Index(one_group(0)), InvalidArgument);
  EXPECT_THROW(Index(one_group(4, 0)), InvalidArgument);
  auto twice = one_group(4);
  twice.groups.push_back(twice.groups[0]);
  EXPECT_THROW(Index{twice}, InvalidArgument);
  auto short_keys = one_group(4);
  short_keys.key_bytes = 15;
  EXPECT_THROW(Index{short_keys}, InvalidArgument);
  auto descending = one_group(4);
  descending.low_free = 0.5;
  EXPECT_THROW(Index{descending}, InvalidArgument);

  World world(one_group(4));
  EXPECT_EQ(world.plan(Keys{})->id, 0U);
  EXPECT_EQ(world.reserve(Keys{}).length, 0U);
  world.store(Keys::chain(1, 1));
  EXPECT_THROW(static_cast<void>(world.index.reserve(Keys::chain(1, 1).pointers(), 32, "a")),
               InvalidArgument)
      << "keys of another length";
}

TEST(Index, PlansHaveABoundToo) {
  auto options = one_group(8);
  options.max_plans = 2;
  World world(options);
  static_cast<void>(world.plan(Keys::chain(1, 1)));
  const auto second = world.plan(Keys::chain(2, 1));
  EXPECT_FALSE(world.plan(Keys::chain(3, 1)).has_value());
  world.index.finish(second->id, 0, true);
  static_cast<void>(world.reserve(Keys::chain(2, 1)));
  EXPECT_THROW(static_cast<void>(world.reserve(Keys::chain(2, 1))), PoolExhausted);
}

TEST(Index, TakesAtMost128BytesAnEntry) {
  for (const PolicyKind policy : policy_kinds) {
    auto options = one_group(1'000'000);
    options.key_bytes = 32;
    options.policy = policy;
    EXPECT_LE(Index(options).stats().bytes, 128'000'000U) << name_of(policy);
  }
}

TEST(IndexThreads, LoseNothingAndMixNothingUp) {
  World world(one_group(64));
  const auto work = [&](std::uint64_t seed) {
    for (std::uint64_t i = 0; i < 2000; ++i) {
      const Keys keys = Keys::chain((seed * 7 + i * 13) % 100, 1 + i % 8);
      if (const auto plan = world.index.try_plan_store(keys.pointers(), Keys::bytes, "a"))
        world.index.finish(plan->id, 0, i % 5 != 0);
      const Reservation hit = world.reserve(keys, "b");
      if (hit.id == 0) continue;
      if (i % 2 == 0) {
        world.index.release(hit.id);
      } else if (world.index.begin(hit.id)) {
        world.index.finish(hit.id, 0, true);
      }
    }
  };
  std::vector<std::thread> threads;
  for (std::uint64_t seed = 0; seed < 3; ++seed) threads.emplace_back(work, seed);
  for (auto& thread : threads) thread.join();
  world.index.check();
  EXPECT_EQ(world.index.stats().plans, 0U);
  EXPECT_EQ(world.group().evictable, world.group().ready);
}

TEST(Index, TrimmingEndsAtTheMarkThatIsNoWholeSlot) {
  IndexOptions options = one_group(10);
  options.low_free = options.high_free = 0.25;
  World world(options);
  world.store(Keys::chain(1, 8));
  EXPECT_TRUE(world.index.wants_trim());
  EXPECT_EQ(world.index.trim(100), 1);
  EXPECT_FALSE(world.index.wants_trim());
}

TEST(Index, WhatFindsNoPlaceForItsPlanIsNotCountedAsReserved) {
  IndexOptions options = one_group(8);
  options.max_plans = 1;
  World world(options);
  world.store(Keys::chain(1, 4));
  const Reservation held = world.reserve(Keys::chain(1, 4));
  EXPECT_THROW(static_cast<void>(world.reserve(Keys::chain(1, 4))), PoolExhausted);
  EXPECT_EQ(world.index.stats().keys_reserved, 4);
  EXPECT_FALSE(world.plan(Keys::chain(9, 1)).has_value());
  EXPECT_STREQ(world.index.exhausted(1).shortage.bound.c_str(), "plans");
  world.index.release(held.id);
}

// Another thread of the parent may have the lock for ever.
TEST(Index, AForkedChildIsToldThoughTheLockIsHeld) {
  std::atomic<bool> inside{false}, leave{false};
  IndexOptions options = one_group(4);
  options.clock = [&]() -> Nanoseconds {  // asked under the lock
    inside = true;
    inside.notify_all();
    leave.wait(false);
    return 0;
  };
  World world(options);
  leave = true;
  world.store({1});
  const Reservation held = world.reserve({1}, "a", Pending::stop, 1.0);
  inside = leave = false;
  std::thread user([&] { static_cast<void>(world.reserve({1})); });
  inside.wait(false);
  const pid_t child = fork();
  if (child == 0) {
    alarm(20);
    int told = 0;
    const auto ask = [&](const auto& call) {
      try {
        call();
      } catch (const Forked&) {
        ++told;
      }
    };
    ask([&] { static_cast<void>(world.index.key_bytes()); });
    ask([&] { static_cast<void>(world.index.stats()); });
    ask([&] { static_cast<void>(world.index.wants_trim()); });
    ask([&] { static_cast<void>(world.index.holdings()); });
    ask([&] { static_cast<void>(world.index.take_events()); });
    ask([&] { world.index.release(held.id); });
    ask([&] { static_cast<void>(world.found({1})); });
    std::_Exit(told);
  }
  leave = true;
  leave.notify_all();
  user.join();
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), 7);
}

}  // namespace
}  // namespace kvmem::test
