#include "device/cuda/cuda_calls.hpp"

#include <algorithm>
#include <iterator>
#include <system_error>
#include <thread>

#include "base/error.hpp"
#include "base/signals.hpp"

namespace kvmem::cuda {

bool is_sticky(Error error) noexcept {
  // Those of which CUDA's header says that the process must be started anew, and those that tell of
  // a context, a runtime or a device that is gone.
  constexpr Error sticky[] = {
      cudart_unloading,     ecc_uncorrectable,
      nvlink_uncorrectable, contained,
      illegal_address,      launch_timeout,
      context_is_destroyed, device_assert,
      hardware_stack_error, illegal_instruction,
      misaligned_address,   invalid_address_space,
      invalid_pc,           launch_failure,
      tensor_memory_leak,   mps_client_terminated,
      external_device,      unknown,
  };
  return std::ranges::find(sticky, error) != std::end(sticky);
}

bool is_about_capture(Error error) noexcept {
  return error >= stream_capture_unsupported && error <= stream_capture_wrong_thread;
}

Error Calls::run(const Work& work, bool stays) {
  mark_.expect_same_process("the device");
  const DeviceWork now;
  if (!DeviceWork::may_begin())
    throw Closed("the process is exiting: the device is not called any more");
  if (lost()) expect_success("the device is lost", lost_by_.load());
  const Functions& call = runtime_->call;
  if (call.peek_at_last_error() != success) {
    if (stays) {
      throw InvalidArgument(
          "a per-thread default stream of a thread that has an error pending: look at the error "
          "first");
    }
    return run_elsewhere(work);
  }
  int before = ordinal_;
  Error error = call.get_device(&before);
  const bool moves = error == success && before != ordinal_;
  if (moves && stays) {
    throw InvalidArgument(
        text("a per-thread default stream is of the thread's current device, cuda:", before,
             ": make cuda:", ordinal_, " the current one first"));
  }
  if (moves && !may_go_back_to(before)) return run_elsewhere(work);
  // First, since to make a device current is not for a thread during a capture either. It makes a
  // context where there is none; here there is one.
  CaptureMode mode = capture_relaxed;
  const bool relaxed = call.thread_exchange_capture_mode(&mode) == success;
  if (moves) error = call.set_device(ordinal_);
  if (error == success) error = work.run(work.it, call);
  if (moves) static_cast<void>(call.set_device(before));
  if (relaxed) static_cast<void>(call.thread_exchange_capture_mode(&mode));
  static_cast<void>(call.get_last_error());  // it is ours: there was none
  return note(error);
}

Error Calls::run_elsewhere(const Work& work) {
  Error error = success;
  try {
    const SignalsBlocked blocked;
    std::thread([&] {
      const Functions& call = runtime_->call;
      error = call.set_device(ordinal_);  // before anything that would make a context on device 0
      if (error != success) return;
      CaptureMode mode = capture_relaxed;
      static_cast<void>(call.thread_exchange_capture_mode(&mode));
      error = work.run(work.it, call);
    }).join();
  } catch (const std::system_error&) {
    return operating_system;  // no thread to be had; nothing was called
  }
  return note(error);
}

void Calls::adopt_thread() noexcept {
  const DeviceWork now;
  if (DeviceWork::may_begin() && !mark_.forked() && !lost())
    static_cast<void>(note(runtime_->call.set_device(ordinal_)));
}

bool Calls::may_go_back_to(int device) const noexcept {
  // A thread that was never told has device 0; one that is elsewhere was told.
  PrimaryContextGetState* const state = runtime_->call.primary_context_get_state;
  if (state == nullptr) return device != 0;
  unsigned flags = 0;
  int active = 0;
  return state(device, &flags, &active) == success && active != 0;
}

Error Calls::note(Error error) noexcept {
  Error none = success;
  if (is_sticky(error)) lost_by_.compare_exchange_strong(none, error);
  return error;
}

std::string Calls::text_of(Error error) const {
  return text(runtime_->call.get_error_name(error), " (", error, ")");
}

void Calls::expect_success(const char* function, Error error) const {
  if (error == success) return;
  const std::string message = text("cuda:", ordinal_, ": ", function, ": ", text_of(error));
  if (is_sticky(error)) {
    throw DeviceLost(text(message,
                          "; nothing on the device can be trusted any more, and CUDA does ",
                          "not recover: the process must be started anew"));
  }
  if (is_about_capture(error))
    throw InvalidArgument(text(message, "; a stream that is capturing a graph cannot be used"));
  if (error == invalid_resource_handle)
    throw InvalidArgument(text(message, "; the stream or event is not of this device"));
  throw CopyFailed(message);
}

}  // namespace kvmem::cuda
