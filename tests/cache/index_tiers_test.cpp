// A group that backs another one: what is found through it, copied into it and back, adopted, and
// no longer used.
#include <set>

#include <gtest/gtest.h>

#include "cache/index.hpp"
#include "cache/index_keys.hpp"

namespace kvmem {
namespace {

using test::Keys;

constexpr GroupIndex host = 0, disk = 1;

struct IndexTiers : testing::Test {
  Index index{options(4, 6)};

  static IndexOptions options(SlotIndex host_slots, SlotIndex disk_slots) {
    IndexOptions made;
    made.groups = {{"host", {}, host_slots}, {"disk", {}, disk_slots, host}};
    made.key_bytes = Keys::bytes;
    return made;
  }
  void store(const Keys& keys) {
    const auto plan = index.try_plan_store(keys.pointers(), Keys::bytes, "a");
    ASSERT_TRUE(plan.has_value());
    index.finish(plan->id, 0, true);
  }
  CopyPlan copy(const Keys& keys, GroupIndex from, GroupIndex to) {
    return index.plan_copy(keys.pointers(), Keys::bytes, from, to, "writer");
  }
  void spill(const Keys& keys) { index.finish(copy(keys, host, disk).id, 0, true); }
  EntryState state(std::uint64_t number, GroupIndex group) {
    const Keys keys{number};
    return index.state(keys.pointers()[0], Keys::bytes, group);
  }
  std::size_t remove(const Keys& keys, std::optional<GroupIndex> group) {
    return index.remove(keys.pointers(), Keys::bytes, group);
  }
  std::size_t peek(const Keys& keys, Pending pending = Pending::stop) {
    return index.peek(keys.pointers(), Keys::bytes, pending);
  }
  Reservation reserve(const Keys& keys, Pending pending = Pending::stop) {
    return index.reserve(keys.pointers(), Keys::bytes, "b", pending);
  }
  GroupStats stats(GroupIndex group) { return index.stats().groups[group]; }
  void TearDown() override { index.check(); }
};

TEST_F(IndexTiers, AStorePlansNothingForTheGroupThatBacks) {
  const auto plan = index.try_plan_store(Keys{0, 1}.pointers(), Keys::bytes, "a");
  EXPECT_EQ(plan->groups[host].slots.size(), 2);
  EXPECT_TRUE(plan->groups[disk].slots.empty());
  index.finish(plan->id, 0, true);
}

TEST_F(IndexTiers, APrefixMayBePartlyHereAndPartlyThere) {
  store({0, 1, 2});
  spill({1, 2});
  EXPECT_EQ(remove({1}, host), 1);
  EXPECT_EQ(state(1, disk), EntryState::ready);
  const Reservation got = reserve({0, 1, 2, 3});
  EXPECT_EQ(got.length, 3);
  EXPECT_EQ(index.blocks(got.id), (std::vector<std::size_t>{2, 1})) << "the faster one first";
  const auto load = index.begin(got.id);
  EXPECT_EQ(load->groups[host].positions, (std::vector<std::uint32_t>{0, 2}));
  EXPECT_EQ(load->groups[disk].positions, std::vector<std::uint32_t>{1});
  index.finish(got.id, 0, true);
  EXPECT_EQ(remove({0, 1, 2}, std::nullopt), 4) << "on every tier";
  EXPECT_EQ(peek({0}), 0);
}

TEST_F(IndexTiers, ACopyIsFoundWhenItIsFinishedAndNotIfItFailed) {
  store({0, 1, 2});
  const CopyPlan plan = copy({0, 5, 2}, host, disk);
  EXPECT_EQ(plan.positions, (std::vector<std::uint32_t>{0, 2}));
  EXPECT_EQ(plan.source.size(), 2);
  EXPECT_EQ(plan.target.size(), 2);
  EXPECT_EQ(state(0, disk), EntryState::writing);
  EXPECT_EQ(copy({0}, host, disk).id, 0) << "it is on its way";
  index.finish(plan.id, 0, false);
  EXPECT_EQ(state(0, disk), EntryState::free);
  EXPECT_EQ(state(0, host), EntryState::ready) << "the source is what it was";
  spill({0, 2});
  EXPECT_EQ(state(2, disk), EntryState::ready);
  EXPECT_EQ(copy({0}, host, disk).id, 0) << "it is there";
}

TEST_F(IndexTiers, ASourceIsHeldWhileItIsCopied) {
  store({0, 1, 2, 3});
  const CopyPlan plan = copy({0}, host, disk);
  const auto more = index.try_plan_store(Keys{7, 8, 9, 10}.pointers(), Keys::bytes, "a");
  EXPECT_EQ(more->covered, 3);
  EXPECT_EQ(state(0, host), EntryState::ready);
  EXPECT_EQ(state(1, host), EntryState::free);
  index.finish(plan.id, 0, true);
  index.finish(more->id, 0, true);
}

TEST_F(IndexTiers, WhatIsRemovedWhileItIsCopiedIsNotFoundLater) {
  store({0});
  const CopyPlan plan = copy({0}, host, disk);
  EXPECT_EQ(remove({0}, std::nullopt), 2);
  store({0});  // anew, while the old one is still held
  index.finish(plan.id, 0, true);
  EXPECT_EQ(state(0, disk), EntryState::free);
  EXPECT_EQ(state(0, host), EntryState::ready);
}

TEST_F(IndexTiers, BackFromTheSlowerTierTheSourceSaysWhichEntryItIs) {
  store({0});
  spill({0});
  remove({0}, host);
  const Reservation old = reserve({0});
  const SlotIndex read = index.begin(old.id)->groups[disk].slots[0];
  remove({0}, std::nullopt);
  EXPECT_EQ(copy({0}, disk, host).id, 0) << "it is gone";
  store({0});
  spill({0});
  remove({0}, host);
  const CopyPlan back = copy({0}, disk, host);
  ASSERT_NE(back.id, 0);
  EXPECT_NE(back.source[0], read) << "the slot that is still read is nobody else's";
  index.finish(back.id, 0, true);
  index.finish(old.id, 0, true);
  EXPECT_EQ(state(0, host), EntryState::ready);
}

TEST_F(IndexTiers, CopiesGoBetweenGroupsThatBackOneAnotherAlone) {
  EXPECT_THROW(copy({0}, host, host), InvalidArgument);
  EXPECT_THROW(copy({0}, host, 2), InvalidArgument);
  IndexOptions wrong = options(4, 4);
  wrong.groups[0].backs = 1;
  EXPECT_THROW(Index{wrong}, InvalidArgument);
  wrong = options(4, 4);
  wrong.groups.push_back({"tape", {}, 4, host});
  EXPECT_THROW(Index{wrong}, InvalidArgument);
}

// So one whose write has just failed is tried last.
TEST_F(IndexTiers, SlotsAreUsedInTurn) {
  store({0, 1, 2, 3});
  const CopyPlan first = copy({0}, host, disk);
  index.finish(first.id, 0, true);
  remove({0}, disk);
  std::set<SlotIndex> used{first.target[0]};
  for (int i = 0; i < 5; ++i) {
    const CopyPlan next = copy({1}, host, disk);
    EXPECT_TRUE(used.insert(next.target[0]).second) << "it was free for the shortest time";
    index.finish(next.id, 0, false);
  }
  EXPECT_EQ(copy({1}, host, disk).target, first.target);
}

TEST_F(IndexTiers, AttachingCountsWhatIsInFlightOnAnyTier) {
  store({0});
  const CopyPlan plan = copy({0}, host, disk);
  remove({0}, host);
  EXPECT_EQ(peek({0}), 0);
  EXPECT_EQ(peek({0}, Pending::attach), 1);
  const Reservation got = reserve({0}, Pending::attach);
  EXPECT_TRUE(got.pending);
  EXPECT_FALSE(index.begin(got.id).has_value());
  index.finish(plan.id, 0, true);
  const auto load = index.begin(got.id);
  ASSERT_TRUE(load.has_value());
  EXPECT_EQ(load->groups[disk].slots, plan.target);
  index.finish(got.id, 0, true);
}

TEST_F(IndexTiers, WhatTheTierHadIsAdoptedInItsSlotsAndTheOldestGoesFirst) {
  const SlotIndex slots[] = {5, 0, 3};
  index.adopt(Keys{10, 11, 12}.pointers(), Keys::bytes, disk, slots);
  EXPECT_EQ(stats(disk).ready, 3);
  EXPECT_EQ(stats(disk).free, 3);
  const Reservation got = reserve({12});
  EXPECT_EQ(index.begin(got.id)->groups[disk].slots, std::vector<SlotIndex>{3});
  index.finish(got.id, 0, true);
  store({0, 1, 2, 3});
  spill({0, 1, 2, 3});
  EXPECT_EQ(state(10, disk), EntryState::free);
  EXPECT_EQ(state(11, disk), EntryState::ready);
  EXPECT_THROW(index.adopt(Keys{20}.pointers(), Keys::bytes, disk, {slots, 1}), InvalidArgument);
}

TEST_F(IndexTiers, OnlyTheFirstOfTwoEqualKeysIsAdopted) {
  const SlotIndex slots[] = {1, 2};
  index.adopt(Keys{10, 10}.pointers(), Keys::bytes, disk, slots);
  EXPECT_EQ(stats(disk).ready, 1);
  EXPECT_EQ(stats(disk).free, 5);
  const Reservation got = reserve({10});
  EXPECT_EQ(index.begin(got.id)->groups[disk].slots, std::vector<SlotIndex>{1});
  index.finish(got.id, 0, true);
}

TEST_F(IndexTiers, NothingIsAdoptedWhereASlotIsWrong) {
  const SlotIndex twice[] = {1, 1}, beyond[] = {1, 6};
  const auto adopt = [&](std::span<const SlotIndex> slots) {
    index.adopt(Keys{10, 11}.pointers(), Keys::bytes, disk, slots);
  };
  EXPECT_THROW(adopt(twice), InvalidArgument);
  EXPECT_THROW(adopt(beyond), InvalidArgument);
  EXPECT_THROW(adopt({twice, 1}), InvalidArgument);
  EXPECT_EQ(stats(disk).ready, 0);
  EXPECT_EQ(stats(disk).free, 6);
}

TEST_F(IndexTiers, ARetiredSlotIsNeverUsedAgain) {
  store({0, 1, 2, 3});
  spill({0});
  const Reservation got = reserve({0});
  const CopyPlan being_written = copy({1}, host, disk);
  index.retire(disk, being_written.target[0]);
  index.retire(disk, 5);  // free
  index.retire(disk, 5);  // again
  EXPECT_EQ(state(1, disk), EntryState::free) << "its bytes will not be trusted";
  index.finish(being_written.id, 0, true);
  EXPECT_EQ(stats(disk).retired, 2);
  EXPECT_EQ(stats(disk).free, 3);
  std::set<SlotIndex> used;
  for (int i = 0; i < 9; ++i) {
    const CopyPlan next = copy({2}, host, disk);
    used.insert(next.target[0]);
    index.finish(next.id, 0, false);
  }
  EXPECT_EQ(used.size(), 3);
  EXPECT_FALSE(used.contains(5));
  EXPECT_FALSE(used.contains(being_written.target[0]));
  index.release(got.id);
}

TEST_F(IndexTiers, ARetiredSlotThatIsHeldGoesWithItsLastHolder) {
  store({0});
  spill({0});
  remove({0}, host);
  const Reservation got = reserve({0});
  const SlotIndex slot = index.begin(got.id)->groups[disk].slots[0];
  index.retire(disk, slot);
  EXPECT_EQ(peek({0}), 0);
  EXPECT_EQ(stats(disk).retired, 0);
  EXPECT_EQ(stats(disk).leaving, 1);
  index.finish(got.id, 0, true);
  EXPECT_EQ(stats(disk).retired, 1);
  EXPECT_EQ(stats(disk).leaving, 0);
  EXPECT_THROW(index.retire(disk, 6), InvalidArgument);
  EXPECT_THROW(index.retire(2, 0), InvalidArgument);
}

TEST_F(IndexTiers, WhereEverySlotIsRetiredNothingIsPlanned) {
  for (SlotIndex slot = 0; slot < 6; ++slot) index.retire(disk, slot);
  store({0});
  EXPECT_EQ(copy({0}, host, disk).id, 0);
  EXPECT_EQ(stats(disk).free, 0);
}

TEST_F(IndexTiers, ACopyEvictsNothingOfItsOwnBatch) {
  Index small(options(4, 2));
  const auto fill = [&](const Keys& keys) {
    const auto plan = small.try_plan_store(keys.pointers(), Keys::bytes, "a");
    small.finish(plan->id, 0, true);
  };
  fill({1, 2});
  const Keys two{1, 2}, three{0, 1, 2};
  small.finish(small.plan_copy(two.pointers(), Keys::bytes, host, disk, "w").id, 0, true);
  fill({0});
  EXPECT_EQ(small.plan_copy(three.pointers(), Keys::bytes, host, disk, "w").id, 0);
  EXPECT_EQ(small.state(two.pointers()[0], Keys::bytes, disk), EntryState::ready);
  EXPECT_EQ(small.state(two.pointers()[1], Keys::bytes, disk), EntryState::ready);
  small.check();
}

TEST_F(IndexTiers, ARetiredSlotIsNotAdopted) {
  index.retire(disk, 2);
  const Keys keys{1};
  const std::vector<SlotIndex> slot{2};
  EXPECT_THROW(index.adopt(keys.pointers(), Keys::bytes, disk, slot), InvalidArgument);
}

// A hit that attached to a store which failed may be served by another tier by then; what failed
// has left the policy.
TEST(IndexTiersOfWindows, WhatFailedIsNotUsedAgain) {
  for (const PolicyKind policy : policy_kinds) {
    IndexOptions made;
    made.groups = {{"full", {}, 3},
                   {"window", {NeedKind::last, 1}, 3},
                   {"full on disk", {}, 3, GroupIndex{0}},
                   {"window on disk", {}, 3, GroupIndex{1}}};
    made.key_bytes = Keys::bytes;
    made.policy = policy;
    Index index(made);
    const auto store = [&](const Keys& keys) {
      const auto plan = index.try_plan_store(keys.pointers(), Keys::bytes, "a");
      index.finish(plan->id, 0, true);
      return plan->groups[0].slots.at(0);
    };
    const Keys key{0};
    const auto failing = index.try_plan_store(key.pointers(), Keys::bytes, "a");
    const Reservation hit = index.reserve(key.pointers(), Keys::bytes, "b", Pending::attach);
    index.finish(failing->id, 0, false);
    store(key);
    for (const GroupIndex from : {GroupIndex{0}, GroupIndex{1}}) {
      const auto to = static_cast<GroupIndex>(from + 2);
      index.finish(index.plan_copy(key.pointers(), Keys::bytes, from, to, "w").id, 0, true);
    }
    EXPECT_EQ(index.begin(hit.id)->length, 1);
    index.finish(hit.id, 0, true);
    std::set<SlotIndex> slots;
    for (std::uint64_t number = 10; number < 16; ++number) slots.insert(store({number}));
    EXPECT_EQ(slots.size(), 3) << "each slot in its turn";
    const Keys newest{15};
    const Reservation held = index.reserve(newest.pointers(), Keys::bytes, "b");
    store({30});
    index.release(held.id);
    index.check();
  }
}

}  // namespace
}  // namespace kvmem
