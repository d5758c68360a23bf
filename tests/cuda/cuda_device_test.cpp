// The CUDA device's own code, over both builds of the fake runtime: what it asks of the runtime,
// and what the caller's thread notices of it.
#include "device/cuda/cuda_device.hpp"

#include <sys/wait.h>

#include <array>
#include <cstdlib>
#include <cstring>
#include <thread>

#include "base/error.hpp"
#include "base/process.hpp"
#include "device/cuda/cuda_copies.hpp"
#include "recycle/runtime.hpp"
#include "support/fake_cudart.hpp"
#include "support/wait_for.hpp"

namespace kvmem::cuda {
namespace {

using test::FakeCudart;

constexpr std::size_t page = 4096;

class CudaDeviceTest : public ::testing::TestWithParam<int> {
 protected:
  FakeCudart fake_{GetParam()};

  std::shared_ptr<CudaDevice> open(const Options& options = {}) {
    return make_cuda_device(fake_.runtime(), options);
  }

  // The engine's own calls.
  int set_device(int device) { return fake_.function<SetDevice>("cudaSetDevice")(device); }
  int current_device() {
    int device = -1;
    fake_.function<GetDevice>("cudaGetDevice")(&device);
    return device;
  }
  int pending_error() { return fake_.function<PeekAtLastError>("cudaPeekAtLastError")(); }
  void leave_an_error() {
    EXPECT_EQ(fake_.function<Free>("cudaFree")(this), invalid_value);
    EXPECT_EQ(pending_error(), invalid_value);
  }
  Stream engine_stream() {
    Stream stream = nullptr;
    EXPECT_EQ(fake_.function<StreamCreateWithFlags>("cudaStreamCreateWithFlags")(
                  &stream, stream_non_blocking),
              success);
    return stream;
  }
  void begin_capture(Stream stream) {
    EXPECT_EQ(fake_.function<Error(Stream, CaptureMode)>("cudaStreamBeginCapture")(stream,
                                                                                   capture_global),
              success);
  }
  Error end_capture(Stream stream) {
    void* graph = nullptr;
    return fake_.function<Error(Stream, void**)>("cudaStreamEndCapture")(stream, &graph);
  }

  // Every call of the seam once, so that a thread can be looked at behind it.
  void use(CudaDevice& device) {
    const StreamHandle stream = device.create_stream();
    static_cast<void>(device.stream_id(stream));
    const EventHandle event = device.create_event(true);
    device.record(event, stream);
    device.wait(stream, event);
    while (device.query(event) == EventState::pending) std::this_thread::yield();
    static_cast<void>(device.event_time(event));
    static_cast<void>(device.recorded(event));
    const HostPages host;
    device.pin(host.data(), page);
    void* const memory = device.allocate(page);
    copy_and_wait(device, stream, static_cast<std::byte*>(memory), host.data(), page);
    device.deallocate(memory, page);
    device.unpin(host.data(), page);
    device.destroy_event(event);
    device.destroy_stream(stream);
  }

  class HostPages {
   public:
    explicit HostPages(std::size_t pages = 1)
        : base_(static_cast<std::byte*>(std::aligned_alloc(page, pages * page))) {
      std::memset(base_, 1, pages * page);
    }
    HostPages(const HostPages&) = delete;
    HostPages& operator=(const HostPages&) = delete;
    ~HostPages() { std::free(base_); }
    [[nodiscard]] std::byte* data() const noexcept { return base_; }

   private:
    std::byte* base_;
  };

  // To the device.
  static void copy_and_wait(CudaDevice& device, StreamHandle stream, std::byte* target,
                            const std::byte* source, std::size_t bytes) {
    device.copy({&target, &source, &bytes, 1}, Direction::to_device, SourceAccess::stream_order,
                stream);
    wait_for_stream(device, stream);
  }
  static void wait_for_stream(CudaDevice& device, StreamHandle stream) {
    const EventHandle event = device.create_event(false);
    device.record(event, stream);
    EventState state = EventState::pending;
    while ((state = device.query(event)) == EventState::pending) std::this_thread::yield();
    EXPECT_EQ(state, EventState::done);
    device.destroy_event(event);
  }

  // Some copies of one page each, from registered memory; run in one submission.
  class Copying {
   public:
    Copying(CudaDevice& device, std::size_t count)
        : device_(device), host_(count), stream_(device.create_stream()) {
      device.pin(host_.data(), count * page);
      memory_ = static_cast<std::byte*>(device.allocate(count * page));
      for (std::size_t i = 0; i < count; ++i) {
        targets_.push_back(memory_ + i * page);
        sources_.push_back(host_.data() + i * page);
        sizes_.push_back(page);
      }
    }
    Copying(const Copying&) = delete;
    Copying& operator=(const Copying&) = delete;
    ~Copying() {
      wait_for_stream(device_, stream_);
      device_.deallocate(memory_, sizes_.size() * page);
      device_.unpin(host_.data(), sizes_.size() * page);
      device_.destroy_stream(stream_);
    }
    void submit() {
      device_.copy({targets_.data(), sources_.data(), sizes_.data(), sizes_.size()},
                   Direction::to_device, SourceAccess::any, stream_);
    }

   private:
    CudaDevice& device_;
    HostPages host_;
    StreamHandle stream_;
    std::byte* memory_;
    std::vector<std::byte*> targets_;
    std::vector<const std::byte*> sources_;
    std::vector<std::size_t> sizes_;
  };

  unsigned long long batches() { return fake_.calls("cudaMemcpyBatchAsync"); }
  unsigned long long single_copies() { return fake_.calls("cudaMemcpyAsync"); }
};

INSTANTIATE_TEST_SUITE_P(Runtimes, CudaDeviceTest, ::testing::Values(12, 13),
                         [](const auto& major) { return "Cuda" + std::to_string(major.param); });

template <class Call>
std::string refusal(Call&& call) {
  try {
    call();
  } catch (const InvalidArgument& error) {
    return error.what();
  }
  ADD_FAILURE() << "it was not refused";
  return {};
}

// ---- the caller's thread ----

TEST_P(CudaDeviceTest, LeavesTheCurrentDeviceAsItWasAndWorksOnItsOwn) {  // case 146
  fake_.set_device_count(3);
  const auto device = open({.ordinal = 2});
  ASSERT_EQ(set_device(1), success);
  fake_.allow(1U << 2 | 1U << 1);
  use(*device);
  EXPECT_EQ(current_device(), 1);
  EXPECT_EQ(fake_.allocated_bytes(1), 0U);
  EXPECT_EQ(fake_.has_context(0), 0);
}

TEST_P(CudaDeviceTest, MakesNoContextOnADeviceWhereNobodyAskedForOne) {
  fake_.set_device_count(2);
  const auto device = open({.ordinal = 1});
  EXPECT_EQ(current_device(), 0) << "of a thread that was never told";
  use(*device);
  EXPECT_EQ(current_device(), 0);
  EXPECT_EQ(fake_.has_context(0), 0) << "going back to device 0 makes a context there";
  EXPECT_EQ(fake_.has_context(1), 1);
}

TEST_P(CudaDeviceTest, LeavesTheErrorThatTheCallerHasNotLookedAtYet) {
  const auto device = open();
  leave_an_error();
  use(*device);
  EXPECT_EQ(pending_error(), invalid_value);
  static_cast<void>(fake_.function<GetLastError>("cudaGetLastError")());
}

TEST_P(CudaDeviceTest, LeavesNoErrorOfItsOwn) {  // case 64
  const auto device = open();
  const StreamHandle stream = device->create_stream();
  const EventHandle event = device->create_event(false), gate = device->create_event(false);
  ModelDevice& model = fake_.model();
  model.record_unsignalled(gate);
  device->wait(stream, gate);
  device->record(event, stream);
  EXPECT_EQ(device->query(event), EventState::pending);
  EXPECT_EQ(pending_error(), success) << "cudaErrorNotReady was left behind";
  fake_.fail("cudaHostRegister", 1, 1, memory_allocation, 0);
  const HostPages host;
  EXPECT_THROW(device->pin(host.data(), page), CapacityError);
  EXPECT_EQ(pending_error(), success);
  model.signal(gate);
  wait_for_stream(*device, stream);
}

TEST_P(CudaDeviceTest, CanBeUsedWhileAStreamOfTheEngineCapturesAGraph) {
  const auto device = open();
  const Stream capturing = engine_stream();
  begin_capture(capturing);
  use(*device);
  std::thread([&] { use(*device); }).join();
  EXPECT_EQ(fake_.capture_invalidated(capturing), 0);
  EXPECT_EQ(end_capture(capturing), success);
}

// ---- foreign streams and events ----

TEST_P(CudaDeviceTest, RefusesACapturingStreamByName) {
  const auto device = open();
  const Stream capturing = engine_stream();
  begin_capture(capturing);
  const auto handle = reinterpret_cast<StreamHandle>(capturing);
  const std::string why = refusal([&] { static_cast<void>(device->stream_id(handle)); });
  EXPECT_NE(why.find(std::to_string(handle)), std::string::npos) << why;
  EXPECT_NE(why.find("captur"), std::string::npos) << why;
  EXPECT_EQ(fake_.capture_invalidated(capturing), 0);
  EXPECT_EQ(end_capture(capturing), success);
  EXPECT_NO_THROW(static_cast<void>(device->stream_id(handle)));
}

TEST_P(CudaDeviceTest, RefusesAnEventOfACaptureBeforeAnyStreamWaitsForIt) {
  const auto device = open();
  const auto runtime = Runtime::make(device);
  const Stream capturing = engine_stream();
  Event event = nullptr;
  fake_.function<EventCreateWithFlags>("cudaEventCreateWithFlags")(&event, event_disable_timing);
  begin_capture(capturing);
  EXPECT_EQ(fake_.function<EventRecord>("cudaEventRecord")(event, capturing), success);
  const auto handle = reinterpret_cast<EventHandle>(event);
  const std::string why = refusal([&] { static_cast<void>(runtime->mark_event(handle)); });
  EXPECT_NE(why.find(std::to_string(handle)), std::string::npos) << why;
  EXPECT_EQ(fake_.capture_invalidated(capturing), 0);
  EXPECT_EQ(end_capture(capturing), success);
}

TEST_P(CudaDeviceTest, RefusesAnEventThatTorchHasNotMadeYet) {
  const auto runtime = Runtime::make(open());
  const std::string why = refusal([&] { static_cast<void>(runtime->mark_event(0)); });
  EXPECT_NE(why.find("never recorded"), std::string::npos) << why;
}

TEST_P(CudaDeviceTest, RefusesAStreamOfAnotherDeviceByName) {
  fake_.set_device_count(2);
  const auto device = open({.ordinal = 1});
  ASSERT_EQ(set_device(0), success);
  const auto foreign = reinterpret_cast<StreamHandle>(engine_stream());
  const std::string why = refusal([&] { static_cast<void>(device->stream_id(foreign)); });
  EXPECT_NE(why.find("cuda:0"), std::string::npos) << why;
  EXPECT_NE(why.find("cuda:1"), std::string::npos) << why;
}

TEST_P(CudaDeviceTest, AnEventCannotBeRecordedOnAStreamOfAnotherDevice) {  // runtimes before 12.8
  fake_.set_device_count(2);
  fake_.enable("foreign_record", 0);
  const auto device = open({.ordinal = 1});
  ASSERT_EQ(set_device(0), success);
  const auto foreign = reinterpret_cast<StreamHandle>(engine_stream());
  const EventHandle event = device->create_event(false);
  EXPECT_THROW(device->record(event, foreign), InvalidArgument);
  device->destroy_event(event);
}

TEST_P(CudaDeviceTest, TakesTheDefaultStreamsByTheirHandlesAndNoOtherSmallNumber) {  // case 158
  const auto device = open();
  const EventHandle event = device->create_event(false);
  for (const StreamHandle stream : {0U, 1U, 2U}) {
    EXPECT_NO_THROW(static_cast<void>(device->stream_id(stream))) << stream;
    EXPECT_NO_THROW(device->record(event, stream)) << stream;
    while (device->query(event) == EventState::pending) std::this_thread::yield();
  }
  const std::string why = refusal([&] { static_cast<void>(device->stream_id(7)); });
  EXPECT_NE(why.find('7'), std::string::npos);
  device->destroy_event(event);
}

TEST_P(CudaDeviceTest, APerThreadStreamIsNeverUsedFromAnotherThread) {
  const auto device = open();
  leave_an_error();  // which would send the call to another thread
  EXPECT_THROW(static_cast<void>(device->stream_id(2)), InvalidArgument);
  static_cast<void>(fake_.function<GetLastError>("cudaGetLastError")());
}

// ---- copies ----

TEST_P(CudaDeviceTest, CopiesGoOutInOneBatch) {
  const auto device = open();
  Copying copying(*device, 5);
  copying.submit();
  EXPECT_EQ(batches(), 1U);
  EXPECT_EQ(single_copies(), 0U);
  EXPECT_EQ(device->copy_path(), GetParam() == 12 ? "batch, 9 arguments" : "batch, 8 arguments");
}

TEST_P(CudaDeviceTest, ABatchIsCappedAndALargerOneIsRefusedWhole) {
  const auto device = open({.max_descriptors = 4});
  fake_.set_most_descriptors(4);
  EXPECT_EQ(device->info().max_descriptors, 4U);
  Copying fits(*device, 4), too_many(*device, 5);
  fits.submit();
  EXPECT_THROW(too_many.submit(), InvalidArgument);
  EXPECT_EQ(batches(), 1U);
}

TEST_P(CudaDeviceTest, BatchesCanBeSwitchedOff) {
  const auto device = open({.batch = false});
  Copying copying(*device, 3);
  copying.submit();
  EXPECT_EQ(batches(), 0U);
  EXPECT_EQ(single_copies(), 3U);
  EXPECT_NE(device->copy_path().find("switched off"), std::string::npos);
}

TEST_P(CudaDeviceTest, WhereHostPointersAreNotTheDevicesCopiesGoOneByOne) {  // WSL
  fake_.set_attribute(0, can_use_host_pointer, 0);
  const auto device = open();
  Copying copying(*device, 3);
  copying.submit();
  EXPECT_EQ(batches(), 0U);
  EXPECT_EQ(single_copies(), 3U);
}

TEST_P(CudaDeviceTest, ADriverThatRefusesBatchesIsAskedOnce) {  // case 161
  for (const Error error : {call_requires_newer_driver, not_supported}) {
    fake_.reset();
    const auto device = open();
    fake_.fail("cudaMemcpyBatchAsync", 1, 100, error, 0);
    Copying copying(*device, 3);
    copying.submit();
    copying.submit();
    EXPECT_EQ(batches(), 1U);
    EXPECT_EQ(single_copies(), 6U);
    EXPECT_NE(device->copy_path().find(std::to_string(error)), std::string::npos);
    EXPECT_EQ(pending_error(), success);
    fake_.forget_faults();
  }
}

TEST_P(CudaDeviceTest, ADriverBefore128IsEnoughForADeviceOfCuda12) {
  fake_.set_device_count(2);
  fake_.set_driver_version(12040);
  if (GetParam() == 13) {
    EXPECT_THROW(static_cast<void>(open()), DeviceUnavailable);
    return;
  }
  const auto device = open({.ordinal = 1});
  use(*device);
  Copying copying(*device, 3);
  const auto before = batches();
  copying.submit();
  EXPECT_EQ(batches(), before) << "it was asked once already";
  EXPECT_NE(device->copy_path().find("36"), std::string::npos) << device->copy_path();
  // Nobody can tell of which device a stream is, until an event is to be recorded there.
  ASSERT_EQ(set_device(0), success);
  const auto foreign = reinterpret_cast<StreamHandle>(engine_stream());
  EXPECT_NO_THROW(static_cast<void>(device->stream_id(foreign)));
  const EventHandle event = device->create_event(false);
  fake_.enable("foreign_record", 0);
  EXPECT_THROW(device->record(event, foreign), InvalidArgument);
  device->destroy_event(event);
  EXPECT_EQ(pending_error(), success);
}

TEST_P(CudaDeviceTest, AnyOtherErrorOfABatchIsAFailedCopyAndNoReasonToTryAgain) {
  const auto device = open();
  fake_.fail("cudaMemcpyBatchAsync", 1, 1, invalid_value, 1);
  Copying copying(*device, 3);
  EXPECT_THROW(copying.submit(), CopyFailed);
  EXPECT_EQ(single_copies(), 0U);
  copying.submit();
  EXPECT_EQ(batches(), 2U);
}

TEST_P(CudaDeviceTest, OneByOneEndsAtTheFirstThatFailsAndNamesIt) {
  const auto device = open({.batch = false});
  fake_.fail("cudaMemcpyAsync", 3, 1, invalid_value, 0);
  Copying copying(*device, 5);
  try {
    copying.submit();
    ADD_FAILURE() << "nothing failed";
  } catch (const CopyFailed& error) {
    EXPECT_NE(std::string(error.what()).find("copy 2 of a batch of 5"), std::string::npos)
        << error.what();
  }
  EXPECT_EQ(single_copies(), 3U);
}

TEST(NamedDrivers, AreNamedByWholePartsOfTheirRelease) {
  EXPECT_TRUE(is_named("580.159.04", {"575", "580.159.04"}));
  EXPECT_TRUE(is_named("580.159.04", {"580"}));
  EXPECT_TRUE(is_named("580.159.04", {"580.159"}));
  EXPECT_FALSE(is_named("580.159.04", {"58", "580.15", "580.159.04.1", ""}));
  EXPECT_FALSE(is_named("", {"", "580"}));
}

// ---- memory ----

TEST_P(CudaDeviceTest, PinnedMemoryIsRegisteredOnceAndForEveryDevice) {
  const auto device = open();
  const HostPages host(2);
  device->pin(host.data(), 2 * page);
  EXPECT_EQ(fake_.registered_bytes(), 2 * page);
  EXPECT_THROW(device->pin(host.data() + page, page), InvalidArgument);
  EXPECT_EQ(pending_error(), success);
  device->unpin(host.data(), 2 * page);
  EXPECT_EQ(fake_.registered_bytes(), 0U);
}

TEST_P(CudaDeviceTest, OnlyWholePagesArePinned) {
  const auto device = open();
  const HostPages host;
  EXPECT_THROW(device->pin(host.data(), 0), InvalidArgument);
  EXPECT_THROW(device->pin(host.data(), 100), InvalidArgument);
  EXPECT_THROW(device->pin(host.data() + 64, page), InvalidArgument);
}

TEST_P(CudaDeviceTest, AFailedRegistrationIsACapacityErrorThatNamesTheError) {  // cases 58, 59, 66
  const auto device = open();
  const HostPages host;
  for (const Error error : {memory_allocation, operating_system, not_permitted, not_supported}) {
    fake_.fail("cudaHostRegister", 1, 1, error, 0);
    try {
      device->pin(host.data(), page);
      ADD_FAILURE() << "it was pinned";
    } catch (const CapacityError& refused) {
      EXPECT_NE(std::string(refused.what()).find(std::to_string(error)), std::string::npos);
      EXPECT_EQ(refused.shortage.wanted, page);
    }
  }
  device->pin(host.data(), page);  // and nothing is broken by it
  device->unpin(host.data(), page);
}

TEST_P(CudaDeviceTest, WhatCannotBeUnregisteredLeavesNoErrorBehind) {  // case 58
  const auto device = open();
  const HostPages host;
  device->pin(host.data(), page);
  fake_.fail("cudaHostUnregister", 1, 1, invalid_value, 0);
  device->unpin(host.data(), page);
  EXPECT_EQ(pending_error(), success);
  EXPECT_EQ(fake_.registered_bytes(), page);
  device->unpin(host.data(), page);
  EXPECT_EQ(fake_.registered_bytes(), 0U);
}

TEST_P(CudaDeviceTest, ADeviceThatCannotRegisterIsNotAsked) {
  fake_.set_attribute(0, host_register_supported, 0);
  const auto device = open();
  const HostPages host;
  EXPECT_THROW(device->pin(host.data(), page), CapacityError);
  EXPECT_EQ(fake_.calls("cudaHostRegister"), 0U);
}

TEST_P(CudaDeviceTest, MemoryThatMayOnlyBeReadIsRegisteredSoWhereTheDeviceCan) {
  const HostPages host;
  {
    const auto device = open();
    EXPECT_THROW(device->pin_read_only(host.data(), page), CapacityError);
  }
  fake_.reset();
  fake_.set_attribute(0, host_register_read_only, 1);
  const auto device = open();
  device->pin_read_only(host.data(), page);
  const StreamHandle stream = device->create_stream();
  void* const memory = device->allocate(page);
  copy_and_wait(*device, stream, static_cast<std::byte*>(memory), host.data(), page);
  EXPECT_TRUE(fake_.take_violations().empty());
  // That it was registered so shows in what the checker says of a copy into it.
  std::byte* target = host.data();
  const auto* source = static_cast<const std::byte*>(memory);
  const std::size_t bytes = page;
  EXPECT_THROW(device->copy({&target, &source, &bytes, 1}, Direction::to_host,
                            SourceAccess::stream_order, stream),
               CopyFailed);
  wait_for_stream(*device, stream);
  const auto violations = fake_.take_violations();
  ASSERT_EQ(violations.size(), 1U);
  EXPECT_EQ(violations[0].rfind("read_only", 0), 0U) << violations[0];
  device->unpin(host.data(), page);
  device->deallocate(memory, page);
  device->destroy_stream(stream);
}

TEST_P(CudaDeviceTest, MoreMemoryThanThereIsIsRefusedWithTheNumbers) {
  const auto device = open();
  fake_.fail("cudaMalloc", 1, 1, memory_allocation, 0);
  try {
    static_cast<void>(device->allocate(page));
    ADD_FAILURE() << "it was given";
  } catch (const CapacityError& refused) {
    EXPECT_EQ(refused.shortage.wanted, page);
    EXPECT_EQ(refused.shortage.largest, device->info().memory_bytes);
    EXPECT_GT(refused.shortage.free, 0U);
  }
  EXPECT_EQ(pending_error(), success);
}

// ---- events ----

TEST_P(CudaDeviceTest, EventTimesAreOnTheHostsClock) {
  const auto device = open();
  const StreamHandle stream = device->create_stream();
  const EventHandle event = device->create_event(true);
  for (int i = 0; i < 3; ++i) {
    const Nanoseconds before = device->now();
    device->record(event, stream);
    while (device->query(event) == EventState::pending) std::this_thread::yield();
    const Nanoseconds after = device->now(), at = device->event_time(event);
    constexpr Nanoseconds slack = 50'000'000;  // of a busy machine and the fake's clock
    EXPECT_GE(at, before - slack);
    EXPECT_LE(at, after + slack);
  }
  device->destroy_event(event);
  device->destroy_stream(stream);
}

TEST_P(CudaDeviceTest, EventsHaveTimingOnlyWhereItIsAskedFor) {
  const auto device = open();
  const StreamHandle stream = device->create_stream();
  const EventHandle event = device->create_event(false);
  device->record(event, stream);
  while (device->query(event) == EventState::pending) std::this_thread::yield();
  EXPECT_THROW(static_cast<void>(device->event_time(event)), InvalidArgument);
  device->destroy_event(event);
  device->destroy_stream(stream);
}

TEST_P(CudaDeviceTest, AQueryThatFailsLearnsNothing) {
  const auto device = open();
  const EventHandle event = device->create_event(false);
  fake_.fail("cudaEventQuery", 1, 1, invalid_value, 0);
  EXPECT_EQ(device->query(event), EventState::failed);
  EXPECT_EQ(device->query(event), EventState::done);
  device->destroy_event(event);
}

// ---- the end ----

TEST_P(CudaDeviceTest, AStickyErrorLosesTheDeviceAndItIsNotCalledAgain) {
  const auto device = open();
  const StreamHandle stream = device->create_stream();
  const EventHandle event = device->create_event(false);
  device->record(event, stream);
  const HostPages host;
  device->pin(host.data(), page);
  fake_.fail("cudaEventQuery", 1, 1, illegal_address, 0);
  EXPECT_EQ(device->query(event), EventState::lost);
  const auto calls = fake_.calls("*");
  EXPECT_EQ(device->query(event), EventState::lost);
  EXPECT_THROW(device->record(event, stream), DeviceLost);
  EXPECT_THROW(device->wait(stream, event), DeviceLost);
  EXPECT_THROW(static_cast<void>(device->create_stream()), DeviceLost);
  EXPECT_THROW(static_cast<void>(device->allocate(page)), DeviceLost);
  EXPECT_THROW(device->pin(host.data(), page), DeviceLost);
  device->unpin(host.data(), page);
  device->destroy_event(event);
  device->destroy_stream(stream);
  EXPECT_EQ(fake_.calls("*"), calls);
  try {
    device->record(event, stream);
  } catch (const DeviceLost& error) {
    EXPECT_NE(std::string(error.what()).find("700"), std::string::npos) << error.what();
  }
}

TEST_P(CudaDeviceTest, EveryStickyErrorLosesTheDevice) {
  for (const Error error :
       {cudart_unloading, ecc_uncorrectable, nvlink_uncorrectable, contained, illegal_address,
        launch_timeout, context_is_destroyed, device_assert, hardware_stack_error,
        illegal_instruction, misaligned_address, invalid_address_space, invalid_pc, launch_failure,
        tensor_memory_leak, mps_client_terminated, external_device, unknown}) {
    fake_.reset();
    const auto device = open();
    fake_.fail("cudaStreamCreateWithFlags", 1, 1, error, 0);
    EXPECT_THROW(static_cast<void>(device->create_stream()), DeviceLost) << error;
    EXPECT_THROW(static_cast<void>(device->create_event(false)), DeviceLost) << error;
  }
}

TEST_P(CudaDeviceTest, OnceTheExitHasBegunNothingIsCalledAndEverythingLeaks) {  // case 156
  const pid_t child = fork();
  if (child == 0) {
    const FakeCudart fake(GetParam());
    auto device = make_cuda_device(fake.runtime());
    const StreamHandle stream = device->create_stream();
    const EventHandle event = device->create_event(false);
    device->record(event, stream);
    set_process_exiting();
    const auto calls = fake.calls("*");
    bool good = device->query(event) == EventState::pending;
    try {
      device->record(event, stream);
      good = false;
    } catch (const Closed&) {
    }
    device->destroy_event(event);
    device->destroy_stream(stream);
    device.reset();
    _exit(good && fake.calls("*") == calls ? 0 : 1);
  }
  int status = 0;
  waitpid(child, &status, 0);
  EXPECT_EQ(status, 0);
}

TEST_P(CudaDeviceTest, AForkedChildIsToldAndCallsNothing) {  // case 152
  auto device = open();
  const StreamHandle stream = device->create_stream();
  const EventHandle event = device->create_event(false);
  const auto calls = fake_.calls("*");
  const pid_t child = fork();
  if (child == 0) {
    bool good = device->query(event) == EventState::lost;
    try {
      device->record(event, stream);
      good = false;
    } catch (const Forked&) {
    }
    device->destroy_event(event);
    device->destroy_stream(stream);
    device.reset();
    _exit(good && fake_.calls("*") == calls ? 0 : 1);
  }
  int status = 0;
  waitpid(child, &status, 0);
  EXPECT_EQ(status, 0);
  device->destroy_event(event);
  device->destroy_stream(stream);
}

// ---- opening ----

TEST_P(CudaDeviceTest, SaysWhatItIs) {
  fake_.set_device_count(2);
  fake_.set_attribute(1, async_engine_count, 3);
  fake_.set_attribute(1, host_numa_id, 0);
  const auto device = open({.ordinal = 1});
  const DeviceInfo& info = device->info();
  EXPECT_EQ(info.kind, "cuda");
  EXPECT_EQ(info.name, "cuda:1");
  EXPECT_EQ(info.copy_engines, 3U);
  EXPECT_TRUE(info.needs_pinned_host);
  EXPECT_TRUE(info.calls_block);
  EXPECT_FALSE(info.wakes_sleepers);
  EXPECT_EQ(info.max_descriptors, 4096U);
  EXPECT_EQ(info.numa_node, 0);
  EXPECT_GT(info.memory_bytes, 0U);
}

TEST_P(CudaDeviceTest, AnOrdinalOrOptionThatIsNoneIsRefusedByName) {
  for (const int ordinal : {-1, 1, 99}) {
    const std::string why = refusal([&] { static_cast<void>(open({.ordinal = ordinal})); });
    EXPECT_NE(why.find("cuda:" + std::to_string(ordinal)), std::string::npos) << why;
  }
  EXPECT_THROW(static_cast<void>(open({.max_descriptors = 0})), InvalidArgument);
  EXPECT_THROW(static_cast<void>(open({.max_descriptors = 1 << 30})), InvalidArgument);
}

TEST_P(CudaDeviceTest, ADeviceThatCannotBeUsedIsUnavailableWithTheReason) {
  fake_.set_attribute(0, compute_mode, 3);
  fake_.fail("cudaMemGetInfo", 1, 1, devices_unavailable, 0);
  try {
    static_cast<void>(open());
    ADD_FAILURE() << "it was opened";
  } catch (const DeviceUnavailable& error) {
    EXPECT_NE(std::string(error.what()).find("46"), std::string::npos) << error.what();
    EXPECT_NE(std::string(error.what()).find("exclusive"), std::string::npos) << error.what();
  }
  fake_.set_driver_version(0);
  EXPECT_THROW(static_cast<void>(open()), DeviceUnavailable);
}

TEST_P(CudaDeviceTest, CopyStreamsAreNotHeldBackByTheLegacyDefaultStream) {
  const auto device = open();
  const StreamHandle stream = device->create_stream();
  EXPECT_TRUE(fake_.take_violations().empty()) << "blocking_stream";
  device->destroy_stream(stream);
}

TEST_P(CudaDeviceTest, NothingIsLeftWhenItIsGone) {
  {
    const auto device = open();
    use(*device);
  }
  EXPECT_EQ(fake_.live_streams(0), 0U);
  EXPECT_EQ(fake_.live_events(0), 0U);
  EXPECT_EQ(fake_.registered_bytes(), 0U);
  EXPECT_EQ(fake_.allocated_bytes(0), 0U);
}

}  // namespace
}  // namespace kvmem::cuda
