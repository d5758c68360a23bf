// The one stream/event model: what CUDA promises about order, as a data structure without threads,
// clock or bytes.
//
// Streams are FIFOs of operations. The owner asks for a copy that may run, runs it, and says when
// it has ended; record and wait operations need no running and are passed by the model itself. The
// host device runs copies on workers; the virtual device runs them in virtual time.
//
// A call of record() makes one Record. The event points at its latest one, a wait at the one that
// was latest when it was called; a Record is gone once nobody points at it. So what the model holds
// is bounded by what is pending and by the events alive.
//
// Not thread-safe: the owner's lock guards it. Every call throws InvalidArgument for a handle that
// this model did not give out or has taken back; handles of two models never coincide. Every call
// is O(1) but for the streams and operations that it sets free.
#pragma once

#include <cstdint>
#include <deque>
#include <list>
#include <memory>
#include <unordered_map>
#include <variant>
#include <vector>

#include "device/device.hpp"

namespace kvmem {

// One batch on a stream.
struct ModelCopy {
  CopyDescriptors batch;
  Direction direction = Direction::to_host;
  SourceAccess access = SourceAccess::stream_order;
  std::uint64_t number = 0;  // the owner's own name for it
  // The owner's, to cut the batch into pieces: the first descriptor not yet taken, how many of its
  // bytes are, and how many pieces are being copied.
  std::size_t next_descriptor = 0;
  std::size_t next_byte = 0;
  std::size_t pieces_running = 0;
};

class StreamModel {
 public:
  StreamModel();
  StreamModel(const StreamModel&) = delete;
  StreamModel& operator=(const StreamModel&) = delete;
  ~StreamModel();  // what is pending is dropped

  [[nodiscard]] StreamHandle create_stream();
  void destroy_stream(StreamHandle stream);  // what it holds still ends; the handle may come again
  [[nodiscard]] std::uint64_t stream_id(StreamHandle stream) const;  // unique in the process

  [[nodiscard]] EventHandle create_event(bool timing = true);
  // Those who wait for it go on waiting for what was recorded. A record that awaits signal() can
  // then never be signalled: signal first.
  void destroy_event(EventHandle event);
  // Returns whether the record was reached at once. Throws InvalidArgument for an event that awaits
  // signal(): its waiters could never be freed.
  bool record(EventHandle event, StreamHandle stream, Nanoseconds now);
  void wait(StreamHandle stream, EventHandle event);
  [[nodiscard]] bool recorded(EventHandle event) const;
  [[nodiscard]] bool done(EventHandle event) const;  // never recorded counts as done
  // Throws InvalidArgument unless the event has timing, was recorded, and is done.
  [[nodiscard]] Nanoseconds reached_at(EventHandle event) const;

  // A pending record that no stream reaches: it is done when signal() says so. For CPU engines
  // whose compute runs on threads of their own, and for stalling a stream in tests.
  void record_unsignalled(EventHandle event);
  void signal(EventHandle event, Nanoseconds now);  // throws InvalidArgument unless it awaits this

  void copy(StreamHandle stream, const ModelCopy& copy);

  // Copies at the head of their streams; the one that got there first comes first. A copy stays
  // here, at one address, until ended() is called for it.
  [[nodiscard]] const std::vector<ModelCopy*>& runnable() const noexcept { return runnable_; }
  // The copy has moved its last byte: its stream goes on, and so do streams that waited for it.
  // Returns whether an event was reached, which is what sleepers wait for.
  bool ended(ModelCopy* copy, Nanoseconds now) noexcept;
  [[nodiscard]] std::size_t pending_operations() const noexcept { return pending_operations_; }
  // May a copy that is queued and has not ended read or write there, or write there? Looks at all
  // of them.
  [[nodiscard]] bool touches(const void* base, std::size_t bytes) const noexcept;
  [[nodiscard]] bool writes(const void* base, std::size_t bytes) const noexcept;

 private:
  struct Stream;

  // A FIFO of streams, linked through the streams: each is in at most one, and none allocates.
  class StreamList {
   public:
    void push(Stream* stream) noexcept;
    [[nodiscard]] Stream* pop() noexcept;  // null when empty
    void take_all(StreamList& other) noexcept;

   private:
    Stream* first_ = nullptr;
    Stream* last_ = nullptr;
  };

  struct Record {
    bool awaits_signal = false;  // no stream holds it
    bool reached = false;
    Nanoseconds reached_at = 0;
    StreamList waiting;  // streams whose head is a wait for this record
  };
  struct CopyOperation : ModelCopy {
    CopyOperation(const ModelCopy& copy, Stream& on) : ModelCopy(copy), stream(&on) {}
    Stream* stream;
  };
  struct RecordOperation {
    std::shared_ptr<Record> record;
  };
  struct WaitOperation {
    std::shared_ptr<Record> record;
  };
  using Operation = std::variant<CopyOperation, RecordOperation, WaitOperation>;

  struct Stream {
    std::uint64_t id = 0;
    bool destroyed = false;            // only what it holds keeps it here
    std::deque<Operation> operations;  // a deque: a copy keeps its address
    Stream* next_in_list = nullptr;
    std::list<Stream>::iterator self;
  };
  struct Event {
    bool timing = true;
    std::shared_ptr<Record> latest;  // null: never recorded
  };

  // Handles come again last in, first out, so that whoever keys by handle is caught early.
  class HandleSource {
   public:
    explicit HandleSource(std::uintptr_t base) : last_(base) {}
    [[nodiscard]] std::uintptr_t take();
    void give_back(std::uintptr_t handle) noexcept { free_.push_back(handle); }

   private:
    std::uintptr_t last_;
    std::size_t made_ = 0;
    std::vector<std::uintptr_t> free_;  // has room for every handle made
  };

  [[nodiscard]] Stream& stream_of(StreamHandle stream) const;
  [[nodiscard]] Event& event_of(EventHandle event);
  [[nodiscard]] const Event& event_of(EventHandle event) const;
  static void expect_signalled(EventHandle handle, const Event& event);

  template <class Matches>
  [[nodiscard]] bool any_descriptor(Matches&& matches) const noexcept;
  // Returns whether an event was reached.
  bool push(Stream& stream, Operation operation, Nanoseconds now);
  static void reach(Record& record, Nanoseconds now, StreamList& freed) noexcept;
  bool advance(StreamList ready, Nanoseconds now) noexcept;
  bool advance(Stream& stream, StreamList& freed, Nanoseconds now) noexcept;

  HandleSource stream_handles_;
  HandleSource event_handles_;
  std::list<Stream> streams_;  // also destroyed ones that still hold something
  std::unordered_map<StreamHandle, Stream*> stream_by_handle_;
  std::unordered_map<EventHandle, Event> event_by_handle_;
  std::vector<ModelCopy*> runnable_;  // has room for every stream
  std::size_t pending_operations_ = 0;
};

}  // namespace kvmem
