#include "device/cuda/cuda_device.hpp"

#include <optional>
#include <utility>

#include "base/check.hpp"
#include "device/cuda/cuda_calls.hpp"
#include "device/cuda/cuda_clock.hpp"
#include "device/cuda/cuda_copies.hpp"

namespace kvmem::cuda {

namespace {

constexpr std::size_t most_descriptors = std::size_t{1} << 20;
constexpr std::size_t most_waiting_copies = 512;  // the driver's queue of a stream has about 1000
constexpr std::uintptr_t first_page = 4096;  // where nothing is: no handle of a stream or event

class RuntimeDevice final : public CudaDevice {
 public:
  RuntimeDevice(std::shared_ptr<const Cudart> runtime, const Options& options);

  [[nodiscard]] const DeviceInfo& info() const noexcept override { return info_; }
  [[nodiscard]] Nanoseconds now() const noexcept override { return EventClock::now(); }

  [[nodiscard]] void* allocate(std::size_t bytes) override;
  void deallocate(void* base, std::size_t bytes) noexcept override;
  void pin(void* base, std::size_t bytes) override {
    register_memory(base, bytes, host_register_portable);
  }
  void pin_read_only(void* base, std::size_t bytes) override;
  bool unpin(void* base, std::size_t bytes) noexcept override;

  [[nodiscard]] StreamHandle create_stream() override;
  void destroy_stream(StreamHandle stream) noexcept override;
  [[nodiscard]] std::uint64_t stream_id(StreamHandle stream) override;

  [[nodiscard]] EventHandle create_event(bool timing) override;
  void destroy_event(EventHandle event) noexcept override;
  void record(EventHandle event, StreamHandle stream) override;
  void wait(StreamHandle stream, EventHandle event) override;
  [[nodiscard]] EventState query(EventHandle event) noexcept override;
  [[nodiscard]] bool recorded(EventHandle event) const override;
  [[nodiscard]] Nanoseconds event_time(EventHandle event) override;

  [[nodiscard]] bool must_leak() const noexcept { return calls_.mark().must_leak(); }

  void adopt_thread() noexcept override { calls_.adopt_thread(); }
  void copy(const CopyDescriptors& batch, Direction direction, SourceAccess access,
            StreamHandle stream) override;
  void sleep(std::uint64_t seen, Nanoseconds at_most, bool help) override {
    progress().sleep(seen, std::chrono::nanoseconds(at_most),
                     help ? Progress::Sleeper::waiter : Progress::Sleeper::reaper);
  }

  [[nodiscard]] std::string copy_path() const override { return copies_.path(); }
  [[nodiscard]] const DeviceFacts& facts() const noexcept override { return facts_; }
  [[nodiscard]] const Cudart& runtime() const noexcept override { return calls_.runtime(); }

 private:
  void register_memory(void* base, std::size_t bytes, unsigned flags);
  static Error expect_registered(const Functions& call, void* base) noexcept;

  mutable Calls calls_;
  const DeviceFacts facts_;
  DeviceInfo info_;
  Copies copies_;
  EventClock clock_{calls_};
};

RuntimeDevice::RuntimeDevice(std::shared_ptr<const Cudart> runtime, const Options& options)
    : calls_(std::move(runtime), options.ordinal),
      facts_(facts_of(calls_.runtime(), options.ordinal)),
      copies_(calls_.runtime(), facts_, options) {
  info_.kind = "cuda";
  info_.name = text("cuda:", options.ordinal);
  if (!facts_.unified_addressing.value_or(false))
    throw DeviceUnavailable(text(info_.name, " has no unified addressing (attribute 41)"));
  std::size_t free = 0;
  const Error error = calls_.run(
      [&](const Functions& call) { return call.mem_get_info(&free, &info_.memory_bytes); });
  if (error != success) {
    throw DeviceUnavailable(text(info_.name, " cannot be used: ", calls_.text_of(error),
                                 facts_.exclusive_process.value_or(false)
                                     ? "; it takes one process at a time (exclusive mode)"
                                     : ""));
  }
  info_.copy_engines = static_cast<unsigned>(facts_.copy_engines.value_or(1));
  info_.needs_pinned_host = true;
  info_.max_descriptors = options.max_descriptors;
  info_.copy_kernel = "copy engines";
  info_.wakes_sleepers = false;
  info_.calls_block = true;
  info_.numa_node = facts_.numa_node;
  if (!copies_.in_batches()) info_.most_waiting_copies = most_waiting_copies;
}

// ---- memory ----

void* RuntimeDevice::allocate(std::size_t bytes) {
  KVMEM_EXPECTS(bytes > 0, "device memory of zero bytes");
  void* base = nullptr;
  std::size_t free = 0, total = info_.memory_bytes;
  const Error error = calls_.run([&](const Functions& call) {
    // What cannot be rounded up is an invalid value to the runtime.
    const Error result = bytes <= total ? call.malloc(&base, bytes) : memory_allocation;
    if (result == memory_allocation) static_cast<void>(call.mem_get_info(&free, &total));
    return result;
  });
  if (error == memory_allocation) {
    throw CapacityError(text("cannot allocate device memory: ", calls_.text_of(error)),
                        {text("bytes of ", info_.name), bytes, free, total, total - free, 0});
  }
  calls_.expect_success("cudaMalloc", error);
  return base;
}

// In practice cudaFree waits for what may still touch memory that cudaMalloc gave, though CUDA only
// says that it may. Engines bring their own memory.
void RuntimeDevice::deallocate(void* base, std::size_t) noexcept {
  calls_.run_quietly([&](const Functions& call) { return call.free(base); });
}

void RuntimeDevice::pin_read_only(void* base, std::size_t bytes) {
  if (!facts_.host_register_read_only.value_or(false)) {
    throw CapacityError(text(info_.name,
                             " cannot register memory that may only be read "
                             "(attribute 113): stage it"),
                        {"cudaHostRegister", bytes});
  }
  register_memory(base, bytes, host_register_portable | host_register_read_only_flag);
}

void RuntimeDevice::register_memory(void* base, std::size_t bytes, unsigned flags) {
  KVMEM_EXPECTS(bytes > 0 && bytes % slot_alignment_bytes == 0 &&
                    reinterpret_cast<std::uintptr_t>(base) % slot_alignment_bytes == 0,
                "only whole pages can be pinned, not ", bytes, " bytes at ", base);
  const Shortage shortage{"cudaHostRegister", bytes};
  if (!facts_.host_register.value_or(true))
    throw CapacityError(text(info_.name, " cannot register host memory (attribute 99)"), shortage);
  const Error error = calls_.run([&](const Functions& call) {
    const Error result = call.host_register(base, bytes, flags);
    // Where the device uses the host's page tables (Grace), registering locks nothing.
    if (result == success && !facts_.uses_host_page_tables.value_or(false))
      return expect_registered(call, base);
    // WSL says unknown where it means too much; a context that is gone says so to the next call
    // too.
    std::size_t free = 0, total = 0;
    return result == unknown && call.mem_get_info(&free, &total) == success ? memory_allocation
                                                                            : result;
  });
  KVMEM_EXPECTS(error != host_memory_already_registered, bytes, " bytes at ", base,
                " are pinned already, or some of them");
  if (error != success && !is_sticky(error)) {
    throw CapacityError(text("cannot register host memory: ", calls_.text_of(error),
                             ": less memory, a higher limit of the container, or on WSL a larger "
                             "memory= in .wslconfig may help"),
                        shortage);
  }
  calls_.expect_success("cudaHostRegister", error);
}

// What the runtime does not know as host memory it would copy synchronously, without a word.
Error RuntimeDevice::expect_registered(const Functions& call, void* base) noexcept {
  PointerAttributes attributes;
  const Error error = call.pointer_get_attributes(&attributes, base);
  if (error == success && attributes.type == memory_host) return success;
  static_cast<void>(call.host_unregister(base));
  return error == success ? host_memory_not_registered : error;
}

bool RuntimeDevice::unpin(void* base, std::size_t) noexcept {
  const Error error =
      calls_.run_quietly([&](const Functions& call) { return call.host_unregister(base); });
  return error == success || error == host_memory_not_registered;
}

// ---- streams ----

StreamHandle RuntimeDevice::create_stream() {
  Stream stream = nullptr;
  const Error error = calls_.run([&](const Functions& call) {
    // Not held back by the legacy default stream, on which most engines compute.
    return call.stream_create_with_flags(&stream, stream_non_blocking);
  });
  calls_.expect_success("cudaStreamCreateWithFlags", error);
  return reinterpret_cast<StreamHandle>(stream);
}

void RuntimeDevice::destroy_stream(StreamHandle stream) noexcept {
  calls_.run_quietly([&](const Functions& call) { return call.stream_destroy(stream_of(stream)); });
}

std::uint64_t RuntimeDevice::stream_id(StreamHandle stream) {
  const bool is_default = is_legacy(stream) || is_per_thread(stream);  // of any device
  KVMEM_EXPECTS(is_default || stream >= first_page, "stream ", stream,
                " is no handle of a CUDA stream");
  unsigned long long id = 0;
  int device = calls_.ordinal();
  const Error error = calls_.run(
      [&](const Functions& call) {
        // What is queued on a stream that captures would become part of the graph, or end it.
        CaptureStatus capture = capture_none;
        Error result = call.stream_is_capturing(stream_of(stream), &capture);
        if (result == success && capture != capture_none) result = stream_capture_unsupported;
        if (result == success && call.stream_get_device != nullptr && !is_default)
          result = call.stream_get_device(stream_of(stream), &device);
        // A driver before 12.8 does not know. The record that follows is refused then.
        if (result == call_requires_newer_driver || result == not_supported) result = success;
        return result == success ? call.stream_get_id(stream_of(stream), &id) : result;
      },
      is_per_thread(stream));
  KVMEM_EXPECTS(!is_about_capture(error), "stream ", stream,
                " is capturing a graph and cannot be used meanwhile");
  KVMEM_EXPECTS(error != invalid_resource_handle, "stream ", stream, " is not of ", info_.name);
  calls_.expect_success("cudaStreamGetId", error);
  KVMEM_EXPECTS(device == calls_.ordinal(), "stream ", stream, " is of cuda:", device, ", not of ",
                info_.name);
  return id;
}

// ---- events ----

EventHandle RuntimeDevice::create_event(bool timing) {
  Event event = nullptr;
  const Error error = calls_.run([&](const Functions& call) {
    return call.event_create_with_flags(&event, timing ? event_default : event_disable_timing);
  });
  calls_.expect_success("cudaEventCreateWithFlags", error);
  return reinterpret_cast<EventHandle>(event);
}

void RuntimeDevice::destroy_event(EventHandle event) noexcept {
  calls_.run_quietly([&](const Functions& call) { return call.event_destroy(event_of(event)); });
}

// The runtime does not tell. But torch makes an event only when it is first recorded. One that was
// recorded in a capture is refused here, before a stream of ours waits for it: the wait would pull
// that stream into the capture.
bool RuntimeDevice::recorded(EventHandle event) const {
  if (event == 0) return false;
  KVMEM_EXPECTS(event >= first_page, "event ", event, " is no handle of a CUDA event");
  const Error error =
      calls_.run([&](const Functions& call) { return call.event_query(event_of(event)); });
  KVMEM_EXPECTS(!is_about_capture(error), "event ", event,
                " was recorded in a stream that is capturing a graph");
  return true;
}

void RuntimeDevice::record(EventHandle event, StreamHandle stream) {
  const Error error = calls_.run(
      [&](const Functions& call) { return call.event_record(event_of(event), stream_of(stream)); },
      is_per_thread(stream));
  calls_.expect_success("cudaEventRecord", error);
}

void RuntimeDevice::wait(StreamHandle stream, EventHandle event) {
  const Error error = calls_.run(
      [&](const Functions& call) {
        return call.stream_wait_event(stream_of(stream), event_of(event), 0);
      },
      is_per_thread(stream));
  calls_.expect_success("cudaStreamWaitEvent", error);
}

EventState RuntimeDevice::query(EventHandle event) noexcept {
  if (calls_.mark().forked()) return EventState::lost;
  if (process_is_exiting()) return EventState::pending;  // nobody will learn any more
  if (calls_.lost()) return EventState::lost;
  try {
    const Error error =
        calls_.run([&](const Functions& call) { return call.event_query(event_of(event)); });
    if (error == success) return EventState::done;
    if (error == not_ready) return EventState::pending;
    return is_sticky(error) ? EventState::lost : EventState::failed;
  } catch (const DeviceLost&) {
    return EventState::lost;
  } catch (...) {  // the exit began meanwhile, or no thread was to be had
    return EventState::failed;
  }
}

Nanoseconds RuntimeDevice::event_time(EventHandle event) { return clock_.time_of(event); }

// ---- copies ----

void RuntimeDevice::copy(const CopyDescriptors& batch, Direction direction, SourceAccess access,
                         StreamHandle stream) {
  if (batch.count == 0) return;
  expect_descriptors(batch, info_);
  std::size_t failed = Copies::no_copy;
  const Error error = calls_.run(
      [&](const Functions& call) {
        return copies_.submit(call, batch, direction, access, stream, failed);
      },
      is_per_thread(stream));
  if (error == success) return;
  const bool known = failed < batch.count;
  calls_.expect_success(known ? text("copy ", failed, " of a batch of ", batch.count).c_str()
                              : text("a batch of ", batch.count, " copies").c_str(),
                        error);
}

}  // namespace

std::shared_ptr<CudaDevice> make_cuda_device(std::shared_ptr<const Cudart> runtime,
                                             const Options& options) {
  KVMEM_EXPECTS(options.max_descriptors > 0 && options.max_descriptors <= most_descriptors,
                "max_descriptors is ", options.max_descriptors, ", 1 to ", most_descriptors);
  const Status status = examine(runtime);
  if (status.usability != Usability::usable) throw DeviceUnavailable(status.sentence);
  KVMEM_EXPECTS(options.ordinal >= 0 && options.ordinal < status.device_count,
                "there is no cuda:", options.ordinal, ": the driver shows ", status.device_count,
                status.device_count == 1 ? " device" : " devices", " to this process");
  // Leaked whole where it must be: a thread may sleep on its progress for ever.
  return {new RuntimeDevice(std::move(runtime), options), [](RuntimeDevice* device) {
            if (!device->must_leak()) delete device;
          }};
}

}  // namespace kvmem::cuda
