// Calls of the runtime on whatever thread kvmem happens to run, such that the thread notices
// nothing: device, capture mode and last error are behind a call what they were before it.
//
// The runtime has no way to set an error, so one that the caller has not looked at yet could not be
// put back: such calls are made on a thread of their own. So are calls from a thread whose current
// device has no context: going back to it would make one there. Any thread.
#pragma once

#include <atomic>
#include <memory>

#include "base/process.hpp"
#include "device/cuda/cudart.hpp"
#include "device/device.hpp"

namespace kvmem::cuda {

// One of those behind which nothing on the device can be trusted, for the life of the process.
[[nodiscard]] bool is_sticky(Error error) noexcept;
// Of a graph capture that a call would have disturbed.
[[nodiscard]] bool is_about_capture(Error error) noexcept;

// The legacy default stream and the calling thread's default stream, by their special handles.
[[nodiscard]] inline bool is_legacy(StreamHandle stream) noexcept { return stream <= 1; }
[[nodiscard]] inline bool is_per_thread(StreamHandle stream) noexcept { return stream == 2; }

[[nodiscard]] inline Stream stream_of(StreamHandle stream) noexcept {
  return reinterpret_cast<Stream>(stream);
}
[[nodiscard]] inline Event event_of(EventHandle event) noexcept {
  return reinterpret_cast<Event>(event);
}

class Calls {
 public:
  Calls(std::shared_ptr<const Cudart> runtime, int ordinal)
      : runtime_(std::move(runtime)), ordinal_(ordinal) {}

  [[nodiscard]] const Cudart& runtime() const noexcept { return *runtime_; }
  [[nodiscard]] int ordinal() const noexcept { return ordinal_; }

  // Runs `work(functions)`, which makes calls, throws nothing and returns what the first failing
  // one said. Throws Forked, Closed while the process exits, DeviceLost once the device is lost.
  // `stays`: on this thread as it is, because it names the thread's own stream; throws
  // InvalidArgument where that is not possible.
  template <class Work>
  Error run(Work&& work, bool stays = false) {
    return run({[](void* it, const Functions& call) {
                  return (*static_cast<std::remove_reference_t<Work>*>(it))(call);
                },
                &work},
               stays);
  }
  // The same for what is given back: nothing is called where that cannot be. Any other error than
  // success is then a leak.
  template <class Work>
  Error run_quietly(Work&& work) noexcept {
    if (mark_.must_leak() || lost()) return not_permitted;
    try {
      return run(work);
    } catch (...) {  // lost meanwhile, or the exit began
      return not_permitted;
    }
  }
  // This thread is kvmem's own and only for this device, which stays its current one.
  void adopt_thread() noexcept;

  // Throws what an error means: DeviceLost, InvalidArgument (a capture, another device's handle) or
  // CopyFailed.
  void expect_success(const char* function, Error error) const;
  [[nodiscard]] std::string text_of(Error error) const;  // "cudaErrorInvalidValue (1)"

  [[nodiscard]] bool lost() const noexcept { return lost_by_.load() != success; }
  [[nodiscard]] const ProcessMark& mark() const noexcept { return mark_; }

 private:
  struct Work {
    Error (*run)(void* it, const Functions&);
    void* it;
  };
  Error run(const Work& work, bool stays);
  Error run_elsewhere(const Work& work);
  [[nodiscard]] bool may_go_back_to(int device) const noexcept;
  Error note(Error error) noexcept;

  const std::shared_ptr<const Cudart> runtime_;
  const int ordinal_;
  const ProcessMark mark_;
  std::atomic<Error> lost_by_{success};
};

}  // namespace kvmem::cuda
