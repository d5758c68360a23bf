#include "base/tickets.hpp"

#include <gtest/gtest.h>

namespace kvmem {
namespace {

using State = Ticket::State;

TEST(TicketQueue, TakesWhatIsFreeAndRefusesMore) {
  TicketQueue queue(4);
  EXPECT_TRUE(queue.try_take(3));
  EXPECT_FALSE(queue.try_take(2));
  EXPECT_EQ(queue.free(), 1U);
  EXPECT_TRUE(queue.try_take(1));
  EXPECT_EQ(queue.free(), 0U);
}

TEST(TicketQueue, GrantsATicketAtOnceWhenNobodyWaits) {
  TicketQueue queue(4);
  const auto ticket = queue.enqueue(4);
  EXPECT_EQ(ticket->state, State::granted);
  EXPECT_EQ(queue.free(), 0U);
  EXPECT_EQ(queue.waiting(), 0U);
}

TEST(TicketQueue, NobodyOvertakesALargeWaiter) {
  TicketQueue queue(4);
  ASSERT_TRUE(queue.try_take(4));
  const auto large = queue.enqueue(4);
  const auto small = queue.enqueue(1);
  queue.give_back(3);
  EXPECT_FALSE(queue.try_take(1));
  EXPECT_EQ(large->state, State::waiting);
  EXPECT_EQ(small->state, State::waiting);
  queue.give_back(1);
  EXPECT_EQ(large->state, State::granted);
  EXPECT_EQ(small->state, State::waiting);
  queue.give_back(4);
  EXPECT_EQ(small->state, State::granted);
}

TEST(TicketQueue, AnAbandonedWaiterUnblocksThoseBehindIt) {
  TicketQueue queue(4);
  ASSERT_TRUE(queue.try_take(2));
  const auto large = queue.enqueue(4);
  const auto small = queue.enqueue(2);
  EXPECT_EQ(small->state, State::waiting);
  queue.abandon(large);
  EXPECT_EQ(large->state, State::closed);
  EXPECT_EQ(small->state, State::granted);
  EXPECT_EQ(queue.waiting(), 0U);
}

TEST(TicketQueue, AGrantedTicketThatIsAbandonedGivesBackOnce) {
  TicketQueue queue(4);
  const auto ticket = queue.enqueue(3);
  const auto behind = queue.enqueue(2);
  queue.abandon(ticket);
  EXPECT_EQ(behind->state, State::granted);
  EXPECT_EQ(queue.free(), 2U);
  queue.abandon(ticket);
  EXPECT_EQ(queue.free(), 2U);
}

TEST(TicketQueue, OneGiveBackServesAllThatItCan) {
  TicketQueue queue(6);
  ASSERT_TRUE(queue.try_take(6));
  const auto first = queue.enqueue(1), second = queue.enqueue(2), third = queue.enqueue(4);
  queue.give_back(6);
  EXPECT_EQ(first->state, State::granted);
  EXPECT_EQ(second->state, State::granted);
  EXPECT_EQ(third->state, State::waiting);
  EXPECT_EQ(queue.free(), 3U);
}

TEST(TicketQueue, CloseTellsEveryWaiterAndLeavesGrantsAlone) {
  TicketQueue queue(2);
  const auto granted = queue.enqueue(2);
  const auto waiting = queue.enqueue(1);
  queue.close();
  EXPECT_EQ(granted->state, State::granted);
  EXPECT_EQ(waiting->state, State::closed);
  EXPECT_EQ(queue.waiting(), 0U);
}

TEST(TicketQueue, ALossClosesThoseWhoWaitForMoreThanIsLeftAndServesThoseBehind) {
  TicketQueue queue(4);
  ASSERT_TRUE(queue.try_take(2));
  const auto all = queue.enqueue(4);
  const auto three = queue.enqueue(3);
  const auto two = queue.enqueue(2);
  queue.lose(1);
  EXPECT_EQ(queue.bound(), 3U);
  EXPECT_EQ(all->state, State::closed);
  EXPECT_EQ(three->state, State::waiting);
  EXPECT_EQ(two->state, State::waiting);
  queue.lose(1);
  EXPECT_EQ(three->state, State::closed);
  EXPECT_EQ(two->state, State::granted);
}

TEST(TicketQueue, EveryEndOfAWaitFiresItsWaker) {
  const auto list = std::make_shared<WakeList>();
  TicketQueue queue(4);
  const auto at_once = queue.enqueue(4, Waker(list, 1));
  const auto later = queue.enqueue(2, Waker(list, 2));
  const auto lost = queue.enqueue(4, Waker(list, 3));
  const auto closed = queue.enqueue(3, Waker(list, 4));
  EXPECT_EQ(list->drain(), (std::vector<std::uint64_t>{1}));
  queue.give_back(2);
  EXPECT_EQ(list->drain(), (std::vector<std::uint64_t>{2}));
  queue.lose(1);
  EXPECT_EQ(list->drain(), (std::vector<std::uint64_t>{3}));
  queue.close();
  EXPECT_EQ(list->drain(), (std::vector<std::uint64_t>{4}));
}

#if KVMEM_CHECKED
TEST(TicketQueueDeathTest, GivingBackMoreThanWasTakenStopsTheProcess) {
  TicketQueue queue(4);
  ASSERT_TRUE(queue.try_take(1));
  EXPECT_DEATH(queue.give_back(2), "invariant broken");
}
#endif

}  // namespace
}  // namespace kvmem
