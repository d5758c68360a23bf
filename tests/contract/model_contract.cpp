#include <map>
#include <mutex>

#include "contract/device_contract.hpp"
#include "device/host_device.hpp"
#include "device/virtual_device.hpp"

namespace kvmem::contract {
namespace {

class ModelUnderTest : public DeviceUnderTest {
 public:
  explicit ModelUnderTest(std::shared_ptr<ModelDevice> device) : device_(std::move(device)) {}

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
  std::shared_ptr<ModelDevice> device_;
  std::mutex mutex_;
  std::map<StreamHandle, EventHandle> stalls_;
};

DeviceKind host(const std::string& name, const HostDeviceOptions& options) {
  return {name, [options] { return std::make_unique<ModelUnderTest>(make_host_device(options)); }};
}

DeviceKind in_virtual_time(const std::string& name, const VirtualOptions& options) {
  return {name,
          [options] { return std::make_unique<ModelUnderTest>(make_virtual_device(options)); }};
}

INSTANTIATE_TEST_SUITE_P(
    Kinds, DeviceContract,
    ::testing::Values(host("Host", {}), host("HostOneWorker", {.workers = 1}),
                      host("HostFourWorkers", {.workers = 4}),
                      host("HostHelpedOnly", {.no_workers = true}), in_virtual_time("Virtual", {}),
                      in_virtual_time("VirtualOtherOrder", {.seed = 1}),
                      in_virtual_time("VirtualOneLink", {.seed = 2, .shared_link = true}),
                      in_virtual_time("VirtualNoTime",
                                      {.seed = 3, .bytes_per_second = 1e18, .latency = 0}),
                      in_virtual_time("VirtualPinned", {.seed = 4, .needs_pinned_host = true})),
    kind_name);

}  // namespace
}  // namespace kvmem::contract
