// CUDA behind the facts: over the fake runtime in both ABIs, and on a real GPU where
// KVMEM_TEST_GPU=1 says that there is one.
#include <cstdlib>
#include <map>
#include <mutex>

#include "contract/device_contract.hpp"
#include "device/cuda/cuda_device.hpp"
#include "gpu/spin.hpp"
#include "support/fake_cudart.hpp"

namespace kvmem::contract {
namespace {

constexpr Nanoseconds millisecond = 1'000'000;

// One for all that are open at a time: the fake is one for the process.
std::shared_ptr<test::FakeCudart> fake_runtime(int major) {
  static auto* const open = new std::map<int, std::weak_ptr<test::FakeCudart>>;
  std::weak_ptr<test::FakeCudart>& known = (*open)[major];
  auto fake = known.lock();
  if (!fake) known = fake = std::make_shared<test::FakeCudart>(major);
  return fake;
}

class OverTheFake : public DeviceUnderTest {
 public:
  OverTheFake(int major, const cuda::Options& options) : fake_(fake_runtime(major)) {
    fake_->enable("wait_unrecorded", 0);  // two facts are about such waits
    device_ = cuda::make_cuda_device(fake_->runtime(), options);
  }

  Device& device() override { return *device_; }

  void stall(StreamHandle stream) override {
    ModelDevice& model = fake_->model();
    const EventHandle stall = model.create_event(false);
    model.record_unsignalled(stall);
    model.wait(stream, stall);
    const std::lock_guard lock(mutex_);
    stalls_[stream] = stall;
  }

  void unstall(StreamHandle stream) override {
    const std::lock_guard lock(mutex_);
    const auto stall = stalls_.extract(stream).mapped();
    fake_->model().signal(stall);
    fake_->model().destroy_event(stall);
  }

 private:
  std::shared_ptr<test::FakeCudart> fake_;  // outlives the device
  std::shared_ptr<Device> device_;
  std::mutex mutex_;
  std::map<StreamHandle, EventHandle> stalls_;
};

class OnTheGpu : public DeviceUnderTest {
 public:
  explicit OnTheGpu(const cuda::Options& options) : spinner_(test::Spinner::of_device(0)) {
    const cuda::Status status = cuda::find_cuda({});
    if (status.usability != cuda::Usability::usable) throw std::runtime_error(status.sentence);
    device_ = cuda::make_cuda_device(status.runtime, options);
  }

  Device& device() override { return *device_; }
  void stall(StreamHandle stream) override { spinner_.hold(stream); }
  void unstall(StreamHandle stream) override {
    EXPECT_TRUE(spinner_.let_go(stream)) << "a call waited for the stream that was held back";
  }

 private:
  test::Spinner& spinner_;  // first: it says what the driver needs to know before it is loaded
  std::shared_ptr<Device> device_;
};

cuda::Options options(bool batch) {
  cuda::Options some;
  some.batch = batch;
  return some;
}

template <class UnderTest, class... First>
DeviceKind kind(const std::string& name, Nanoseconds clock_slack, bool batch, First... first) {
  DeviceKind some{name, [=] { return std::make_unique<UnderTest>(first..., options(batch)); }};
  some.refuses_unknown_handles = false;
  some.knows_records = false;
  some.clock_slack = clock_slack;
  return some;
}

std::vector<DeviceKind> kinds() {
  std::vector<DeviceKind> all{kind<OverTheFake>("Cuda12", 5 * millisecond, true, 12),
                              kind<OverTheFake>("Cuda12OneByOne", 5 * millisecond, false, 12),
                              kind<OverTheFake>("Cuda13", 5 * millisecond, true, 13),
                              kind<OverTheFake>("Cuda13OneByOne", 5 * millisecond, false, 13)};
  const char* const gpu = std::getenv("KVMEM_TEST_GPU");
  if (gpu != nullptr && gpu == std::string("1")) {
    all.push_back(kind<OnTheGpu>("Gpu", millisecond / 2, true));
    all.push_back(kind<OnTheGpu>("GpuOneByOne", millisecond / 2, false));
  }
  return all;
}

INSTANTIATE_TEST_SUITE_P(Cuda, DeviceContract, ::testing::ValuesIn(kinds()), kind_name);

}  // namespace
}  // namespace kvmem::contract
