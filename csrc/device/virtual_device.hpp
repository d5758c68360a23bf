// A device in virtual time: deterministic, for replay and for proof.
//
// It runs the stream/event model without a thread. The clock moves only when somebody moves it:
// advance(), step(), or a sleeper with `help`. A copy takes the time that its link gives it and
// ends when the clock gets there. Which of the copies that may run a link serves next is drawn from
// the seed, so that any order that streams and events allow can come. The same calls with the same
// seed give the same result.
//
// Bytes move as badly as hardware may move them. A first part of each copy moves as soon as the
// stream gets there, the rest just before the end, when source and descriptors are read again, and
// some bytes are written twice. Of a source that may be read at any time (SourceAccess::any) some
// bytes are read when the copy is queued. So whoever reuses a side of a copy, or its arrays, too
// early, or too soon believes that it has arrived, gets wrong bytes. Or no bytes move at all, and
// memory is addresses only.
//
// A sleeper with a time moves the clock to the next end or to its time, whichever is first: a wait
// with a deadline takes no real time, whatever other threads are about to do. One without a time
// moves it to the next end only, and waits in real time where nothing can end.
//
// The owner must be quiet when the device is dropped; pending work is dropped with it. In a forked
// child every call throws Forked, but query() answers `lost`, and the other noexcept calls do
// nothing. Bytes move under the device's lock.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>

#include "device/model_device.hpp"

namespace kvmem {

struct VirtualOptions {
  std::uint64_t seed = 0;
  // A copy of n bytes keeps its link busy for n / bytes_per_second and ends `latency` after that.
  double bytes_per_second = 25e9;
  Nanoseconds latency = 10'000;
  bool shared_link = false;        // one link for both directions, else one for each
  bool moves_bytes = true;         // false: memory is addresses only
  bool needs_pinned_host = false;  // and then copies of host memory that is not pinned are refused
  std::size_t max_descriptors = std::size_t{1} << 20;
};

enum class Fault : std::uint8_t {
  refused,    // nothing happened, and the call says that it failed
  in_flight,  // it happened, and the call says that it failed
  lost,       // nothing happened, and the device is lost from now on
};

class VirtualDevice : public ModelDevice {
 public:
  // The end of the clock, some 285 years: what would end later ends then.
  static constexpr Nanoseconds latest = 9'000'000'000'000'000'000;

  using ModelDevice::ModelDevice;

  // ---- time ----
  // The clock moves to the end of the copy that ends next, and that ends. False: none can.
  virtual bool step() = 0;
  // The clock moves by so much, and all that ends meanwhile ends. Throws InvalidArgument beyond
  // `latest`.
  virtual void advance(Nanoseconds by) = 0;
  // The next time at which a copy ends or a link takes another; none: nothing can run.
  [[nodiscard]] virtual std::optional<Nanoseconds> next_time() = 0;

  // ---- faults ----
  // The nth call of that kind from now on (counted from 1), and the `times` - 1 behind it, fail.
  virtual void fail_nth(DeviceCall call, std::uint64_t nth, Fault how, std::uint64_t times = 1) = 0;
  virtual void forget_faults() = 0;                        // those that have not come yet
  virtual void pause_faults(bool paused) = 0;              // calls meanwhile do not count
  [[nodiscard]] virtual std::uint64_t faults() const = 0;  // that have come
  virtual void lose() = 0;
  [[nodiscard]] virtual bool lost() const = 0;
  // The next so many copies never end, until release_copies().
  virtual void hold_copies(std::uint64_t count) = 0;
  virtual void release_copies() = 0;

  // ---- what is true ----
  [[nodiscard]] virtual std::size_t pending_copies() const = 0;  // queued and not ended
  [[nodiscard]] virtual std::size_t held_copies() const = 0;
};

// Throws InvalidArgument for a speed below one byte a second, a latency below zero, and pinned
// memory where there are no bytes to stage.
[[nodiscard]] std::shared_ptr<VirtualDevice> make_virtual_device(const VirtualOptions& options);

}  // namespace kvmem
