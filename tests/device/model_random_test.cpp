// The model against an interpreter so naive that it can be read as the rule: it keeps everything
// that was ever queued and works out from scratch, after each step, what has been passed.
#include <algorithm>
#include <optional>
#include <random>
#include <span>
#include <vector>

#include <gtest/gtest.h>

#include "base/error.hpp"
#include "device/model.hpp"

namespace kvmem {
namespace {

class Reference {
 public:
  std::size_t new_stream() {
    streams_.emplace_back();
    return streams_.size() - 1;
  }
  std::size_t new_record(bool awaits_signal) {
    records_.push_back({awaits_signal, false, std::nullopt});
    return records_.size() - 1;
  }
  void queue_record(std::size_t stream, std::size_t record) {
    streams_[stream].push_back({Kind::record, record});
  }
  void queue_wait(std::size_t stream, std::size_t record) {
    if (!records_[record].reached_at) streams_[stream].push_back({Kind::wait, record});
  }
  std::size_t queue_copy(std::size_t stream) {
    ended_.push_back(false);
    streams_[stream].push_back({Kind::copy, ended_.size() - 1});
    return ended_.size() - 1;
  }
  void end_copy(std::size_t copy) { ended_[copy] = true; }
  void signal(std::size_t record) { records_[record].signalled = true; }

  void work_out(Nanoseconds now) {
    std::vector<bool> reached(records_.size());
    for (std::size_t i = 0; i < records_.size(); ++i) reached[i] = records_[i].signalled;
    std::vector<std::size_t> passed(streams_.size());
    for (bool changed = true; changed;) {
      changed = false;
      for (std::size_t i = 0; i < streams_.size(); ++i) {
        while (passed[i] < streams_[i].size() && passable(streams_[i][passed[i]], reached)) {
          const Operation& operation = streams_[i][passed[i]++];
          if (operation.kind == Kind::record) reached[operation.which] = true;
          changed = true;
        }
      }
    }
    pending_ = 0;
    runnable_.clear();
    for (std::size_t i = 0; i < streams_.size(); ++i) {
      pending_ += streams_[i].size() - passed[i];
      if (passed[i] == streams_[i].size()) continue;
      const Operation& head = streams_[i][passed[i]];
      if (head.kind == Kind::copy) runnable_.push_back(head.which);
    }
    std::ranges::sort(runnable_);
    for (std::size_t i = 0; i < records_.size(); ++i) {
      if (reached[i] && !records_[i].reached_at) records_[i].reached_at = now;
    }
  }

  [[nodiscard]] const std::vector<std::size_t>& runnable() const { return runnable_; }
  [[nodiscard]] std::size_t pending() const { return pending_; }
  [[nodiscard]] std::optional<Nanoseconds> reached_at(std::size_t record) const {
    return records_[record].reached_at;
  }
  [[nodiscard]] bool awaits_signal(std::size_t record) const {
    return records_[record].awaits_signal && !records_[record].signalled;
  }

 private:
  enum class Kind { copy, record, wait };
  struct Operation {
    Kind kind;
    std::size_t which;
  };
  struct Record {
    bool awaits_signal, signalled;
    std::optional<Nanoseconds> reached_at;
  };

  [[nodiscard]] bool passable(const Operation& operation, const std::vector<bool>& reached) const {
    if (operation.kind == Kind::copy) return ended_[operation.which];
    return operation.kind == Kind::record || reached[operation.which];
  }

  std::vector<std::vector<Operation>> streams_;
  std::vector<Record> records_;
  std::vector<bool> ended_;
  std::vector<std::size_t> runnable_;
  std::size_t pending_ = 0;
};

class World {
 public:
  explicit World(unsigned seed) : random_(seed) {}

  void step() {
    ++now_;
    act(random_() % 100);
    reference_.work_out(now_);
    check();
  }

  // Every copy ends and every event is signalled: then only who waits for a record that was
  // destroyed before its signal is still there.
  void run_dry() {
    for (const Event& event : events_) {
      if (awaits_signal(event)) signal(event);
    }
    reference_.work_out(now_);
    check();
    while (!model_.runnable().empty()) {
      ++now_;
      end_one();
      reference_.work_out(now_);
      check();
    }
    EXPECT_TRUE(abandoned_ || model_.pending_operations() == 0);
  }

 private:
  struct Stream {
    StreamHandle handle;
    std::uint64_t id;
    std::size_t reference;
  };
  struct Event {
    EventHandle handle;
    std::optional<std::size_t> latest;
  };

  void act(std::size_t dice) {
    if (streams_.empty() || (dice < 4 && streams_.size() < 6)) return make_stream();
    if (events_.empty() || (dice < 10 && events_.size() < 8)) return make_event();
    if (dice < 13) return destroy_stream();
    if (dice < 17) return destroy_event();
    if (dice < 40) return record();
    if (dice < 58) return wait();
    if (dice < 75) return copy();
    if (dice < 80) return record_unsignalled();
    if (dice < 85) return signal_one();
    if (!model_.runnable().empty()) end_one();
  }

  void make_stream() {
    const StreamHandle handle = model_.create_stream();
    const std::uint64_t id = model_.stream_id(handle);
    EXPECT_GT(id, newest_id_);
    newest_id_ = id;
    streams_.push_back({handle, id, reference_.new_stream()});
  }

  void make_event() { events_.push_back({model_.create_event(), std::nullopt}); }

  void destroy_stream() {
    const auto stream = streams_.begin() + static_cast<std::ptrdiff_t>(random_() % streams_.size());
    model_.destroy_stream(stream->handle);
    EXPECT_THROW(static_cast<void>(model_.stream_id(stream->handle)), InvalidArgument);
    streams_.erase(stream);
  }

  void destroy_event() {
    const auto event = events_.begin() + static_cast<std::ptrdiff_t>(random_() % events_.size());
    if (awaits_signal(*event)) abandoned_ = true;
    model_.destroy_event(event->handle);
    events_.erase(event);
  }

  void record() {
    Event& event = any_event();
    const Stream& stream = any_stream();
    if (awaits_signal(event)) {
      EXPECT_THROW(model_.record(event.handle, stream.handle, now_), InvalidArgument);
      return;
    }
    event.latest = reference_.new_record(false);
    reference_.queue_record(stream.reference, *event.latest);
    const bool at_once = model_.record(event.handle, stream.handle, now_);
    EXPECT_EQ(at_once, model_.done(event.handle));
  }

  void wait() {
    const Event& event = any_event();
    const Stream& stream = any_stream();
    if (event.latest) reference_.queue_wait(stream.reference, *event.latest);
    model_.wait(stream.handle, event.handle);
  }

  void copy() {
    const Stream& stream = any_stream();
    ModelCopy copy;
    copy.batch.count = reference_.queue_copy(stream.reference);
    model_.copy(stream.handle, copy);
  }

  void record_unsignalled() {
    Event& event = any_event();
    if (awaits_signal(event)) return;
    event.latest = reference_.new_record(true);
    model_.record_unsignalled(event.handle);
  }

  void signal_one() {
    const Event& event = any_event();
    if (awaits_signal(event)) {
      signal(event);
    } else {
      EXPECT_THROW(model_.signal(event.handle, now_), InvalidArgument);
    }
  }

  void signal(const Event& event) {
    reference_.signal(*event.latest);
    model_.signal(event.handle, now_);
  }

  void end_one() {
    ModelCopy* const copy = model_.runnable()[random_() % model_.runnable().size()];
    reference_.end_copy(copy->batch.count);
    std::erase(order_, copy->batch.count);
    model_.ended(copy, now_);
  }

  void check() {
    std::vector<std::size_t> runnable;
    for (const ModelCopy* const one : model_.runnable()) runnable.push_back(one->batch.count);
    // Those that were runnable before keep their places; new ones follow.
    ASSERT_GE(runnable.size(), order_.size());
    ASSERT_TRUE(std::ranges::equal(std::span(runnable).first(order_.size()), order_));
    order_ = runnable;
    std::ranges::sort(runnable);
    ASSERT_EQ(runnable, reference_.runnable());
    ASSERT_EQ(model_.pending_operations(), reference_.pending());
    for (const Event& event : events_) {
      ASSERT_EQ(model_.recorded(event.handle), event.latest.has_value());
      const auto reached_at = event.latest ? reference_.reached_at(*event.latest) : std::nullopt;
      ASSERT_EQ(model_.done(event.handle), !event.latest || reached_at);
      ASSERT_TRUE(!reached_at || model_.reached_at(event.handle) == *reached_at);
    }
    for (const Stream& stream : streams_) ASSERT_EQ(model_.stream_id(stream.handle), stream.id);
  }

  [[nodiscard]] bool awaits_signal(const Event& event) const {
    return event.latest && reference_.awaits_signal(*event.latest);
  }
  Event& any_event() { return events_[random_() % events_.size()]; }
  const Stream& any_stream() { return streams_[random_() % streams_.size()]; }

  std::minstd_rand random_;
  Nanoseconds now_ = 0;
  StreamModel model_;
  Reference reference_;
  std::vector<Stream> streams_;
  std::vector<Event> events_;
  std::vector<std::size_t> order_;
  std::uint64_t newest_id_ = 0;
  bool abandoned_ = false;
};

TEST(ModelRandom, AgreesWithTheRuleAfterEveryStep) {
  for (unsigned seed = 1; seed <= 150; ++seed) {
    SCOPED_TRACE(seed);
    World world(seed);
    for (int i = 0; i < 250; ++i) {
      world.step();
      if (::testing::Test::HasFailure()) return;
    }
    world.run_dry();
    if (::testing::Test::HasFailure()) return;
  }
}

}  // namespace
}  // namespace kvmem
