// Which thread a call is made on, which device that thread has then, and what the end of the
// process waits for: with two devices of which only the second is kvmem's, as on a rank of an
// engine.
#include <sys/wait.h>

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <thread>

#include "base/error.hpp"
#include "base/process.hpp"
#include "device/cuda/cuda_device.hpp"
#include "recycle/runtime.hpp"
#include "support/fake_cudart.hpp"
#include "support/wait_for.hpp"

namespace kvmem::cuda {
namespace {

using test::comes_true;
using test::FakeCudart;

class CudaThreads : public ::testing::TestWithParam<int> {
 protected:
  CudaThreads() { fake_.set_device_count(2); }
  std::shared_ptr<CudaDevice> second() { return make_cuda_device(fake_.runtime(), {.ordinal = 1}); }
  unsigned long long switches() { return fake_.calls("cudaSetDevice"); }

  FakeCudart fake_{GetParam()};
};

INSTANTIATE_TEST_SUITE_P(Runtimes, CudaThreads, ::testing::Values(12, 13),
                         [](const auto& major) { return "Cuda" + std::to_string(major.param); });

TEST_P(CudaThreads, ACallFromAThreadOfItsOwnMakesNoContextOnTheFirstDevice) {
  const auto device = second();
  std::thread([&] {  // it was never told a device
    const StreamHandle stream = device->create_stream();
    static_cast<void>(device->stream_id(stream));
    device->destroy_stream(stream);
  })
      .join();
  EXPECT_EQ(fake_.has_context(0), 0);
}

TEST_P(CudaThreads, AThreadOfKvmemsHasTheDeviceForGood) {
  const auto device = second();
  const EventHandle event = device->create_event(false);
  std::thread([&] {
    device->adopt_thread();
    const auto before = switches();
    for (int i = 0; i < 5; ++i) EXPECT_EQ(device->query(event), EventState::done);
    EXPECT_EQ(switches(), before) << "each call goes there and back";
    int current = -1;
    fake_.function<GetDevice>("cudaGetDevice")(&current);
    EXPECT_EQ(current, 1);
  }).join();
  EXPECT_EQ(fake_.has_context(0), 0);
  device->destroy_event(event);
}

TEST_P(CudaThreads, TheReaperPollsWithoutChangingDevices) {
  const auto device = second();
  const auto runtime = Runtime::make(device);
  ModelDevice& model = fake_.model(1);
  const EventHandle gate = model.create_event(false);
  model.record_unsignalled(gate);
  const kvmem::Stream stream(device);
  device->wait(stream.handle(), gate);
  struct Nothing final : Parked {
    void ended(bool) noexcept override {}
  };
  auto parked = std::make_unique<Nothing>();
  parked->event = runtime->mark_stream(stream.handle()).event;
  const auto lease = runtime->lease_reaper();
  runtime->recycle().park(runtime->recycle().line(stream.id(), stream.handle(), true),
                          std::move(parked));
  const auto polls = [&] { return fake_.calls("cudaEventQuery"); };
  const auto first = polls();
  ASSERT_TRUE(comes_true([&] { return polls() > first + 2; })) << "nobody polls";
  const auto before = switches();
  const auto seen = polls();
  ASSERT_TRUE(comes_true([&] { return polls() > seen + 5; }));
  EXPECT_EQ(switches(), before);
  EXPECT_EQ(fake_.has_context(0), 0);
  model.signal(gate);
  EXPECT_TRUE(comes_true([&] { return runtime->recycle().in_flight() == 0; }));
}

TEST_P(CudaThreads, AStreamOfTheThreadIsForTheThreadsOwnDevice) {
  const auto device = second();
  ASSERT_EQ(fake_.function<SetDevice>("cudaSetDevice")(0), success);
  try {
    static_cast<void>(device->stream_id(2));
    ADD_FAILURE() << "the per-thread stream of another device was taken";
  } catch (const InvalidArgument& error) {
    EXPECT_NE(std::string(error.what()).find("cuda:1"), std::string::npos) << error.what();
  }
  ASSERT_EQ(fake_.function<SetDevice>("cudaSetDevice")(1), success);
  EXPECT_NO_THROW(static_cast<void>(device->stream_id(2)));
}

TEST_P(CudaThreads, ASmallNumberIsNoEvent) {
  const auto runtime = Runtime::make(second());
  EXPECT_THROW(static_cast<void>(runtime->mark_event(7)), InvalidArgument);
}

TEST(DeviceWorkAtExit, TheExitWaitsForThoseUnderWayAndNoneBeginsBehindIt) {
  const pid_t child = fork();
  if (child == 0) {
    std::atomic<bool> begun{false}, ended{false};
    std::thread calling([&] {
      const DeviceWork now;
      begun = DeviceWork::may_begin();
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
      ended = true;
    });
    while (!begun) std::this_thread::yield();
    set_process_exiting();
    const bool waited = ended;
    calling.join();
    const DeviceWork late;
    _exit(waited && !DeviceWork::may_begin() ? 0 : 1);
  }
  int status = 0;
  waitpid(child, &status, 0);
  EXPECT_EQ(status, 0);
}

TEST(DeviceWorkAtExit, AChildDoesNotWaitForThoseOfItsParent) {
  const DeviceWork now;
  const pid_t child = fork();
  if (child == 0) {
    const auto start = std::chrono::steady_clock::now();
    set_process_exiting();
    _exit(std::chrono::steady_clock::now() - start < std::chrono::milliseconds(500) ? 0 : 1);
  }
  int status = 0;
  waitpid(child, &status, 0);
  EXPECT_EQ(status, 0);
}

// ---- registration ----

class CudaRegistration : public CudaThreads {
 protected:
  static constexpr std::size_t page = 4096;
  std::shared_ptr<std::byte> host_{static_cast<std::byte*>(std::aligned_alloc(page, page)),
                                   &std::free};
};

INSTANTIATE_TEST_SUITE_P(Runtimes, CudaRegistration, ::testing::Values(12, 13),
                         [](const auto& major) { return "Cuda" + std::to_string(major.param); });

TEST_P(CudaRegistration, WhatTheRuntimeDoesNotKnowBehindItIsRefused) {
  const auto device = second();
  fake_.fail("cudaPointerGetAttributes", 1, 1, invalid_value, 0);
  EXPECT_THROW(device->pin(host_.get(), page), CapacityError);
  EXPECT_EQ(fake_.registered_bytes(), 0U);
  device->pin(host_.get(), page);
  EXPECT_TRUE(device->unpin(host_.get(), page));
}

TEST_P(CudaRegistration, IsNotLookedAtWhereTheDeviceUsesTheHostsPageTables) {
  fake_.set_attribute(1, pageable_memory_uses_host_page_tables, 1);
  const auto device = second();
  fake_.fail("cudaPointerGetAttributes", 1, 1, invalid_value, 0);
  device->pin(host_.get(), page);
  EXPECT_TRUE(device->unpin(host_.get(), page));
  EXPECT_EQ(fake_.calls("cudaPointerGetAttributes"), 0U);
}

TEST_P(CudaRegistration, SaysWhetherMemoryIsStillRegistered) {
  const auto device = second();
  device->pin(host_.get(), page);
  fake_.fail("cudaHostUnregister", 1, 1, invalid_value, 0);
  EXPECT_FALSE(device->unpin(host_.get(), page));
  EXPECT_TRUE(device->unpin(host_.get(), page));
  EXPECT_TRUE(device->unpin(host_.get(), page)) << "it is not registered any more";
}

}  // namespace
}  // namespace kvmem::cuda
