// The fake runtime has the semantics of the real one, in both builds.
#include <atomic>
#include <chrono>
#include <numeric>
#include <string_view>
#include <thread>

#include "cuda/fake_program.hpp"
#include "support/child_process.hpp"
#include "support/scripted_device.hpp"

namespace kvmem::test {
namespace {

class FakeRuntime : public FakeTest {
 protected:
  Error count(int* devices) { return call<cuda::GetDeviceCount>("cudaGetDeviceCount", devices); }
  Error attribute(int* value, cuda::Attribute which, int device = 0) {
    return call<cuda::DeviceGetAttribute>("cudaDeviceGetAttribute", value, which, device);
  }
  [[nodiscard]] bool has_context(int device) {
    unsigned flags = 7;
    int active = 7;
    EXPECT_EQ(
        call<cuda::PrimaryContextGetState>("cuDevicePrimaryCtxGetState", device, &flags, &active),
        0);
    EXPECT_EQ(active, fake.has_context(device));
    return active != 0;
  }
  [[nodiscard]] unsigned long long id_of(Stream it) {
    unsigned long long id = 0;
    EXPECT_EQ(call<cuda::StreamGetId>("cudaStreamGetId", it, &id), 0);
    return id;
  }
  [[nodiscard]] cuda::CaptureStatus capture_of(Stream it) {
    cuda::CaptureStatus status = -1;
    EXPECT_EQ(call<cuda::StreamIsCapturing>("cudaStreamIsCapturing", it, &status), 0);
    return status;
  }
};
INSTANTIATE_TEST_SUITE_P(Fake, FakeRuntime, ::testing::Values(12, 13), build_name);

Stream default_stream(std::uintptr_t handle) { return reinterpret_cast<Stream>(handle); }

// ---- bytes ----

TEST_P(FakeRuntime, ADeviceThatRunsFreelyMovesBytesBothWays) {
  const Pages host(2 << 20);
  for (std::size_t i = 0; i < 1 << 20; ++i) *host.at(i) = static_cast<std::byte>(i * 7);
  ASSERT_EQ(register_(host), 0);
  void* const device = device_memory(1 << 20);
  const Stream on = stream();
  const Event behind = event();
  Arrays up, down;
  for (std::size_t at = 0; at < 1 << 20; at += 1 << 18) {
    up.add(static_cast<std::byte*>(device) + at, host.at(at), 1 << 18);
    down.add(host.at((1 << 20) + at), static_cast<std::byte*>(device) + at, 1 << 18);
  }
  EXPECT_EQ(batch(up, on), 0);
  EXPECT_EQ(batch(down, on), 0);
  EXPECT_EQ(record(behind, on), 0);
  Error error = query(behind);
  while (error == cuda::not_ready) error = query(behind);
  EXPECT_EQ(error, 0);
  EXPECT_EQ(std::memcmp(host.at(0), host.at(1 << 20), 1 << 20), 0);
  EXPECT_EQ(free(device), 0);
  EXPECT_EQ(unregister(host.base()), 0);
}

TEST_P(FakeRuntime, CopiesOneByOneMoveBytesToo) {
  const Pages host(2 * 4096, 3);
  ASSERT_EQ(register_(host), 0);
  void* const device = device_memory();
  std::memset(host.base(), 5, 4096);
  for (const Stream on : {stream(), default_stream(0), default_stream(1), default_stream(2)}) {
    std::memset(host.at(4096), 0, 4096);
    for (std::size_t at = 0; at < 4096; at += 32)
      EXPECT_EQ(copy(static_cast<std::byte*>(device) + at, host.at(at), 32, on), 0);
    EXPECT_EQ(copy(host.at(4096), device, 4096, on), 0);
    EXPECT_EQ(copy(host.at(4096), device, 0, on), 0);
    EXPECT_EQ(synchronize(on), 0);
    EXPECT_EQ(std::memcmp(host.at(0), host.at(4096), 4096), 0);
  }
}

TEST_P(FakeRuntime, TheBytesMoveThoughNobodyCalls) {
  const Pages host(2 * 4096, 9);
  ASSERT_EQ(register_(host), 0);
  void* const device = device_memory();
  const Stream on = stream();
  EXPECT_EQ(copy(device, host.base(), 4096, on), 0);
  const ModelDevice& model = fake.model();
  while (model.may_touch(device, 4096)) std::this_thread::yield();
}

TEST_P(FakeRuntime, ABatchMustBeWhole) {
  const Pages host;
  ASSERT_EQ(register_(host), 0);
  void* const device = device_memory();
  const Stream on = stream();
  Arrays none, no_source, no_attribute, no_bytes;
  EXPECT_EQ(batch(none, on), cuda::invalid_value);
  no_source.add(device, host.base(), 8);
  no_source.add(device, nullptr, 8);
  EXPECT_EQ(batch(no_source, on), cuda::invalid_value);
  if (GetParam() == 12) {
    EXPECT_EQ(no_source.failed, 1U);
  }
  no_bytes.add(device, host.base(), 0);
  EXPECT_EQ(batch(no_bytes, on), cuda::invalid_value);
  no_attribute.add(device, host.base(), 8);
  EXPECT_EQ(batch(no_attribute, on, 0), cuda::invalid_value);
  if (GetParam() == 12) {
    EXPECT_EQ(no_attribute.failed, static_cast<std::size_t>(-1));
  }
  EXPECT_EQ(copy(static_cast<std::byte*>(device) + 4090, host.base(), 8, on), cuda::invalid_value);
  EXPECT_EQ(last_error(), cuda::invalid_value);
}

// ---- versions, devices, contexts ----

TEST_P(FakeRuntime, EachBuildSaysItsVersion) {
  int runtime = 0, driver = 0;
  EXPECT_EQ(call<cuda::RuntimeGetVersion>("cudaRuntimeGetVersion", &runtime), 0);
  EXPECT_EQ(call<cuda::DriverGetVersion>("cudaDriverGetVersion", &driver), 0);
  EXPECT_EQ(runtime, GetParam() == 12 ? 12090 : 13000);
  EXPECT_EQ(driver, runtime);
}

TEST_P(FakeRuntime, WithoutADriverEveryCallSaysSoAndTheCountIsLeftAlone) {
  for (const int version : {0, GetParam() * 1000 - 10}) {
    fake.set_driver_version(version);
    int devices = -7, device = -7, driver = -7, runtime = 0;
    EXPECT_EQ(count(&devices), cuda::insufficient_driver);
    EXPECT_EQ(devices, -7);
    EXPECT_EQ(call<cuda::GetDevice>("cudaGetDevice", &device), cuda::insufficient_driver);
    EXPECT_EQ(free(nullptr), cuda::insufficient_driver);
    EXPECT_EQ(query(nullptr), cuda::insufficient_driver);
    EXPECT_EQ(last_error(), cuda::insufficient_driver);
    EXPECT_EQ(last_error(), cuda::insufficient_driver);
    EXPECT_EQ(call<cuda::DriverGetVersion>("cudaDriverGetVersion", &driver), 0);
    EXPECT_EQ(driver, version);
    EXPECT_EQ(call<cuda::RuntimeGetVersion>("cudaRuntimeGetVersion", &runtime), 0);
  }
  fake.set_driver_version(GetParam() * 1000);
  int devices = 0;
  EXPECT_EQ(count(&devices), 0);
  EXPECT_EQ(devices, 1);
}

TEST_P(FakeRuntime, ADriverBefore128LacksTwoFunctions) {
  fake.set_driver_version(12040);
  if (GetParam() == 13) {  // lacks all
    int devices = 0;
    EXPECT_EQ(count(&devices), cuda::insufficient_driver);
    return;
  }
  const Pages host(2 * 4096, 1);
  void* const device = device_memory();
  ASSERT_EQ(register_(host), 0);
  const Stream on = stream();
  int number = -7;
  EXPECT_EQ(call<cuda::StreamGetDevice>("cudaStreamGetDevice", on, &number),
            cuda::call_requires_newer_driver);
  EXPECT_EQ(number, -7);
  for (const std::uintptr_t special : {0U, 1U, 2U}) {
    EXPECT_EQ(call<cuda::StreamGetDevice>("cudaStreamGetDevice", default_stream(special), &number),
              0);
    EXPECT_EQ(number, 0);
  }
  Arrays arrays;
  arrays.add(device, host.base(), 4096);
  EXPECT_EQ(batch(arrays, on), cuda::call_requires_newer_driver);
  EXPECT_FALSE(fake.model().may_touch(device, 4096));
  EXPECT_EQ(copy(device, host.base(), 4096, on), 0);
  EXPECT_EQ(synchronize(on), 0);
  fake.set_driver_version(12080);
  EXPECT_EQ(call<cuda::StreamGetDevice>("cudaStreamGetDevice", on, &number), 0);
  EXPECT_EQ(batch(arrays, on), 0);
  EXPECT_EQ(synchronize(on), 0);
}

TEST_P(FakeRuntime, ABrokenSetUpIsWhatCountingSays) {
  int devices = -7;
  for (const Error error : {cuda::initialization_error, cuda::stub_library, cuda::no_device_found,
                            cuda::system_driver_mismatch, cuda::unknown}) {
    fake.set_count_error(error);
    EXPECT_EQ(count(&devices), error);
    EXPECT_EQ(free(nullptr), error);
  }
  fake.set_count_error(0);
  fake.set_device_count(0);
  EXPECT_EQ(count(&devices), cuda::no_device_found);
}

TEST_P(FakeRuntime, AttributesHaveUsualValuesAndCanBeSet) {
  int value = -7;
  EXPECT_EQ(attribute(&value, cuda::async_engine_count), 0);
  EXPECT_EQ(value, 2);
  EXPECT_EQ(attribute(&value, cuda::can_use_host_pointer), 0);
  EXPECT_EQ(value, 1);
  EXPECT_EQ(attribute(&value, cuda::compute_capability_major), 0);
  EXPECT_EQ(value, 9);
  EXPECT_EQ(attribute(&value, 12345), cuda::invalid_value);
  EXPECT_EQ(attribute(&value, cuda::integrated, 1), cuda::invalid_device);
  fake.set_attribute(0, cuda::host_numa_id, -1);
  EXPECT_EQ(attribute(&value, cuda::host_numa_id), 0);
  EXPECT_EQ(value, -1);
  char id[16] = {};
  using BusId = cuda::DeviceGetPciBusId;
  EXPECT_EQ(call<BusId>("cudaDeviceGetPCIBusId", id, 16, 0), 0);
  EXPECT_EQ(std::string_view(id).size(), 12U);
  fake.set_pci_bus_id(0, "0000:17:00.0");
  EXPECT_EQ(call<BusId>("cudaDeviceGetPCIBusId", id, 12, 0), cuda::invalid_value);
  EXPECT_EQ(call<BusId>("cudaDeviceGetPCIBusId", id, 13, 0), 0);
  EXPECT_STREQ(id, "0000:17:00.0");
  EXPECT_FALSE(has_context(0));
}

TEST_P(FakeRuntime, TheCurrentDeviceIsTheThreadsAndSettingItMakesAContext) {
  fake.set_device_count(3);
  EXPECT_EQ(current_device(), 0);
  EXPECT_FALSE(has_context(0));
  EXPECT_EQ(set_device(2), 0);
  EXPECT_TRUE(has_context(2));
  std::thread([&] {
    EXPECT_EQ(current_device(), 0);
    EXPECT_FALSE(has_context(0));
    const Stream made = stream();
    EXPECT_TRUE(has_context(0));
    int device = -1;
    EXPECT_EQ(call<cuda::StreamGetDevice>("cudaStreamGetDevice", made, &device), 0);
    EXPECT_EQ(device, 0);
  }).join();
  EXPECT_EQ(current_device(), 2);
  EXPECT_EQ(set_device(3), cuda::invalid_device);
  EXPECT_EQ(current_device(), 2);
  EXPECT_FALSE(has_context(1));
  int device = -1;
  EXPECT_EQ(call<cuda::StreamGetDevice>("cudaStreamGetDevice", stream(), &device), 0);
  EXPECT_EQ(device, 2);
  EXPECT_EQ(last_error(), cuda::invalid_device);
}

TEST_P(FakeRuntime, EachCallThatNeedsAContextMakesIt) {
  const Pages host;
  void* base = nullptr;
  std::size_t free_bytes = 0, total = 0;
  const auto expect_context = [&](auto&& needs_one) {
    fake.reset();
    EXPECT_FALSE(has_context(0));
    EXPECT_EQ(needs_one(), 0);
    EXPECT_TRUE(has_context(0));
  };
  expect_context([&] { return malloc(&base, 64); });
  expect_context([&] { return free(nullptr); });
  expect_context([&] { return register_(host); });
  expect_context([&] { return static_cast<void>(event()), 0; });
  expect_context([&] { return call<cuda::MemGetInfo>("cudaMemGetInfo", &free_bytes, &total); });
  EXPECT_GT(total, 0U);
  expect_context([&] {
    cuda::CaptureMode mode = cuda::capture_relaxed;
    return call<cuda::ThreadExchangeCaptureMode>("cudaThreadExchangeStreamCaptureMode", &mode);
  });
}

// On the thread's current device, which need not be the one whose handle it is.
TEST_P(FakeRuntime, MostCallsMakeAContextBesidesAndSomeDoNot) {
  enum Makes { none, made };
  const Pages host;
  const auto look = [&](const char* what, Makes makes, auto&& body) {
    SCOPED_TRACE(what);
    fake.reset();
    fake.set_device_count(2);
    EXPECT_EQ(set_device(1), 0);
    const Stream on = stream();
    const Event from = event(cuda::event_default), to = event(cuda::event_default);
    for (const Event it : {from, to}) EXPECT_EQ(record(it, on), 0);
    EXPECT_EQ(synchronize(to), 0);
    EXPECT_EQ(register_(host), 0);
    EXPECT_FALSE(has_context(0));
    std::thread([&] { EXPECT_EQ(body(on, from, to), 0); }).join();
    EXPECT_EQ(has_context(0), makes == made);
    if (makes == made)
      expect_violation("foreign_context");
    else
      expect_nothing();
  };
  int number = 0;
  float milliseconds = 0;
  char bus[32];
  Arrays arrays;
  look("cudaStreamIsCapturing", made,
       [&](Stream on, Event, Event) { return static_cast<void>(capture_of(on)), 0; });
  look("cudaStreamGetId", made,
       [&](Stream on, Event, Event) { return static_cast<void>(id_of(on)), 0; });
  look("cudaStreamDestroy", made, [&](Stream on, Event, Event) { return destroy(on); });
  look("cudaStreamWaitEvent", made, [&](Stream on, Event it, Event) { return wait(on, it); });
  look("cudaStreamSynchronize", made, [&](Stream on, Event, Event) { return synchronize(on); });
  look("cudaEventDestroy", made, [&](Stream, Event it, Event) { return destroy(it); });
  look("cudaEventRecord", made, [&](Stream on, Event it, Event) { return record(it, on); });
  look("cudaHostUnregister", made, [&](Stream, Event, Event) { return unregister(host.base()); });
  look("cudaMemcpyAsync", made,
       [&](Stream on, Event, Event) { return copy(host.at(0), host.at(64), 0, on); });
  look("cudaMemcpyBatchAsync", made,
       [&](Stream on, Event, Event) { return batch(arrays, on) == cuda::invalid_value ? 0 : 1; });
  look("cudaEventElapsedTime", GetParam() == 12 ? made : none,
       [&](Stream, Event from, Event to) { return elapsed(&milliseconds, from, to); });
  look("cudaEventQuery", none, [&](Stream, Event it, Event) { return query(it); });
  look("cudaEventSynchronize", none, [&](Stream, Event it, Event) { return synchronize(it); });
  look("cudaStreamGetDevice", none, [&](Stream on, Event, Event) {
    return call<cuda::StreamGetDevice>("cudaStreamGetDevice", on, &number);
  });
  look("cudaPointerGetAttributes", none, [&](Stream, Event, Event) {
    cuda::PointerAttributes attributes;
    return call<cuda::PointerGetAttributes>("cudaPointerGetAttributes", &attributes, host.base());
  });
  look("those without a handle", none, [&](Stream, Event, Event) {
    EXPECT_EQ(current_device(), 0);
    EXPECT_EQ(count(&number), 0);
    EXPECT_EQ(attribute(&number, cuda::integrated), 0);
    EXPECT_EQ(call<cuda::DeviceGetPciBusId>("cudaDeviceGetPCIBusId", bus, 32, 1), 0);
    EXPECT_EQ(call<cuda::DriverGetVersion>("cudaDriverGetVersion", &number), 0);
    EXPECT_EQ(call<cuda::RuntimeGetVersion>("cudaRuntimeGetVersion", &number), 0);
    EXPECT_EQ(peek(), 0);
    return last_error();
  });
}

// ---- errors ----

TEST_P(FakeRuntime, TheLastErrorIsTheThreadsAndSuccessDoesNotClearIt) {
  EXPECT_EQ(peek(), 0);
  EXPECT_EQ(set_device(99), cuda::invalid_device);
  EXPECT_EQ(current_device(), 0);
  EXPECT_EQ(peek(), cuda::invalid_device);
  std::thread([&] { EXPECT_EQ(peek(), 0); }).join();
  EXPECT_EQ(last_error(), cuda::invalid_device);
  EXPECT_EQ(last_error(), 0);
}

TEST_P(FakeRuntime, AnEventThatIsPendingLeavesAnErrorThatDoesNotStay) {
  VirtualDevice& model = attach();
  const Pages host;
  ASSERT_EQ(register_(host), 0);
  const Stream on = stream();
  const Event it = event();
  EXPECT_EQ(copy(device_memory(), host.base(), 64, on), 0);
  EXPECT_EQ(record(it, on), 0);
  EXPECT_EQ(query(it), cuda::not_ready);
  EXPECT_EQ(call<OfStream>("cudaStreamQuery", on), cuda::not_ready);
  EXPECT_EQ(last_error(), cuda::not_ready);
  EXPECT_EQ(last_error(), 0);
  while (model.step()) {
  }
  EXPECT_EQ(query(it), 0);
  EXPECT_EQ(call<OfStream>("cudaStreamQuery", on), 0);
}

TEST_P(FakeRuntime, AStickyErrorStaysAndNothingClearsIt) {
  fake.set_device_count(2);
  const Event it = event();
  EXPECT_EQ(set_device(1), 0);
  const Event other = event();
  fake.fail("cudaEventQuery", 1, 1, cuda::illegal_address, 0);
  EXPECT_EQ(query(it), cuda::illegal_address);
  EXPECT_EQ(query(it), cuda::illegal_address);
  EXPECT_EQ(last_error(), cuda::illegal_address);
  EXPECT_EQ(last_error(), cuda::illegal_address);
  EXPECT_EQ(query(other), 0);  // of the other device
  std::thread([&] {
    void* base = nullptr;
    EXPECT_EQ(peek(), 0);
    EXPECT_EQ(malloc(&base, 64), cuda::illegal_address);
    EXPECT_EQ(destroy(it), cuda::illegal_address);
  }).join();
}

TEST_P(FakeRuntime, WhatTheModelSaysBecomesAnError) {
  ScriptedDevice model;
  fake.attach(0, model);
  const Stream on = stream();
  const Event it = event();
  EXPECT_EQ(record(it, on), 0);
  model.fail(DeviceCall::record, 1);
  EXPECT_EQ(record(it, on), cuda::invalid_value);
  model.fail(DeviceCall::query, 1);
  EXPECT_EQ(query(it), cuda::invalid_value);
  EXPECT_EQ(query(it), 0);
  model.fail(DeviceCall::create_event, 1, Failure::no_memory);
  Event none = nullptr;
  EXPECT_EQ(call<cuda::EventCreateWithFlags>("cudaEventCreateWithFlags", &none, 0U),
            cuda::memory_allocation);
  const Pages host;
  model.fail(DeviceCall::pin, 1);
  EXPECT_EQ(register_(host), cuda::memory_allocation);
  EXPECT_EQ(register_(host), 0);
  EXPECT_EQ(unregister(host.base()), 0);
  model.lose();
  EXPECT_EQ(query(it), cuda::illegal_address);
  const std::size_t before = model.calls().size();
  EXPECT_EQ(record(it, on), cuda::illegal_address);
  EXPECT_EQ(model.calls().size(), before) << "a lost device is not asked again";
}

TEST_P(FakeRuntime, EachCallIsOneOfTheModel) {
  ScriptedDevice model;
  fake.attach(0, model);
  const Pages host;
  const Stream on = stream(), other = stream();
  const Event it = event(cuda::event_default);
  ASSERT_EQ(register_(host), 0);
  fake.declare_device_memory(0, host.at(2048), 2048);
  void* const device = device_memory();
  model.forget_calls();
  Arrays arrays;
  arrays.add(device, host.base(), 64);
  EXPECT_EQ(batch(arrays, on), 0);
  EXPECT_EQ(copy(host.base(), device, 64, on), 0);
  EXPECT_EQ(record(it, on), 0);
  EXPECT_EQ(wait(other, it), 0);
  EXPECT_EQ(query(it), cuda::not_ready);
  EXPECT_EQ(id_of(on), model.stream_id(reinterpret_cast<StreamHandle>(on)));
  model.run_all();
  float milliseconds = -1;
  EXPECT_EQ(elapsed(&milliseconds, it, it), 0);
  EXPECT_EQ(milliseconds, 0.0F);
  EXPECT_EQ(query(it), 0);
  std::vector<DeviceCall> kinds;
  for (const Call& one : model.calls()) kinds.push_back(one.kind);
  using enum DeviceCall;
  EXPECT_EQ(kinds, (std::vector{DeviceCall::copy, DeviceCall::copy, DeviceCall::record,
                                DeviceCall::wait, DeviceCall::query, stream_id, stream_id,
                                event_time, event_time, DeviceCall::query}));
  ASSERT_EQ(model.pending_copies(), 0U);
}

TEST_P(FakeRuntime, PlannedFaultsComeWhenTheyShould) {
  const Event it = event();
  const unsigned long long before = fake.calls("cudaEventQuery"), all = fake.calls("*");
  fake.fail("cudaEventQuery", 2, 2, cuda::operating_system, 0);
  EXPECT_EQ(query(it), 0);
  EXPECT_EQ(peek(), 0);
  EXPECT_EQ(query(it), cuda::operating_system);
  EXPECT_EQ(query(it), cuda::operating_system);
  EXPECT_EQ(query(it), 0);
  EXPECT_EQ(last_error(), cuda::operating_system);
  EXPECT_EQ(fake.calls("cudaEventQuery"), before + 4);
  EXPECT_EQ(fake.calls("*"), all + 4);
  EXPECT_EQ(fake.faults(), 2U);
  fake.fail("*", 2, 1, cuda::operating_system, 0);
  EXPECT_EQ(query(it), 0);
  EXPECT_EQ(peek(), 0);  // does not count
  EXPECT_EQ(set_device(0), cuda::operating_system);
  fake.fail("*", 1, 1000, cuda::operating_system, 0);
  fake.forget_faults();
  EXPECT_EQ(query(it), 0);
}

TEST_P(FakeRuntime, AFaultMayHaveItsEffectAllTheSame) {
  void* base = nullptr;
  fake.fail("cudaMalloc", 1, 2, cuda::memory_allocation, 1);
  EXPECT_EQ(malloc(&base, 64), cuda::memory_allocation);
  EXPECT_EQ(fake.allocated_bytes(0), 64U);
  ASSERT_NE(base, nullptr);
  EXPECT_EQ(free(base), 0);
  fake.forget_faults();
  fake.fail("cudaMalloc", 1, 1, cuda::memory_allocation, 0);
  EXPECT_EQ(malloc(&base, 64), cuda::memory_allocation);
  EXPECT_EQ(fake.allocated_bytes(0), 0U);
}

TEST_P(FakeRuntime, EveryErrorHasAName) {
  const auto name = [&](Error error) {
    return std::string(call<cuda::GetErrorName>("cudaGetErrorName", error));
  };
  EXPECT_EQ(name(600), "cudaErrorNotReady");
  EXPECT_EQ(name(700), "cudaErrorIllegalAddress");
  EXPECT_EQ(name(12345), "unrecognized error code");
  EXPECT_STREQ(call<cuda::GetErrorString>("cudaGetErrorString", 2), "out of memory");
}

TEST_P(FakeRuntime, AForkedChildOfAProcessThatUsedADeviceCannotUseIt) {
  static_cast<void>(event());
  EXPECT_TRUE(true_in_child([&] {
    int device = 0;
    return call<cuda::GetDevice>("cudaGetDevice", &device) == cuda::initialization_error;
  }));
  fake.reset();
  EXPECT_TRUE(true_in_child([&] { return current_device() == 0 && stream() != nullptr; }));
}

// ---- memory ----

TEST_P(FakeRuntime, RegistrationsMayNotOverlapAndGoByTheirBase) {
  const Pages host(4 * 4096);
  EXPECT_EQ(register_(host.at(4096), 2 * 4096), 0);
  EXPECT_EQ(fake.registered_bytes(), 2U * 4096);
  EXPECT_EQ(register_(host.at(4096), 2 * 4096), cuda::host_memory_already_registered);
  EXPECT_EQ(register_(host.at(0), 2 * 4096), cuda::host_memory_already_registered);
  EXPECT_EQ(register_(host.at(2 * 4096), 2 * 4096), cuda::host_memory_already_registered);
  EXPECT_EQ(register_(host.at(0), 4096), 0);
  EXPECT_EQ(register_(host.at(3 * 4096), 0), cuda::invalid_value);
  EXPECT_EQ(register_(nullptr, 4096), cuda::invalid_value);
  EXPECT_EQ(register_(host.at(3 * 4096), std::size_t{512} << 30), cuda::memory_allocation);
  EXPECT_EQ(unregister(host.at(2 * 4096)), cuda::host_memory_not_registered);
  EXPECT_EQ(unregister(host.at(4096)), 0);
  EXPECT_EQ(unregister(host.at(4096)), cuda::host_memory_not_registered);
  EXPECT_EQ(register_(host.at(3 * 4096), 4096, 8), cuda::not_supported);
  EXPECT_EQ(unregister(host.at(0)), 0);
  EXPECT_EQ(fake.registered_bytes(), 0U);
}

TEST_P(FakeRuntime, PointerAttributesHaveTheSizeOfTheBuild) {
  const std::size_t bytes = GetParam() == 12 ? 24 : 88;
  const Pages host;
  ASSERT_EQ(register_(host), 0);
  void* const device = device_memory();
  const auto look = [&](const void* at) {
    cuda::PointerAttributes attributes;
    std::memset(static_cast<void*>(&attributes), 0x5A, sizeof attributes);
    EXPECT_EQ(call<cuda::PointerGetAttributes>("cudaPointerGetAttributes", &attributes, at), 0);
    const auto* const raw = reinterpret_cast<const unsigned char*>(&attributes);
    EXPECT_NE(raw[bytes - 1], 0x5A);
    EXPECT_EQ(raw[bytes], 0x5A);
    return attributes;
  };
  const cuda::PointerAttributes of_device = look(static_cast<std::byte*>(device) + 8);
  EXPECT_EQ(of_device.type, cuda::memory_device);
  EXPECT_EQ(of_device.device, 0);
  EXPECT_EQ(of_device.device_pointer, static_cast<std::byte*>(device) + 8);
  const cuda::PointerAttributes of_host = look(host.at(8));
  EXPECT_EQ(of_host.type, cuda::memory_host);
  EXPECT_EQ(of_host.host_pointer, host.at(8));
  EXPECT_EQ(look(&bytes).type, cuda::memory_unregistered);
}

TEST_P(FakeRuntime, PinnedMemoryOfTheRuntimeNeedsNoRegistration) {
  void* base = nullptr;
  EXPECT_EQ(call<HostAlloc>("cudaHostAlloc", &base, std::size_t{100}, 0U), 0);
  EXPECT_EQ(unregister(base), cuda::host_memory_not_registered);
  const Stream on = stream();
  EXPECT_EQ(copy(device_memory(), base, 100, on), 0);
  EXPECT_EQ(synchronize(on), 0);
  EXPECT_EQ(call<cuda::Free>("cudaFreeHost", base), 0);
  EXPECT_EQ(call<cuda::Free>("cudaFreeHost", base), cuda::invalid_value);
  EXPECT_EQ(free(base), cuda::invalid_value);
}

TEST_P(FakeRuntime, FreeingWaitsForTheCopiesOfADeviceThatRunsFreely) {
  const Pages host;
  ASSERT_EQ(register_(host), 0);
  auto& model = static_cast<VirtualDevice&>(fake.model());
  const Stream on = stream();
  void* const device = device_memory();
  model.hold_copies(1);
  EXPECT_EQ(copy(device, host.base(), 64, on), 0);
  std::atomic<bool> freed = false;
  std::thread other([&] {
    EXPECT_EQ(free(device), 0);
    freed = true;
  });
  const auto violations = fake.function<std::size_t()>("kvmem_fake_violations");
  while (violations() == 0) std::this_thread::yield();  // it is told that there is a copy
  EXPECT_FALSE(freed);
  model.release_copies();
  other.join();
  expect_violation("freed_in_flight");
  EXPECT_EQ(fake.allocated_bytes(0), 0U);
}

// ---- streams and events ----

TEST_P(FakeRuntime, AnEventNeverRecordedIsDoneAndWaitingForItIsNothing) {
  fake.enable("wait_unrecorded", 0);
  const Event it = event();
  const Stream on = stream();
  EXPECT_EQ(query(it), 0);
  EXPECT_EQ(wait(on, it), 0);
  EXPECT_EQ(synchronize(on), 0);
}

TEST_P(FakeRuntime, AStreamWaitsForAnEventOfAnotherDeviceAsItWasRecordedThen) {
  VirtualDevice& first = attach();
  const auto second = make_virtual_device({});
  fake.attach(1, *second);
  fake.set_device_count(2);
  const Pages host(2 * 4096, 1);
  ASSERT_EQ(register_(host), 0);
  void* const target = device_memory();
  const Stream waiting = stream();
  const Event behind = event();
  EXPECT_EQ(set_device(1), 0);
  void* const source = device_memory();
  const Stream other = stream();
  const Event awaited = event();
  const auto run = [](VirtualDevice& model) {
    while (model.step()) {
    }
  };
  EXPECT_EQ(copy(source, host.base(), 64, other), 0);
  EXPECT_EQ(record(awaited, other), 0);
  EXPECT_EQ(wait(waiting, awaited), 0);
  EXPECT_EQ(copy(target, host.at(64), 64, waiting), 0);
  EXPECT_EQ(set_device(0), 0);
  EXPECT_EQ(record(behind, waiting), 0);
  run(first);
  EXPECT_EQ(query(behind), cuda::not_ready);
  EXPECT_TRUE(first.may_touch(target, 64));
  run(*second);
  EXPECT_EQ(copy(source, host.base(), 64, other), 0);
  EXPECT_EQ(record(awaited, other), 0);  // which is nothing to who waits already
  EXPECT_EQ(query(behind), cuda::not_ready);
  run(first);
  EXPECT_EQ(query(behind), 0);
  EXPECT_EQ(query(awaited), cuda::not_ready);
  run(*second);
  EXPECT_EQ(query(awaited), 0);
  EXPECT_EQ(wait(waiting, awaited), 0);  // done already
  EXPECT_EQ(call<OfStream>("cudaStreamQuery", waiting), 0);
  EXPECT_EQ(fake.live_events(0), 1U);
  EXPECT_EQ(fake.live_events(1), 1U);
  fake.reset();  // before the second model goes
}

TEST_P(FakeRuntime, WaitsForAnotherDeviceEndWhereBothRunFreely) {
  fake.set_device_count(2);
  const Pages host(2 * 4096, 1);
  ASSERT_EQ(register_(host), 0);
  void* const near = device_memory();
  const Stream waiting = stream();
  EXPECT_EQ(set_device(1), 0);
  void* const far = device_memory();
  const Stream other = stream();
  const Event awaited = event();
  auto& model = static_cast<VirtualDevice&>(fake.model(1));
  model.hold_copies(1);
  EXPECT_EQ(copy(far, host.base(), 64, other), 0);
  EXPECT_EQ(record(awaited, other), 0);
  EXPECT_EQ(wait(waiting, awaited), 0);
  EXPECT_EQ(copy(near, host.at(64), 64, waiting), 0);
  EXPECT_EQ(call<OfStream>("cudaStreamQuery", waiting), cuda::not_ready);
  model.release_copies();
  EXPECT_EQ(synchronize(waiting), 0);
  EXPECT_EQ(query(awaited), 0);
}

TEST_P(FakeRuntime, IdsOfStreamsNeverComeAgainThoughHandlesDo) {
  const Stream first = stream();
  const unsigned long long id = id_of(first);
  EXPECT_EQ(destroy(first), 0);
  const Stream second = stream();
  EXPECT_EQ(second, first);
  EXPECT_NE(id_of(second), id);
  EXPECT_EQ(id_of(default_stream(0)), id_of(default_stream(1)));
  EXPECT_NE(id_of(default_stream(0)), id_of(default_stream(2)));
  EXPECT_EQ(fake.live_streams(0), 1U);
  EXPECT_EQ(destroy(default_stream(0)), cuda::invalid_resource_handle);
}

TEST_P(FakeRuntime, TheTimeBetweenTwoEventsIsRealTime) {
  const Pages host;
  ASSERT_EQ(register_(host), 0);
  const Stream on = stream();
  const Event from = event(cuda::event_default), to = event(cuda::event_default), untimed = event();
  float milliseconds = -1;
  EXPECT_EQ(elapsed(&milliseconds, from, to), cuda::invalid_resource_handle);  // never recorded
  const auto start = std::chrono::steady_clock::now();
  EXPECT_EQ(record(from, on), 0);
  EXPECT_EQ(copy(device_memory(), host.base(), 4096, on), 0);
  EXPECT_EQ(record(to, on), 0);
  EXPECT_EQ(record(untimed, on), 0);
  EXPECT_EQ(synchronize(to), 0);
  const auto took = std::chrono::steady_clock::now() - start;
  EXPECT_EQ(elapsed(&milliseconds, from, to), 0);
  EXPECT_GT(milliseconds, 0.0F);
  EXPECT_LE(milliseconds, std::chrono::duration<float>(took).count() * 1e3F);
  EXPECT_EQ(elapsed(&milliseconds, from, untimed), cuda::invalid_resource_handle);
}

TEST_P(FakeRuntime, ThereIsNoTimeToAPendingEvent) {
  VirtualDevice& model = attach();
  const Pages host;
  ASSERT_EQ(register_(host), 0);
  const Stream on = stream();
  const Event from = event(cuda::event_default), to = event(cuda::event_default);
  EXPECT_EQ(record(from, on), 0);
  EXPECT_EQ(copy(device_memory(), host.base(), 4096, on), 0);
  EXPECT_EQ(record(to, on), 0);
  float milliseconds = -1;
  EXPECT_EQ(elapsed(&milliseconds, from, to), cuda::not_ready);
  while (model.step()) {
  }
  EXPECT_EQ(elapsed(&milliseconds, from, to), 0);
}

TEST_P(FakeRuntime, WhatIsMadeIsCounted) {
  const Event it = event();
  const Stream on = stream();
  void* const device = device_memory(100);
  EXPECT_EQ(fake.live_events(0), 1U);
  EXPECT_EQ(fake.live_streams(0), 1U);
  EXPECT_EQ(fake.allocated_bytes(0), 100U);
  EXPECT_EQ(destroy(it), 0);
  EXPECT_EQ(destroy(on), 0);
  EXPECT_EQ(free(device), 0);
  EXPECT_EQ(fake.live_events(0), 0U);
  EXPECT_EQ(fake.live_streams(0), 0U);
  EXPECT_EQ(fake.allocated_bytes(0), 0U);
}

// ---- captures ----

TEST_P(FakeRuntime, WorkOfAStreamThatCapturesIsNotRun) {
  const Pages host;
  ASSERT_EQ(register_(host), 0);
  void* const device = device_memory();
  const Stream on = stream(), joined = stream();
  const Event it = event();
  ASSERT_EQ(begin_capture(on), 0);
  EXPECT_EQ(capture_of(on), 1);
  EXPECT_EQ(capture_of(joined), cuda::capture_none);
  EXPECT_EQ(copy(device, host.base(), 64, on), 0);
  EXPECT_FALSE(fake.model().may_touch(device, 64));
  EXPECT_EQ(record(it, on), 0);
  cuda::CaptureMode mode = cuda::capture_relaxed;
  const auto exchange = [&] {
    return call<cuda::ThreadExchangeCaptureMode>("cudaThreadExchangeStreamCaptureMode", &mode);
  };
  EXPECT_EQ(exchange(), 0);
  EXPECT_EQ(query(it), cuda::captured_event);
  EXPECT_EQ(exchange(), 0);
  EXPECT_FALSE(fake.capture_invalidated(on));
  EXPECT_EQ(wait(joined, it), 0);
  EXPECT_EQ(capture_of(joined), 1) << "who waits for work of a capture becomes part of it";
  EXPECT_EQ(end_capture(on), 0);
  EXPECT_EQ(capture_of(on), cuda::capture_none);
  EXPECT_EQ(capture_of(joined), cuda::capture_none);
  EXPECT_EQ(query(it), cuda::captured_event);
  EXPECT_EQ(record(it, on), 0);
  EXPECT_EQ(synchronize(it), 0);
}

TEST_P(FakeRuntime, AWaitForWorkOutsideEndsACapture) {
  const Stream on = stream(), other = stream();
  const Event it = event();
  EXPECT_EQ(record(it, other), 0);
  ASSERT_EQ(begin_capture(on), 0);
  EXPECT_EQ(wait(on, it), cuda::stream_capture_isolation);
  EXPECT_TRUE(fake.capture_invalidated(on));
  EXPECT_EQ(capture_of(on), 2);
  EXPECT_NE(end_capture(on), 0);
}

TEST_P(FakeRuntime, TheLegacyStreamCannotBeUsedWhileAStreamCapturesThatWaitsForIt) {
  fake.enable("blocking_stream", 0);
  const Stream blocking = stream(0);
  cuda::CaptureStatus status = -1;
  EXPECT_EQ(capture_of(default_stream(0)), cuda::capture_none);
  ASSERT_EQ(begin_capture(blocking), 0);
  EXPECT_EQ(call<cuda::StreamIsCapturing>("cudaStreamIsCapturing", default_stream(0), &status),
            cuda::stream_capture_implicit);
  EXPECT_FALSE(fake.capture_invalidated(blocking));
  EXPECT_EQ(capture_of(default_stream(2)), cuda::capture_none);
  EXPECT_EQ(record(event(), default_stream(0)), cuda::stream_capture_implicit);
  EXPECT_TRUE(fake.capture_invalidated(blocking));
  EXPECT_NE(end_capture(blocking), 0);
}

TEST_P(FakeRuntime, OnlyTheThreadThatBeganACaptureEndsIt) {
  const Stream on = stream();
  ASSERT_EQ(begin_capture(on), 0);
  std::thread([&] { EXPECT_EQ(end_capture(on), cuda::stream_capture_wrong_thread); }).join();
  EXPECT_EQ(end_capture(on), 0);
  EXPECT_EQ(begin_capture(default_stream(0)), cuda::stream_capture_unsupported);
}

}  // namespace
}  // namespace kvmem::test
