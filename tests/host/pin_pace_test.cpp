// How fast memory is pinned, and what is told of it where it is waited for.

#include "host/pin_pace.hpp"

#include <thread>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "base/error.hpp"
#include "host/block_pool.hpp"
#include "support/fake_device.hpp"

namespace kvmem {
namespace {

using test::FakeDevice;

constexpr std::size_t KiB = 1024, MiB = 1024 * KiB, GiB = 1024 * MiB, page = 4096;
constexpr Nanoseconds second = 1'000'000'000;

TEST(PinPace, AChunkIsWholeSlotsOfAtMostHalfASecond) {
  EXPECT_EQ(PinPace{}.chunk_bytes(4096), GiB);
  EXPECT_EQ(PinPace{1e300}.chunk_bytes(4096), GiB);
  EXPECT_EQ(PinPace{4.0 * GiB}.chunk_bytes(4096), GiB);
  EXPECT_EQ(PinPace{1.0 * GiB}.chunk_bytes(4096), GiB / 2);
  EXPECT_EQ(PinPace{1.0 * MiB}.chunk_bytes(12 * KiB), 504 * KiB);
  EXPECT_EQ(PinPace{1.0 * MiB}.chunk_bytes(3 * MiB), 3 * MiB) << "never less than a slot";
  EXPECT_EQ(PinPace{1}.chunk_bytes(4096), 4096U);
  EXPECT_THROW((void)PinPace{1}.chunk_bytes(64 * GiB + 4096), InvalidArgument);
}

TEST(PinPace, SaysHowLongBytesTakeWithoutOverflowingAClock) {
  EXPECT_EQ(PinPace{}.time_for(GiB), 0);
  EXPECT_EQ(PinPace{2e9}.time_for(std::size_t{1'000'000'000}), second / 2);
  EXPECT_EQ(PinPace{1}.time_for(~std::size_t{0}), second * second);
}

class PinningAtAPace : public ::testing::Test {
 protected:
  // Two pages a second, so one in a chunk.
  std::vector<Nanoseconds> pauses_when_a_chunk_takes(Nanoseconds time) {
    const PinPace pace{2.0 * page};
    device_->pins_take(time);
    region_.start_pinning(device_, pace.chunk_bytes(page));
    std::vector<Nanoseconds> pauses;
    pin_at_pace(region_, *device_, pace, [&](Nanoseconds pause) {
      pauses.push_back(pause);
      return pauses.size() < most_asked_;
    });
    return pauses;
  }

  std::size_t most_asked_ = 100;
  std::shared_ptr<FakeDevice> device_ = std::make_shared<FakeDevice>();
  PinnedRegion region_ = PinnedRegion::map(4 * page, {});
};

TEST_F(PinningAtAPace, PausesForTheRestOfTheTimeOfEachChunkButTheLast) {
  EXPECT_EQ(pauses_when_a_chunk_takes(second / 10),
            (std::vector<Nanoseconds>{0, second * 4 / 10, second * 4 / 10, second * 4 / 10, 0}));
  EXPECT_EQ(device_->pinned().size(), 4U);
  EXPECT_TRUE(region_.facts().pinned);
}

TEST_F(PinningAtAPace, DoesNotPauseBehindAChunkThatTookLonger) {
  EXPECT_EQ(pauses_when_a_chunk_takes(second), (std::vector<Nanoseconds>{0, 0, 0, 0, 0}));
}

TEST_F(PinningAtAPace, KeepsWhatItHasWhenItIsToldToStop) {
  most_asked_ = 3;
  EXPECT_EQ(pauses_when_a_chunk_takes(0).size(), 3U);
  EXPECT_EQ(region_.pinned_bytes(), 2 * page);
  EXPECT_EQ(region_.facts().pinned_bytes, 2 * page);
  EXPECT_FALSE(region_.facts().pinned);
  EXPECT_EQ(device_->pinned().size(), 2U);
}

// ---- a pool that is there only when all of it is pinned ----

class PinningFirst : public ::testing::Test {
 protected:
  PinningFirst() {
    options_.block_bytes = page;
    options_.capacity_bytes = 6 * page;
    options_.pin_bytes_per_second = 4.0 * page;  // two slots in a chunk
    device_->pins_take(second);                  // and no pause
    options_.region.progress = [this](std::size_t done, std::size_t total) {
      told_.emplace_back(done, total);
      return told_.size() < most_told_;
    };
  }
  void make() { const BlockPool pool(device_, options_); }

  using Told = std::vector<std::pair<std::size_t, std::size_t>>;
  static constexpr std::size_t all = 6 * page;
  std::shared_ptr<FakeDevice> device_ = std::make_shared<FakeDevice>(true);
  PoolOptions options_;
  Told told_;
  std::size_t most_told_ = 100;
};

TEST_F(PinningFirst, TellsOfEachByteAsTouchedAndAsPinned) {
  make();
  EXPECT_EQ(told_, (Told{{all, 2 * all},
                         {all + 2 * page, 2 * all},
                         {all + 4 * page, 2 * all},
                         {2 * all, 2 * all}}));
}

TEST_F(PinningFirst, TellsOfTouchingAloneWhereNothingIsPinned) {
  options_.pin = Pin::never;
  make();
  EXPECT_EQ(told_, (Told{{all, all}}));
}

TEST_F(PinningFirst, IsUndoneWhenProgressCancels) {
  for (const std::size_t times : {1U, 2U, 3U, 4U}) {
    told_.clear();
    most_told_ = times;
    EXPECT_THROW(make(), Cancelled) << times;
    EXPECT_EQ(told_.size(), times);
    EXPECT_TRUE(device_->pinned().empty());
  }
  EXPECT_EQ(device_->wrong_unpins(), 0U);
}

TEST_F(PinningFirst, AsksInAPauseTooWhetherToGoOn) {
  options_.pin_bytes_per_second = 1;  // an hour between two slots
  device_->pins_take(0);
  most_told_ = 4;
  EXPECT_THROW(make(), Cancelled);
  EXPECT_EQ(told_.back(), std::pair(all + page, 2 * all));
  EXPECT_EQ(device_->pin_calls(), 1U);
  EXPECT_TRUE(device_->pinned().empty());
}

// The caller may try with less at once, so the memory is to be back by then.
TEST_F(PinningFirst, IsUndoneInPlaceWhenAChunkFails) {
  device_->change_info().calls_block = true;
  device_->refuse_pin(3);
  EXPECT_THROW(make(), CapacityError);
  EXPECT_EQ(device_->pin_calls(), 3U);
  EXPECT_TRUE(device_->pinned().empty());
  EXPECT_EQ(device_->wrong_unpins(), 0U);
  EXPECT_EQ(device_->unpinned_by(), std::vector(2, std::this_thread::get_id()));
}

}  // namespace
}  // namespace kvmem
