#include "device/model.hpp"

#include <algorithm>
#include <atomic>
#include <utility>

#include "base/check.hpp"

namespace kvmem {

namespace {

// Handles of one kind and one model are `base + 1`, `base + 2`, ...; each base has a range of its
// own, so that a handle of another kind or another device is an unknown handle.
std::uintptr_t next_handle_base() {
  constexpr int range_bits = 32;
  static std::atomic<std::uintptr_t> ranges{0};
  return ++ranges << range_bits;
}

std::uint64_t next_stream_id() {
  static std::atomic<std::uint64_t> ids{0};
  return ++ids;
}

// Room for `count`, at least doubled, so that growing one at a time stays cheap.
template <class T>
void make_room(std::vector<T>& vector, std::size_t count) {
  if (count > vector.capacity()) vector.reserve(2 * count);
}

}  // namespace

void StreamModel::StreamList::push(Stream* stream) noexcept {
  stream->next_in_list = nullptr;
  (first_ ? last_->next_in_list : first_) = stream;
  last_ = stream;
}

StreamModel::Stream* StreamModel::StreamList::pop() noexcept {
  Stream* const stream = first_;
  if (stream) first_ = stream->next_in_list;
  return stream;
}

void StreamModel::StreamList::take_all(StreamList& other) noexcept {
  if (!other.first_) return;
  (first_ ? last_->next_in_list : first_) = other.first_;
  last_ = other.last_;
  other.first_ = nullptr;
}

std::uintptr_t StreamModel::HandleSource::take() {
  if (free_.empty()) {
    make_room(free_, made_ + 1);
    ++made_;
    return ++last_;
  }
  const std::uintptr_t handle = free_.back();
  free_.pop_back();
  return handle;
}

StreamModel::StreamModel()
    : stream_handles_(next_handle_base()), event_handles_(next_handle_base()) {}

StreamModel::~StreamModel() = default;

StreamHandle StreamModel::create_stream() {
  make_room(runnable_, streams_.size() + 1);
  const StreamHandle handle = stream_handles_.take();
  streams_.emplace_back();
  Stream& stream = streams_.back();
  stream.id = next_stream_id();
  stream.self = std::prev(streams_.end());
  stream_by_handle_.emplace(handle, &stream);
  return handle;
}

void StreamModel::destroy_stream(StreamHandle handle) {
  Stream& stream = stream_of(handle);
  stream_by_handle_.erase(handle);
  stream_handles_.give_back(handle);
  stream.destroyed = true;
  if (stream.operations.empty()) streams_.erase(stream.self);
}

std::uint64_t StreamModel::stream_id(StreamHandle stream) const { return stream_of(stream).id; }

EventHandle StreamModel::create_event(bool timing) {
  const EventHandle handle = event_handles_.take();
  event_by_handle_.emplace(handle, Event{timing, nullptr});
  return handle;
}

void StreamModel::destroy_event(EventHandle handle) {
  static_cast<void>(event_of(handle));
  event_by_handle_.erase(handle);
  event_handles_.give_back(handle);
}

bool StreamModel::record(EventHandle handle, StreamHandle stream_handle, Nanoseconds now) {
  Event& event = event_of(handle);
  Stream& stream = stream_of(stream_handle);
  expect_signalled(handle, event);
  auto record = std::make_shared<Record>();
  const bool reached = push(stream, RecordOperation{record}, now);
  event.latest = std::move(record);
  return reached;
}

void StreamModel::wait(StreamHandle stream_handle, EventHandle event) {
  Stream& stream = stream_of(stream_handle);
  const auto& record = event_of(event).latest;
  if (record && !record->reached) push(stream, WaitOperation{record}, 0);
}

bool StreamModel::recorded(EventHandle event) const { return event_of(event).latest != nullptr; }

bool StreamModel::done(EventHandle event) const {
  const auto& record = event_of(event).latest;
  return !record || record->reached;
}

Nanoseconds StreamModel::reached_at(EventHandle handle) const {
  const Event& event = event_of(handle);
  KVMEM_EXPECTS(event.timing, "event ", handle, " was made without timing");
  KVMEM_EXPECTS(event.latest, "event ", handle, " was never recorded");
  KVMEM_EXPECTS(event.latest->reached, "event ", handle, " is still pending");
  return event.latest->reached_at;
}

void StreamModel::record_unsignalled(EventHandle handle) {
  Event& event = event_of(handle);
  expect_signalled(handle, event);
  event.latest = std::make_shared<Record>();
  event.latest->awaits_signal = true;
}

void StreamModel::signal(EventHandle handle, Nanoseconds now) {
  Event& event = event_of(handle);
  KVMEM_EXPECTS(event.latest && event.latest->awaits_signal, "event ", handle,
                " does not await signal()");
  event.latest->awaits_signal = false;
  StreamList freed;
  reach(*event.latest, now, freed);
  advance(freed, now);
}

void StreamModel::copy(StreamHandle handle, const ModelCopy& copy) {
  Stream& stream = stream_of(handle);
  push(stream, CopyOperation(copy, stream), 0);
}

bool StreamModel::ended(ModelCopy* copy, Nanoseconds now) noexcept {
  // Seldom far from the front: the oldest copy is usually the first to end.
  const auto place = std::find(runnable_.begin(), runnable_.end(), copy);
  KVMEM_INVARIANT(place != runnable_.end());
  runnable_.erase(place);
  Stream* const stream = static_cast<CopyOperation*>(copy)->stream;
  stream->operations.pop_front();
  --pending_operations_;
  StreamList ready;
  ready.push(stream);
  return advance(ready, now);
}

template <class Matches>
bool StreamModel::any_descriptor(Matches&& matches) const noexcept {
  for (const Stream& stream : streams_) {
    for (const Operation& operation : stream.operations) {
      const auto* const copy = std::get_if<CopyOperation>(&operation);
      if (copy == nullptr) continue;
      const CopyDescriptors& batch = copy->batch;
      for (std::size_t i = 0; i < batch.count; ++i) {
        if (matches(batch, i)) return true;
      }
    }
  }
  return false;
}

namespace {

bool overlap(const void* one, std::size_t bytes, const std::byte* other, std::size_t size) {
  const auto* const from = static_cast<const std::byte*>(one);
  return other < from + bytes && from < other + size;
}

}  // namespace

bool StreamModel::touches(const void* base, std::size_t bytes) const noexcept {
  return any_descriptor([&](const CopyDescriptors& batch, std::size_t i) {
    return overlap(base, bytes, batch.targets[i], batch.sizes[i]) ||
           overlap(base, bytes, batch.sources[i], batch.sizes[i]);
  });
}

bool StreamModel::writes(const void* base, std::size_t bytes) const noexcept {
  return any_descriptor([&](const CopyDescriptors& batch, std::size_t i) {
    return overlap(base, bytes, batch.targets[i], batch.sizes[i]);
  });
}

StreamModel::Stream& StreamModel::stream_of(StreamHandle stream) const {
  const auto found = stream_by_handle_.find(stream);
  KVMEM_EXPECTS(found != stream_by_handle_.end(), "stream ", stream, " is not of this device");
  return *found->second;
}

const StreamModel::Event& StreamModel::event_of(EventHandle event) const {
  const auto found = event_by_handle_.find(event);
  KVMEM_EXPECTS(found != event_by_handle_.end(), "event ", event, " is not of this device");
  return found->second;
}

StreamModel::Event& StreamModel::event_of(EventHandle event) {
  return const_cast<Event&>(std::as_const(*this).event_of(event));
}

void StreamModel::expect_signalled(EventHandle handle, const Event& event) {
  KVMEM_EXPECTS(!event.latest || !event.latest->awaits_signal, "event ", handle,
                " awaits signal() and cannot be recorded again before");
}

bool StreamModel::push(Stream& stream, Operation operation, Nanoseconds now) {
  stream.operations.push_back(std::move(operation));
  ++pending_operations_;
  if (stream.operations.size() > 1) return false;
  StreamList ready;
  ready.push(&stream);
  return advance(ready, now);
}

void StreamModel::reach(Record& record, Nanoseconds now, StreamList& freed) noexcept {
  record.reached = true;
  record.reached_at = now;
  freed.take_all(record.waiting);
}

// A list instead of recursion: a chain of waits may be as long as there are streams.
bool StreamModel::advance(StreamList ready, Nanoseconds now) noexcept {
  bool reached = false;
  while (Stream* const stream = ready.pop()) {
    if (advance(*stream, ready, now)) reached = true;
    if (stream->destroyed && stream->operations.empty()) streams_.erase(stream->self);
  }
  return reached;
}

// Passes what needs no running, up to a copy, a wait for a record not yet reached, or the end.
bool StreamModel::advance(Stream& stream, StreamList& freed, Nanoseconds now) noexcept {
  bool reached = false;
  while (!stream.operations.empty()) {
    Operation& head = stream.operations.front();
    if (auto* const copy = std::get_if<CopyOperation>(&head)) {
      runnable_.push_back(copy);
      break;
    }
    if (auto* const wait = std::get_if<WaitOperation>(&head)) {
      if (!wait->record->reached) {
        wait->record->waiting.push(&stream);
        break;
      }
    } else {
      reach(*std::get_if<RecordOperation>(&head)->record, now, freed);
      reached = true;
    }
    stream.operations.pop_front();
    --pending_operations_;
  }
  return reached;
}

}  // namespace kvmem
