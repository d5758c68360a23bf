#include <map>
#include <mutex>

#include "contract/device_contract.hpp"
#include "device/host_device.hpp"

namespace kvmem::contract {
namespace {

class HostUnderTest : public DeviceUnderTest {
 public:
  explicit HostUnderTest(const HostDeviceOptions& options) : device_(make_host_device(options)) {}

  Device& device() override { return *device_; }

  void stall(StreamHandle stream) override {
    const EventHandle stall = device_->create_event(false);
    device_->record_unsignalled(stall);
    device_->wait(stream, stall);
    const std::lock_guard lock(mutex_);
    stalls_[stream] = stall;
  }

  void unstall(StreamHandle stream) override {
    const std::lock_guard lock(mutex_);
    const auto stall = stalls_.extract(stream).mapped();
    device_->signal(stall);
    device_->destroy_event(stall);
  }

 private:
  std::shared_ptr<HostDevice> device_;
  std::mutex mutex_;
  std::map<StreamHandle, EventHandle> stalls_;
};

DeviceKind host(const std::string& name, const HostDeviceOptions& options) {
  return {name, [options] { return std::make_unique<HostUnderTest>(options); }};
}

INSTANTIATE_TEST_SUITE_P(Kinds, DeviceContract,
                         ::testing::Values(host("Host", {}), host("HostOneWorker", {.workers = 1}),
                                           host("HostFourWorkers", {.workers = 4}),
                                           host("HostHelpedOnly", {.no_workers = true})),
                         kind_name);

}  // namespace
}  // namespace kvmem::contract
