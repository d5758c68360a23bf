#include "base/progress.hpp"

#include <thread>

#include <gtest/gtest.h>

namespace kvmem {
namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

TEST(Progress, ASleepEndsAtOnceWhenTheCounterHasMovedSinceItWasRead) {
  Progress progress;
  const std::uint64_t seen = progress.value();
  progress.bump();
  const auto started = Clock::now();
  progress.sleep(seen, 60s);
  EXPECT_LT(Clock::now() - started, 30s);
}

TEST(Progress, ASleepLastsAsLongAsItWasToldWhenNothingMoves) {
  Progress progress;
  const auto started = Clock::now();
  progress.sleep(progress.value(), 20ms);
  EXPECT_GE(Clock::now() - started, 20ms);
}

TEST(Progress, ABumpWakesEverySleeper) {
  Progress progress;
  const std::uint64_t seen = progress.value();
  const auto started = Clock::now();
  std::thread first([&] { progress.sleep(seen, 60s); });
  std::thread second([&] { progress.sleep(seen, 60s); });
  std::this_thread::sleep_for(20ms);
  progress.bump();
  first.join();
  second.join();
  EXPECT_LT(Clock::now() - started, 30s);
}

TEST(Progress, TheReaperIsWokenWhereNobodyElseIs) {
  using Sleeper = Progress::Sleeper;
  Progress progress;
  std::atomic<int> woken{0};
  const auto sleeper = [&](Sleeper who) {
    return std::thread([&, who, seen = progress.value()] {
      progress.sleep(seen, 60s, who);
      ++woken;
    });
  };
  const auto started = Clock::now();
  std::thread reaper = sleeper(Sleeper::reaper);
  std::this_thread::sleep_for(20ms);
  progress.bump_for_waiters();
  std::this_thread::sleep_for(20ms);
  EXPECT_EQ(woken, 0) << "there was nothing to do";
  std::thread waiter = sleeper(Sleeper::waiter);
  std::this_thread::sleep_for(20ms);
  progress.bump();
  waiter.join();
  EXPECT_EQ(woken, 1) << "the waiter does what is to be done";
  progress.bump();
  reaper.join();
  reaper = sleeper(Sleeper::reaper);
  waiter = sleeper(Sleeper::waiter);
  std::this_thread::sleep_for(20ms);
  progress.bump_for_all();
  reaper.join();
  waiter.join();
  EXPECT_LT(Clock::now() - started, 30s);
}

TEST(Progress, NoChangeIsMissedByTwoThreadsThatTakeTurns) {
  Progress progress;
  std::atomic<int> turn{0};
  const auto started = Clock::now();
  const auto play = [&](int mine) {
    for (int round = 0; round < 2000; ++round) {
      for (;;) {
        const std::uint64_t seen = progress.value();
        if (turn % 2 == mine) break;
        progress.sleep(seen, 60s);
      }
      ++turn;
      progress.bump();
    }
  };
  std::thread other([&] { play(1); });
  play(0);
  other.join();
  EXPECT_EQ(turn, 4000);
  EXPECT_LT(Clock::now() - started, 50s);  // one missed change would cost a minute
}

}  // namespace
}  // namespace kvmem
