// Each rule of the checker finds the violation that the test plants, in both builds of the fake;
// and a clean program violates none.
#include <dlfcn.h>

#include <cstdlib>
#include <thread>

#include "cuda/fake_program.hpp"
#include "support/scripted_device.hpp"

namespace kvmem::test {
namespace {

class FakeRules : public FakeTest {};
INSTANTIATE_TEST_SUITE_P(Fake, FakeRules, ::testing::Values(12, 13), build_name);

TEST_P(FakeRules, ACleanProgramViolatesNothing) {
  const Pages host(2 * 4096, 1);
  ASSERT_EQ(register_(host), 0);
  void* const device = device_memory();
  const Stream up = stream(), down = stream();
  const Event there = event(), back = event();
  fake.enter();
  for (int round = 0; round < 3; ++round) {
    Arrays arrays;
    arrays.add(device, host.base(), 4096);
    EXPECT_EQ(batch(arrays, up, cuda::access_order_any), 0);
    EXPECT_EQ(record(there, up), 0);
    EXPECT_EQ(wait(down, there), 0);
    EXPECT_EQ(copy(host.at(4096), device, 4096, down), 0);
    EXPECT_EQ(record(back, down), 0);
    EXPECT_EQ(synchronize(back), 0);
    EXPECT_EQ(query(there), 0);
  }
  fake.leave();
  EXPECT_EQ(std::memcmp(host.at(0), host.at(4096), 4096), 0);
  EXPECT_EQ(destroy(there), 0);
  EXPECT_EQ(destroy(back), 0);
  EXPECT_EQ(destroy(up), 0);
  EXPECT_EQ(destroy(down), 0);
  EXPECT_EQ(free(device), 0);
  EXPECT_EQ(unregister(host.base()), 0);
  expect_nothing();
}

TEST_P(FakeRules, ACopyOfMemoryThatIsNotRegisteredIsSeen) {
  attach();
  void* const device = device_memory();
  const Stream on = stream();
  const Pages host(2 * 4096);
  EXPECT_EQ(copy(device, host.base(), 16, on), 0);
  expect_violation("unregistered_host");
  Arrays arrays;
  arrays.add(host.base(), device, 16);
  EXPECT_EQ(batch(arrays, on), 0);
  expect_violation("unregistered_host");
  fake.declare_staged(host.base(), 4096);
  EXPECT_EQ(copy(device, host.base(), 16, on), 0);
  expect_nothing();
  EXPECT_EQ(copy(device, host.at(4090), 16, on), 0);  // the end is outside
  expect_violation("unregistered_host");
  fake.forget_memory(host.base());
  EXPECT_EQ(copy(device, host.base(), 16, on), 0);
  expect_violation("unregistered_host");
  while (attached_->step()) {
  }
}

TEST_P(FakeRules, ARuleThatIsOffSeesNothing) {
  attach();
  void* const device = device_memory();
  const Stream on = stream();
  const Pages host;
  fake.enable("unregistered_host", 0);
  EXPECT_EQ(copy(device, host.base(), 16, on), 0);
  expect_nothing();
  fake.enable("unregistered_host", 1);
  EXPECT_EQ(copy(device, host.base(), 16, on), 0);
  expect_violation("unregistered_host");
  while (attached_->step()) {
  }
}

TEST_P(FakeRules, ACopyAcrossTwoRegistrationsIsSeen) {
  attach();
  void* const device = device_memory();
  const Stream on = stream();
  const Pages host(2 * 4096);
  ASSERT_EQ(register_(host.base(), 4096), 0);
  ASSERT_EQ(register_(host.at(4096), 4096), 0);
  EXPECT_EQ(copy(device, host.at(4096 - 8), 8, on), 0);
  expect_nothing();
  EXPECT_EQ(copy(device, host.at(4096 - 8), 16, on), 0);
  expect_violation("straddles");
  while (attached_->step()) {
  }
}

TEST_P(FakeRules, ACopyIntoMemoryRegisteredAsReadOnlyIsSeen) {
  fake.set_attribute(0, cuda::host_register_read_only, 1);
  const Pages host;
  void* const device = device_memory();
  const Stream on = stream();
  ASSERT_EQ(register_(host.base(), 4096, cuda::host_register_read_only_flag), 0);
  EXPECT_EQ(copy(device, host.base(), 16, on), 0);
  expect_nothing();
  EXPECT_EQ(copy(host.base(), device, 16, on), cuda::invalid_value);
  expect_violation("read_only");
  EXPECT_EQ(synchronize(on), 0);
}

TEST_P(FakeRules, HostMemoryUnregisteredUnderACopyIsSeen) {
  VirtualDevice& model = attach();
  const Pages host;
  void* const device = device_memory();
  const Stream on = stream();
  ASSERT_EQ(register_(host), 0);
  EXPECT_EQ(copy(device, host.base(), 16, on), 0);
  EXPECT_EQ(unregister(host.base()), 0);
  expect_violation("freed_in_flight");
  ASSERT_EQ(register_(host), 0);
  while (model.step()) {
  }
  EXPECT_EQ(unregister(host.base()), 0);
  expect_nothing();
}

TEST_P(FakeRules, HostMemoryUnmappedWhileItIsRegisteredIsSeenOnce) {
  const Pages before, after;
  void* const device = device_memory();
  const Stream on = stream();
  Arrays arrays;
  arrays.add(device, before.base(), 64);
  const auto expect_seen_once = [&](const char* what, std::size_t gone_page, auto&& look) {
    SCOPED_TRACE(what);
    Pages victim(3 * 4096);
    const Pages* const all[] = {&before, &victim, &after};
    for (const Pages* const pages : all) ASSERT_EQ(register_(*pages), 0);
    for (int i = 0; i < 3; ++i) look();  // at one of them each time
    expect_nothing();
    victim.unmap_page(gone_page * 4096);
    std::size_t seen = 0;
    for (int i = 0; i < 6; ++i) {
      look();
      seen += fake.take_violations().size();
    }
    unsigned char state = 0;
    const bool taken = mincore(victim.at(gone_page * 4096), 4096, &state) == 0;  // by somebody else
    EXPECT_TRUE(seen == 1 || (seen == 0 && taken)) << seen;
    EXPECT_EQ(synchronize(on), 0);
    for (const Pages* const pages : all) EXPECT_EQ(unregister(pages->base()), 0);
  };
  expect_seen_once("kvmem_fake_leave", 0, [&] {
    fake.enter();
    fake.leave();
  });
  expect_seen_once("cudaMemcpyAsync", 2,
                   [&] { EXPECT_EQ(copy(device, before.base(), 64, on), 0); });
  expect_seen_once("cudaMemcpyBatchAsync", 0, [&] { EXPECT_EQ(batch(arrays, on), 0); });
  Pages victim;
  ASSERT_EQ(register_(victim), 0);
  victim.unmap_page(0);
  EXPECT_EQ(register_(before), 0);
  expect_violation("unmapped_registered");
}

TEST_P(FakeRules, DeviceMemoryFreedUnderACopyIsSeenAndLeftWhereItIs) {
  ScriptedDevice model;
  fake.attach(0, model);
  const Pages host;
  void* const device = device_memory();
  const Stream on = stream();
  ASSERT_EQ(register_(host), 0);
  EXPECT_EQ(copy(device, host.base(), 16, on), 0);
  EXPECT_EQ(free(device), 0);
  expect_violation("freed_in_flight");
  EXPECT_EQ(fake.allocated_bytes(0), 0U);
  model.run_all();  // AddressSanitizer would stop it, were the memory gone
  ::operator delete(device);
}

TEST_P(FakeRules, AnEventRecordedOnAnotherDevicesStreamIsSeen) {
  fake.set_device_count(2);
  const Event first = event();
  EXPECT_EQ(set_device(1), 0);
  const Stream second = stream();
  EXPECT_EQ(record(first, second), cuda::invalid_resource_handle);
  expect_violation("foreign_record");
}

TEST_P(FakeRules, RecordingAnEventThatWasPolledAndNotSeenDoneIsSeen) {
  VirtualDevice& model = attach();
  const Pages host;
  void* const device = device_memory();
  const Stream on = stream();
  const Event it = event();
  ASSERT_EQ(register_(host), 0);
  EXPECT_EQ(copy(device, host.base(), 16, on), 0);
  EXPECT_EQ(record(it, on), 0);
  EXPECT_EQ(record(it, on), 0);  // nobody has looked at it
  expect_nothing();
  EXPECT_EQ(query(it), cuda::not_ready);
  while (model.step()) {
  }
  EXPECT_EQ(record(it, on), 0);
  expect_violation("re_record");
  EXPECT_EQ(query(it), 0);
  EXPECT_EQ(record(it, on), 0);
  expect_nothing();
}

TEST_P(FakeRules, AWaitForAnEventNeverRecordedIsSeen) {
  const Stream on = stream();
  const Event it = event();
  EXPECT_EQ(wait(on, it), 0);
  expect_violation("wait_unrecorded");
  EXPECT_EQ(record(it, on), 0);
  EXPECT_EQ(wait(on, it), 0);
  expect_nothing();
}

TEST_P(FakeRules, AWaitForAnEventThatOnlyTheModelKnowsIsNone) {
  VirtualDevice& model = attach();
  const Stream on = stream();
  const EventHandle gate = model.create_event(false);
  EXPECT_EQ(wait(on, reinterpret_cast<Event>(gate)), 0);
  expect_violation("wait_unrecorded");
  model.record_unsignalled(gate);
  EXPECT_EQ(wait(on, reinterpret_cast<Event>(gate)), 0);
  expect_nothing();
  model.signal(gate);
}

TEST_P(FakeRules, ASourceThatMayBeReadEarlyAndIsStillWrittenIsSeen) {
  VirtualDevice& model = attach();
  const Pages host;
  void* const device = device_memory();
  void* const other = device_memory();
  const Stream down = stream(), up = stream();
  const Event written = event();
  ASSERT_EQ(register_(host), 0);
  EXPECT_EQ(copy(host.base(), device, 64, down), 0);
  EXPECT_EQ(record(written, down), 0);
  EXPECT_EQ(wait(up, written), 0);
  Arrays beside, within;
  beside.add(other, host.at(64), 64);
  EXPECT_EQ(batch(beside, up, cuda::access_order_any), 0);
  expect_nothing();
  within.add(other, host.at(60), 64);
  EXPECT_EQ(batch(within, up, cuda::access_order_stream), 0);
  expect_nothing();
  EXPECT_EQ(batch(within, up, cuda::access_order_any), 0);
  expect_violation("early_source");
  while (model.step()) {
  }
}

TEST_P(FakeRules, ArraysThatWereChangedUnderABatchAreSeen) {
  VirtualDevice& model = attach();
  const Pages host;
  void* const device = device_memory();
  const Stream on = stream();
  const Event behind = event();
  ASSERT_EQ(register_(host), 0);
  Arrays arrays;
  arrays.add(device, host.base(), 64);
  EXPECT_EQ(batch(arrays, on), 0);
  EXPECT_EQ(record(behind, on), 0);
  arrays.sizes[0] = 32;
  for (int i = 0; i < 64; ++i) EXPECT_EQ(query(behind), cuda::not_ready);
  expect_violation("descriptors_changed");
  while (model.step()) {
  }
}

TEST_P(FakeRules, ArraysThatWereChangedBeforeTheEndWasSeenAreSeen) {
  VirtualDevice& model = attach();
  const Pages host;
  void* const device = device_memory();
  const Stream on = stream();
  const Event behind = event();
  ASSERT_EQ(register_(host), 0);
  Arrays first, second;
  for (Arrays* const arrays : {&first, &second}) arrays->add(device, host.base(), 64);
  EXPECT_EQ(batch(first, on), 0);
  EXPECT_EQ(record(behind, on), 0);
  EXPECT_EQ(batch(second, on), 0);
  while (model.step()) {
  }
  first.sizes[0] = 1;  // it has ended, but nobody could know
  EXPECT_EQ(query(behind), 0);
  expect_violation("descriptors_changed");
  EXPECT_EQ(record(behind, on), 0);
  EXPECT_EQ(query(behind), 0);
  first.sizes[0] = second.sizes[0] = 2;
  EXPECT_EQ(query(behind), 0);
  expect_nothing();
}

TEST_P(FakeRules, AnEventOfAnotherStreamThatWaitedSeesTheEndToo) {
  VirtualDevice& model = attach();
  const Pages host;
  void* const device = device_memory();
  const Stream on = stream(), other = stream();
  const Event behind = event(), further = event();
  ASSERT_EQ(register_(host), 0);
  Arrays before, after;
  for (Arrays* const arrays : {&before, &after}) arrays->add(device, host.base(), 64);
  EXPECT_EQ(batch(before, on), 0);
  EXPECT_EQ(record(behind, on), 0);
  EXPECT_EQ(wait(other, behind), 0);
  EXPECT_EQ(record(further, other), 0);
  EXPECT_EQ(batch(after, on), 0);
  EXPECT_EQ(record(behind, on), 0);
  while (model.step()) {
  }
  EXPECT_EQ(query(further), 0);
  before.sizes[0] = 1;
  EXPECT_EQ(query(further), 0);
  expect_nothing();
  after.sizes[0] = 1;
  EXPECT_EQ(query(behind), 0);
  expect_violation("descriptors_changed");
}

TEST_P(FakeRules, ArraysThatAreGoneUnderABatchAreSeen) {
  VirtualDevice& model = attach();
  const Pages host;
  void* const device = device_memory();
  const Stream on = stream();
  const Event behind = event();
  ASSERT_EQ(register_(host), 0);
  void* const page =
      mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(page, MAP_FAILED);
  auto** const pointers = static_cast<void**>(page);
  const auto fill = [&] {
    pointers[0] = device;
    pointers[1] = host.base();
    pointers[2] = reinterpret_cast<void*>(std::size_t{64});
  };
  fill();
  auto* const sizes = reinterpret_cast<std::size_t*>(pointers + 2);
  cuda::MemcpyAttributes attributes{cuda::access_order_stream, {}, {}, 0};
  std::size_t first = 0, failed = 0;
  const Error error =
      GetParam() == 12
          ? call<cuda::MemcpyBatchAsync12>("cudaMemcpyBatchAsync", pointers, pointers + 1, sizes,
                                           std::size_t{1}, &attributes, &first, std::size_t{1},
                                           &failed, on)
          : call<cuda::MemcpyBatchAsync13>("cudaMemcpyBatchAsync", pointers, pointers + 1, sizes,
                                           std::size_t{1}, &attributes, &first, std::size_t{1}, on);
  EXPECT_EQ(error, 0);
  EXPECT_EQ(record(behind, on), 0);
  munmap(page, 4096);
  for (int i = 0; i < 64; ++i) EXPECT_EQ(query(behind), cuda::not_ready);
  expect_violation("descriptors_changed");
  // Back they come, for the model will read them.
  ASSERT_EQ(
      mmap(page, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0),
      page);
  fill();
  while (model.step()) {
  }
  munmap(page, 4096);
}

TEST_P(FakeRules, TheArraysOfABatchThatWasRefusedMustLiveTooUnlessItWasNotSupported) {
  attach();
  const Pages host;
  void* const device = device_memory();
  const Stream on = stream();
  const Event behind = event();
  ASSERT_EQ(register_(host), 0);
  Arrays refused, not_supported;
  for (Arrays* const arrays : {&refused, &not_supported}) arrays->add(device, host.base(), 64);
  fake.fail("cudaMemcpyBatchAsync", 1, 1, cuda::not_supported, 0);
  EXPECT_EQ(batch(not_supported, on), cuda::not_supported);
  fake.fail("cudaMemcpyBatchAsync", 1, 1, cuda::invalid_value, 0);
  EXPECT_EQ(batch(refused, on), cuda::invalid_value);
  EXPECT_EQ(record(behind, on), 0);
  not_supported.sizes[0] = 1;
  EXPECT_EQ(query(behind), 0);
  expect_nothing();
  fake.fail("cudaMemcpyBatchAsync", 1, 1, cuda::invalid_value, 0);
  EXPECT_EQ(batch(refused, on), cuda::invalid_value);
  EXPECT_EQ(record(behind, on), 0);
  refused.sizes[0] = 1;
  EXPECT_EQ(query(behind), 0);
  expect_violation("descriptors_changed");
}

TEST_P(FakeRules, ABatchOnTheLegacyStreamIsSeen) {
  const Pages host;
  void* const device = device_memory();
  ASSERT_EQ(register_(host), 0);
  Arrays arrays;
  arrays.add(device, host.base(), 64);
  for (const std::uintptr_t legacy : {std::uintptr_t{0}, std::uintptr_t{1}}) {
    EXPECT_EQ(batch(arrays, reinterpret_cast<Stream>(legacy)), cuda::invalid_value);
    expect_violation("legacy_batch");
  }
  const auto of_thread = reinterpret_cast<Stream>(std::uintptr_t{2});
  EXPECT_EQ(batch(arrays, of_thread), 0);
  EXPECT_EQ(synchronize(of_thread), 0);
  expect_nothing();
}

TEST_P(FakeRules, ABatchOfTooManyDescriptorsIsSeen) {
  const Pages host;
  void* const device = device_memory();
  const Stream on = stream();
  ASSERT_EQ(register_(host), 0);
  fake.set_most_descriptors(2);
  Arrays arrays;
  for (std::size_t i = 0; i < 3; ++i)
    arrays.add(static_cast<std::byte*>(device) + 64 * i, host.at(64 * i), 64);
  EXPECT_EQ(batch(arrays, on), 0);
  expect_violation("too_many_descriptors");
  EXPECT_EQ(synchronize(on), 0);
}

TEST_P(FakeRules, AnErrorLeftPendingIsSeen) {
  fake.enter();
  EXPECT_EQ(destroy(Stream{}), cuda::invalid_resource_handle);
  fake.leave();
  expect_violation("last_error");
  fake.enter();
  EXPECT_EQ(last_error(), cuda::invalid_resource_handle);
  fake.leave();
  expect_violation("last_error");  // the caller's own is gone
  fake.enter();
  fake.enter();
  EXPECT_EQ(destroy(Stream{}), cuda::invalid_resource_handle);
  EXPECT_EQ(last_error(), cuda::invalid_resource_handle);
  fake.leave();
  fake.leave();
  expect_nothing();
}

TEST_P(FakeRules, ACurrentDeviceLeftElsewhereIsSeen) {
  fake.set_device_count(2);
  EXPECT_EQ(set_device(0), 0);
  fake.enter();
  EXPECT_EQ(set_device(1), 0);
  fake.leave();
  expect_violation("current_device");
  fake.enter();
  cuda::CaptureMode mode = cuda::capture_relaxed;
  EXPECT_EQ(call<cuda::ThreadExchangeCaptureMode>("cudaThreadExchangeStreamCaptureMode", &mode), 0);
  fake.leave();
  expect_violation("current_device");
}

TEST_P(FakeRules, AContextForWhichNobodyAskedIsSeen) {
  fake.set_device_count(2);
  std::thread([&] {  // has device 0 because it was never told
    EXPECT_EQ(set_device(1), 0);
    expect_nothing();
    EXPECT_EQ(set_device(0), 0);
  })
      .join();
  expect_violation("foreign_context");
}

TEST_P(FakeRules, AContextThatAThreadMakesBesidesIsSeenWhenItMeansAnotherDevice) {
  fake.set_device_count(2);
  EXPECT_EQ(set_device(1), 0);
  const Event it = event();
  const auto exchange = [&] {
    cuda::CaptureMode mode = cuda::capture_relaxed;
    EXPECT_EQ(call<cuda::ThreadExchangeCaptureMode>("cudaThreadExchangeStreamCaptureMode", &mode),
              0);
    EXPECT_TRUE(fake.has_context(0));
  };
  std::thread([&] {
    exchange();
    expect_nothing();
    EXPECT_EQ(query(it), 0);  // makes none itself
    expect_violation("foreign_context");
    EXPECT_EQ(query(it), 0);
    EXPECT_EQ(set_device(1), 0);
    expect_nothing();
  }).join();
  fake.reset();
  fake.set_device_count(2);
  std::thread([&] {
    exchange();
    EXPECT_EQ(set_device(1), 0);
    expect_violation("foreign_context");
  }).join();
  fake.reset();
  fake.set_device_count(2);
  std::thread([&] {
    exchange();
    const Stream own = stream();  // it did mean device 0
    EXPECT_EQ(set_device(1), 0);
    EXPECT_EQ(destroy(own), 0);
    expect_nothing();
  }).join();
  fake.reset();
  fake.set_device_count(2);
  std::thread([&] {
    EXPECT_EQ(set_device(1), 0);  // first: so that there is none on device 0
    cuda::CaptureMode mode = cuda::capture_relaxed;
    EXPECT_EQ(call<cuda::ThreadExchangeCaptureMode>("cudaThreadExchangeStreamCaptureMode", &mode),
              0);
    EXPECT_FALSE(fake.has_context(0));
    expect_nothing();
  }).join();
}

TEST_P(FakeRules, AContextOnADeviceThatIsNotAllowedIsSeen) {
  fake.set_device_count(2);
  fake.allow(1U << 0);
  EXPECT_EQ(set_device(0), 0);
  expect_nothing();
  EXPECT_EQ(set_device(1), 0);
  expect_violation("foreign_context");
  EXPECT_EQ(set_device(1), 0);  // it is there by now
  expect_nothing();
}

TEST_P(FakeRules, ACallOnAnotherDeviceIsSeen) {
  fake.set_device_count(2);
  EXPECT_EQ(set_device(0), 0);
  const Stream first = stream();
  fake.allow(1U << 1);
  EXPECT_EQ(set_device(1), 0);
  const Stream second = stream();
  EXPECT_EQ(synchronize(second), 0);
  expect_nothing();
  EXPECT_EQ(destroy(first), 0);
  expect_violation("other_device");
}

TEST_P(FakeRules, AnUnsafeCallWhileAStreamCapturesIsSeen) {
  const Pages host;
  const Stream on = stream();
  const Event it = event();
  void* base = nullptr;
  std::size_t planted = 0;
  const auto expect_unsafe = [&](const char* what, auto&& unsafe) {
    SCOPED_TRACE(what);
    ASSERT_EQ(begin_capture(on), 0);
    std::thread([&] { EXPECT_EQ(unsafe(), cuda::stream_capture_unsupported); }).join();
    EXPECT_TRUE(fake.capture_invalidated(on));
    expect_violation("unsafe_capture");
    EXPECT_NE(end_capture(on), 0);
    ++planted;
  };
  expect_unsafe("cudaMalloc", [&] { return malloc(&base, 4096); });
  expect_unsafe("cudaFree", [&] { return free(nullptr); });
  expect_unsafe("cudaHostRegister", [&] { return register_(host); });
  expect_unsafe("cudaHostUnregister", [&] { return unregister(host.base()); });
  expect_unsafe("cudaEventQuery", [&] { return query(it); });
  expect_unsafe("cudaEventSynchronize", [&] { return synchronize(it); });
  EXPECT_EQ(planted, 6U);
  // A look at what was recorded in the capture, by whomever.
  ASSERT_EQ(begin_capture(on), 0);
  EXPECT_EQ(record(it, on), 0);
  const auto look = [&] { EXPECT_EQ(query(it), cuda::captured_event); };
  std::thread(look).join();
  EXPECT_TRUE(fake.capture_invalidated(on));
  expect_violation("unsafe_capture");
  EXPECT_NE(end_capture(on), 0);
  look();  // nothing is going on any more
  expect_nothing();
  EXPECT_EQ(record(it, on), 0);
  EXPECT_EQ(synchronize(it), 0);
  // Not in relaxed mode; nor where the capture is relaxed.
  ASSERT_EQ(begin_capture(on), 0);
  std::thread([&] {
    cuda::CaptureMode mode = cuda::capture_relaxed;
    EXPECT_EQ(call<cuda::ThreadExchangeCaptureMode>("cudaThreadExchangeStreamCaptureMode", &mode),
              0);
    EXPECT_EQ(query(it), 0);
  }).join();
  EXPECT_EQ(end_capture(on), 0);
  ASSERT_EQ(begin_capture(on, cuda::capture_relaxed), 0);
  EXPECT_EQ(query(it), 0);
  EXPECT_EQ(end_capture(on), 0);
  EXPECT_FALSE(fake.capture_invalidated(on));
  expect_nothing();
}

TEST_P(FakeRules, AStreamThatTheLegacyOneWaitsForIsSeen) {
  const Stream made = stream(0);
  expect_violation("blocking_stream");
  EXPECT_EQ(destroy(made), 0);
}

TEST_P(FakeRules, AHandleThatDoesNotExistIsSeen) {
  const Stream on = stream();
  const Event it = event();
  const auto no_stream = reinterpret_cast<Stream>(it);
  const auto no_event = reinterpret_cast<Event>(on);
  const auto expect_unknown = [&](Error error) {
    EXPECT_EQ(error, cuda::invalid_resource_handle);
    expect_violation("unknown_handle");
  };
  expect_unknown(record(it, no_stream));
  expect_unknown(record(no_event, on));
  expect_unknown(wait(no_stream, it));
  expect_unknown(wait(on, no_event));
  expect_unknown(query(no_event));
  expect_unknown(copy(device_memory(), device_memory(), 16, no_stream));
  unsigned long long id = 0;
  expect_unknown(call<cuda::StreamGetId>("cudaStreamGetId", no_stream, &id));
  EXPECT_EQ(destroy(on), 0);
  EXPECT_EQ(destroy(it), 0);
  expect_unknown(destroy(on));
  expect_unknown(destroy(it));
}

// ---- in a process of their own ----

cuda::GetLastError* look = nullptr;

[[noreturn]] void call_after_exit(int major) {
  setenv("KVMEM_FAKE_STRICT", "1", 1);
  // Before the fake is loaded: so its turn comes when the exit has begun.
  std::atexit([] { static_cast<void>(look()); });
  const FakeCudart fake(major);
  look = fake.function<cuda::GetLastError>("cudaGetLastError");
  static_cast<void>(look());
  std::exit(0);
}

[[noreturn]] void violate_strictly(int major) {
  setenv("KVMEM_FAKE_STRICT", "1", 1);
  const FakeCudart fake(major);
  static_cast<void>(fake.function<cuda::StreamDestroy>("cudaStreamDestroy")(
      reinterpret_cast<Stream>(std::uintptr_t{0x1000})));
  std::exit(0);
}

TEST(FakeRulesInAProcess, ACallAfterTheExitHasBegunEndsAStrictProcess) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  for (const int major : {12, 13})
    EXPECT_EXIT(call_after_exit(major), ::testing::ExitedWithCode(97), "after_exit: cudaGetLast");
}

TEST(FakeRulesInAProcess, AViolationEndsAStrictProcess) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  for (const int major : {12, 13})
    EXPECT_EXIT(violate_strictly(major), ::testing::ExitedWithCode(97), "unknown_handle: cuda");
}

}  // namespace
}  // namespace kvmem::test
