#include "device/model.hpp"

#include <malloc.h>

#include <set>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "base/error.hpp"

namespace kvmem {
namespace {

ModelCopy copy_named(std::size_t name) {
  ModelCopy copy;
  copy.batch.count = name;
  return copy;
}

std::vector<std::size_t> names(const StreamModel& model) {
  std::vector<std::size_t> found;
  for (const ModelCopy* const copy : model.runnable()) found.push_back(copy->batch.count);
  return found;
}

using Names = std::vector<std::size_t>;

class Model : public ::testing::Test {
 protected:
  bool end_first(Nanoseconds now = 0) { return model_.ended(model_.runnable().front(), now); }

  StreamModel model_;
};

TEST_F(Model, OnlyTheHeadOfAStreamIsRunnable) {
  const StreamHandle stream = model_.create_stream();
  model_.copy(stream, copy_named(1));
  model_.copy(stream, copy_named(2));
  EXPECT_EQ(names(model_), Names{1});
  EXPECT_FALSE(end_first());
  EXPECT_EQ(names(model_), Names{2});
  EXPECT_FALSE(end_first());
  EXPECT_EQ(names(model_), Names{});
}

TEST_F(Model, TheCopyThatGotToItsHeadFirstComesFirst) {
  const StreamHandle a = model_.create_stream(), b = model_.create_stream();
  model_.copy(a, copy_named(1));
  model_.copy(a, copy_named(2));
  model_.copy(b, copy_named(3));
  EXPECT_EQ(names(model_), (Names{1, 3}));
  end_first();
  EXPECT_EQ(names(model_), (Names{3, 2}));
}

TEST_F(Model, CopiesMayEndInAnyOrder) {
  for (std::size_t i = 0; i < 5; ++i) model_.copy(model_.create_stream(), copy_named(i));
  model_.ended(model_.runnable()[3], 0);
  model_.ended(model_.runnable()[1], 0);
  EXPECT_EQ(names(model_), (Names{0, 2, 4}));
}

TEST_F(Model, ACopyKeepsItsAddressAndItsCursorWhileMoreIsQueuedBehindIt) {
  const StreamHandle stream = model_.create_stream();
  model_.copy(stream, copy_named(1));
  ModelCopy* const copy = model_.runnable().front();
  copy->next_descriptor = 17;
  for (std::size_t i = 0; i < 1000; ++i) model_.copy(stream, copy_named(i));
  EXPECT_EQ(model_.runnable().front(), copy);
  EXPECT_EQ(copy->next_descriptor, 17U);
}

TEST_F(Model, ItSaysWhetherAnEventWasReached) {
  const StreamHandle stream = model_.create_stream();
  const EventHandle event = model_.create_event();
  EXPECT_TRUE(model_.record(event, stream, 5));
  model_.copy(stream, copy_named(1));
  EXPECT_FALSE(model_.record(event, stream, 6));
  model_.copy(stream, copy_named(2));
  EXPECT_TRUE(end_first(7));
  EXPECT_FALSE(end_first(8));
}

TEST_F(Model, AnEventOnAnotherStreamSetFreeByAWaitCountsAsReached) {
  const StreamHandle a = model_.create_stream(), b = model_.create_stream();
  const EventHandle first = model_.create_event(), second = model_.create_event();
  model_.copy(a, copy_named(1));
  model_.record(first, a, 1);
  model_.wait(b, first);
  model_.record(second, b, 1);
  EXPECT_TRUE(end_first(9));
  EXPECT_EQ(model_.reached_at(first), 9);
  EXPECT_EQ(model_.reached_at(second), 9);
}

TEST_F(Model, AnEventIsStampedWhenItIsReached) {
  const StreamHandle stream = model_.create_stream();
  const EventHandle at_once = model_.create_event(), later = model_.create_event();
  model_.record(at_once, stream, 10);
  model_.copy(stream, copy_named(1));
  model_.record(later, stream, 20);
  EXPECT_EQ(model_.reached_at(at_once), 10);
  EXPECT_THROW(static_cast<void>(model_.reached_at(later)), InvalidArgument);
  end_first(30);
  EXPECT_EQ(model_.reached_at(later), 30);
}

TEST_F(Model, HandlesComeAgainLastInFirstOutAndIdsNever) {
  const StreamHandle a = model_.create_stream(), b = model_.create_stream();
  const std::uint64_t a_id = model_.stream_id(a), b_id = model_.stream_id(b);
  model_.destroy_stream(b);
  model_.destroy_stream(a);
  EXPECT_EQ(model_.create_stream(), a);
  EXPECT_EQ(model_.create_stream(), b);
  EXPECT_EQ((std::set{a_id, b_id, model_.stream_id(a), model_.stream_id(b)}.size()), 4U);
  const EventHandle event = model_.create_event();
  model_.destroy_event(event);
  EXPECT_EQ(model_.create_event(), event);
}

TEST_F(Model, IdsAndHandlesOfTwoModelsAreDifferent) {
  StreamModel other;
  const StreamHandle here = model_.create_stream(), there = other.create_stream();
  EXPECT_NE(here, there);
  EXPECT_NE(model_.stream_id(here), other.stream_id(there));
  EXPECT_NE(model_.create_event(), other.create_event());
  EXPECT_THROW(static_cast<void>(model_.stream_id(there)), InvalidArgument);
}

TEST_F(Model, AnEventIsNoStream) {
  const EventHandle event = model_.create_event();
  const StreamHandle stream = model_.create_stream();
  EXPECT_THROW(model_.record(event, event, 0), InvalidArgument);
  EXPECT_THROW(model_.wait(stream, stream), InvalidArgument);
}

TEST_F(Model, UnknownHandlesAreRefusedByNameAndChangeNothing) {
  const StreamHandle stream = model_.create_stream();
  const EventHandle event = model_.create_event();
  EXPECT_THROW(model_.destroy_stream(77), InvalidArgument);
  EXPECT_THROW(model_.destroy_event(77), InvalidArgument);
  EXPECT_THROW(model_.copy(77, copy_named(1)), InvalidArgument);
  EXPECT_THROW(model_.record(event, 77, 0), InvalidArgument);
  EXPECT_THROW(model_.wait(stream, 77), InvalidArgument);
  EXPECT_THROW(static_cast<void>(model_.done(77)), InvalidArgument);
  EXPECT_THROW(model_.signal(77, 0), InvalidArgument);
  EXPECT_THROW(model_.record_unsignalled(77), InvalidArgument);
  try {
    model_.record(77, stream, 0);
    FAIL();
  } catch (const InvalidArgument& refusal) {
    EXPECT_NE(std::string(refusal.what()).find("event 77"), std::string::npos);
  }
  EXPECT_FALSE(model_.recorded(event));
  EXPECT_EQ(model_.pending_operations(), 0U);
}

TEST_F(Model, AnUnsignalledEventHoldsStreamsUntilItsSignal) {
  const StreamHandle stream = model_.create_stream();
  const EventHandle event = model_.create_event();
  model_.record_unsignalled(event);
  EXPECT_TRUE(model_.recorded(event));
  EXPECT_FALSE(model_.done(event));
  model_.wait(stream, event);
  model_.copy(stream, copy_named(1));
  EXPECT_EQ(names(model_), Names{});
  model_.signal(event, 40);
  EXPECT_TRUE(model_.done(event));
  EXPECT_EQ(model_.reached_at(event), 40);
  EXPECT_EQ(names(model_), Names{1});
}

TEST_F(Model, AnEventIsSignalledOnceAndNotRecordedBefore) {
  const StreamHandle stream = model_.create_stream();
  const EventHandle event = model_.create_event();
  EXPECT_THROW(model_.signal(event, 0), InvalidArgument);
  model_.record_unsignalled(event);
  EXPECT_THROW(model_.record_unsignalled(event), InvalidArgument);
  EXPECT_THROW(model_.record(event, stream, 0), InvalidArgument);
  model_.signal(event, 0);
  EXPECT_THROW(model_.signal(event, 0), InvalidArgument);
  EXPECT_TRUE(model_.record(event, stream, 0));
  EXPECT_THROW(model_.signal(event, 0), InvalidArgument);
}

TEST_F(Model, AVeryLongChainOfWaitsNeedsNoStack) {
  constexpr std::size_t length = 200'000;
  const StreamHandle first = model_.create_stream();
  model_.copy(first, copy_named(1));
  const EventHandle event = model_.create_event();
  StreamHandle before = first;
  for (std::size_t i = 0; i < length; ++i) {
    const StreamHandle next = model_.create_stream();
    model_.record(event, before, 0);
    model_.wait(next, event);
    before = next;
  }
  model_.record(event, before, 0);
  EXPECT_FALSE(model_.done(event));
  EXPECT_EQ(model_.pending_operations(), 2 * length + 2);
  end_first();
  EXPECT_TRUE(model_.done(event));
  EXPECT_EQ(model_.pending_operations(), 0U);
}

TEST_F(Model, ADestroyedStreamEndsWhatItHoldsThoughItsHandleIsInUseAgain) {
  const StreamHandle old = model_.create_stream();
  const EventHandle event = model_.create_event();
  model_.copy(old, copy_named(1));
  model_.copy(old, copy_named(2));
  model_.record(event, old, 0);
  model_.destroy_stream(old);
  ASSERT_EQ(model_.create_stream(), old);
  model_.copy(old, copy_named(3));
  EXPECT_EQ(names(model_), (Names{1, 3}));
  end_first();
  EXPECT_EQ(names(model_), (Names{3, 2}));
  model_.ended(model_.runnable()[1], 5);
  EXPECT_TRUE(model_.done(event));
  EXPECT_EQ(names(model_), Names{3});
}

TEST_F(Model, EndlessUseDoesNotGrow) {
  const StreamHandle a = model_.create_stream(), b = model_.create_stream();
  const EventHandle kept = model_.create_event();
  const auto use = [&](int rounds) {
    for (int i = 0; i < rounds; ++i) {
      const StreamHandle brief = model_.create_stream();
      const EventHandle event = model_.create_event();
      model_.copy(a, copy_named(1));
      model_.record(kept, a, i);
      model_.record(event, a, i);
      model_.wait(b, event);
      model_.wait(brief, kept);
      model_.record(event, brief, i);
      model_.copy(b, copy_named(2));
      model_.destroy_stream(brief);
      model_.destroy_event(event);
      while (!model_.runnable().empty()) end_first(i);
    }
    return mallinfo2().uordblks;
  };
  const std::size_t before = use(100);
  EXPECT_LE(use(20'000), before + 4096);
  EXPECT_EQ(model_.pending_operations(), 0U);
}

TEST(ModelLife, WhatIsPendingAtItsEndIsDropped) {
  StreamModel model;
  const StreamHandle a = model.create_stream(), b = model.create_stream();
  const EventHandle event = model.create_event();
  model.record_unsignalled(event);
  model.wait(a, event);
  model.copy(a, copy_named(1));
  model.copy(b, copy_named(2));
  model.destroy_stream(a);
}

}  // namespace
}  // namespace kvmem
