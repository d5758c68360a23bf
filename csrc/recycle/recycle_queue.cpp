#include "recycle/recycle_queue.hpp"

#include <algorithm>
#include <limits>

#include "base/error.hpp"

namespace kvmem {

struct RecycleQueue::Line {
  std::uint64_t stream_id;
  StreamHandle stream;
  bool ours;
  std::unique_ptr<Parked> head;
  Parked* tail = nullptr;
};

RecycleQueue::~RecycleQueue() {
  for (const auto& line : lines_) static_cast<void>(line->head.release());
}

std::shared_ptr<RecycleQueue::Line> RecycleQueue::line(std::uint64_t stream_id, StreamHandle stream,
                                                       bool ours) {
  const std::lock_guard lock(mutex_);
  for (const auto& line : lines_) {
    if (line->stream_id == stream_id) return line;
  }
  // A line that nobody holds and that guards nothing makes room.
  std::erase_if(lines_, [](const auto& line) { return line.use_count() == 1 && !line->head; });
  lines_.push_back(std::make_shared<Line>(Line{stream_id, stream, ours, nullptr}));
  return lines_.back();
}

void RecycleQueue::park(const std::shared_ptr<Line>& line,
                        std::unique_ptr<Parked> parked) noexcept {
  const std::shared_ptr<Event> event = parked->event;
  bool first = false;
  {
    const std::lock_guard lock(mutex_);
    Parked* const last = parked.get();
    (line->head ? line->tail->behind_ : line->head) = std::move(parked);
    line->tail = last;
    first = in_flight_.fetch_add(1) == 0;
  }
  // A reaper sleeps soundly while nothing is in flight. Where the device wakes it at the end, it
  // may sleep on, unless it was woken when this ended and looked too early; else it looks by
  // itself.
  const bool wakes = events_->device().info().wakes_sleepers;
  first &= !wakes;
  if (first || !event || !event->recorded() || (wakes && event->query() != EventState::pending)) {
    events_->device().progress().bump();
  }
}

void RecycleQueue::reap_in_turn() noexcept {
  if (mark_.must_leak()) return;
  {
    const std::lock_guard reaping(reaping_);
    wanted_.store(false);
    while (pass() > 0) {
    }
  }
  if (wanted_.load()) reap();  // who was turned away meanwhile counts on it
}

std::size_t RecycleQueue::reap() noexcept {
  if (mark_.must_leak()) return 0;
  std::size_t ended = 0;
  wanted_.store(true);
  while (wanted_.load()) {
    const std::unique_lock reaping(reaping_, std::try_to_lock);
    if (!reaping) break;  // who has the turn looks at wanted_ behind it, and asks all once more
    wanted_.store(false);
    // Again until a pass finds nothing: work that waited for other work must not be seen to end
    // before it.
    while (const std::size_t now = pass()) ended += now;
  }
  return ended;
}

std::size_t RecycleQueue::pass() noexcept {
  std::size_t ended = 0;
  // Downwards: when line() takes one out meanwhile, those that move down are asked twice rather
  // than never.
  for (std::size_t i = std::numeric_limits<std::size_t>::max();;) {
    std::shared_ptr<Line> line;
    {
      const std::lock_guard lock(mutex_);
      i = std::min(i, lines_.size());
      if (i == 0) return ended;
      line = lines_[--i];
    }
    for (;;) {
      Parked* head = nullptr;
      {
        const std::lock_guard lock(mutex_);
        head = line->head.get();
      }
      if (!head) break;
      const Head answer = ask(*line, *head);  // only the reaper takes heads, so it stays
      if (answer == Head::waits) break;
      if (answer == Head::lost) lost_.store(true);
      const std::unique_ptr<Parked> parked = pop(*line);
      parked->ended(answer == Head::lost);
      in_flight_.fetch_sub(1);
      ++ended;
    }
  }
}

RecycleQueue::Head RecycleQueue::ask(const Line& line, Parked& head) noexcept {
  if (head.event && head.event->recorded()) {
    switch (head.event->query()) {
      case EventState::pending:
        return Head::waits;
      case EventState::done:
        return Head::ended;
      case EventState::lost:
        return Head::lost;
      case EventState::failed:
        break;
    }
    if (!line.ours) return Head::waits;  // a stream that may be gone: ask the same event again
  }
  try {
    auto event = std::make_shared<Event>(events_->acquire());
    event->record(line.stream);
    head.event = std::move(event);
    // It may have been reached at once; then nothing else tells.
    if (head.event->query() == EventState::done) events_->device().progress().bump();
  } catch (const DeviceLost&) {
    return Head::lost;
  } catch (...) {  // the next reap tries again
  }
  return Head::waits;
}

std::unique_ptr<Parked> RecycleQueue::pop(Line& line) noexcept {
  const std::lock_guard lock(mutex_);
  std::unique_ptr<Parked> head = std::move(line.head);
  line.head = std::move(head->behind_);
  if (!line.head) line.tail = nullptr;
  return head;
}

}  // namespace kvmem
