// Why CUDA can or cannot be used, each reason told apart.
#include "device/cuda/cuda_status.hpp"

#include <filesystem>
#include <fstream>

#include "support/fake_cudart.hpp"

namespace kvmem::cuda {
namespace {

using test::FakeCudart;

class CudaStatus : public ::testing::TestWithParam<int> {
 protected:
  FakeCudart fake_{GetParam()};
  [[nodiscard]] Status look() const { return examine(fake_.runtime()); }
  void expect(const Status& status, Usability usability, const std::vector<std::string>& words) {
    EXPECT_EQ(status.usability, usability) << status.sentence;
    for (const std::string& word : words)
      EXPECT_NE(status.sentence.find(word), std::string::npos) << status.sentence;
    int (*const last_error)() = fake_.function<int()>("cudaGetLastError");
    // A runtime that cannot work says so to every call, and keeps on saying it.
    EXPECT_TRUE(status.error != success || last_error() == success) << "an error was left";
  }
};

INSTANTIATE_TEST_SUITE_P(Runtimes, CudaStatus, ::testing::Values(12, 13),
                         [](const auto& major) { return "Cuda" + std::to_string(major.param); });

TEST_P(CudaStatus, WithADriverAndDevicesItIsUsable) {
  fake_.set_device_count(3);
  const Status status = look();
  expect(status, Usability::usable, {"3 devices"});
  EXPECT_EQ(status.device_count, 3);
  EXPECT_FALSE(status.absent());
}

TEST_P(CudaStatus, WithoutADriverThereIsNothingToUse) {
  fake_.set_driver_version(0);
  const Status status = look();
  expect(status, Usability::no_driver, {"libcuda.so.1", fake_.path()});
  EXPECT_EQ(status.error, insufficient_driver);
  EXPECT_EQ(status.device_count, 0);
  EXPECT_TRUE(status.absent());
}

TEST_P(CudaStatus, ADriverTooOldForTheRuntimeIsNotTakenForNone) {
  fake_.set_driver_version(11040);
  const Status status = look();
  expect(status, Usability::driver_too_old, {"11.4", "update the driver"});
  EXPECT_FALSE(status.absent());
}

TEST_P(CudaStatus, ADriverWithoutAGpuThatShowsIsAbsent) {
  fake_.set_count_error(no_device_found);
  const Status status = look();
  expect(status, Usability::no_device, {"CUDA_VISIBLE_DEVICES"});
  EXPECT_TRUE(status.absent());
}

TEST_P(CudaStatus, ABrokenSetUpIsSaidToBeBrokenWithTheError) {
  for (const Error error : {initialization_error, stub_library, devices_unavailable,
                            system_not_ready, system_driver_mismatch, unknown}) {
    fake_.reset();
    fake_.set_count_error(error);
    const Status status = look();
    expect(status, Usability::broken, {std::to_string(error), "broken"});
    EXPECT_EQ(status.error, error);
    EXPECT_FALSE(status.absent());
  }
}

TEST_P(CudaStatus, FactsAreThoseOfTheDeviceAsked) {
  fake_.set_device_count(2);
  fake_.set_attribute(1, async_engine_count, 7);
  fake_.set_attribute(1, compute_capability_major, 12);
  fake_.set_attribute(1, compute_capability_minor, 1);
  fake_.set_attribute(1, can_use_host_pointer, 0);
  fake_.set_attribute(1, mps_enabled, 1);
  fake_.set_attribute(1, host_numa_id, 5);
  fake_.set_pci_bus_id(1, "0000:C1:00.0");
  const auto runtime = fake_.runtime();
  const DeviceFacts facts = facts_of(*runtime, 1), other = facts_of(*runtime, 0);
  EXPECT_EQ(facts.copy_engines, 7);
  EXPECT_EQ(facts.compute_capability, 121);
  EXPECT_EQ(facts.can_use_host_pointer, false);
  EXPECT_EQ(facts.mps, true);
  EXPECT_EQ(facts.numa_node, 5);
  EXPECT_EQ(facts.pci_bus_id, "0000:c1:00.0") << "as the kernel writes it";
  EXPECT_NE(other.copy_engines, 7);
  EXPECT_EQ(other.mps, false);
}

TEST_P(CudaStatus, AnAttributeThatTheRuntimeDoesNotKnowIsAbsentAndLeavesNoError) {
  fake_.fail("cudaDeviceGetAttribute", 1, 1000, invalid_value, 0);
  const DeviceFacts facts = facts_of(*fake_.runtime(), 0);
  EXPECT_FALSE(facts.mps.has_value());
  EXPECT_FALSE(facts.compute_capability.has_value());
  EXPECT_EQ(fake_.function<int()>("cudaPeekAtLastError")(), success);
}

TEST_P(CudaStatus, LookingMakesNoContext) {
  static_cast<void>(look());
  static_cast<void>(facts_of(*fake_.runtime(), 0));
  EXPECT_EQ(fake_.has_context(0), 0);
}

TEST(FindCuda, PassesOverARuntimeThatIsTooNewForTheDriver) {
  const FakeCudart newer(13), older(12);  // both in the process, this one first
  older.set_driver_version(12080);
  newer.set_driver_version(12080);
  const Status status = find_cuda({});
  EXPECT_EQ(status.usability, Usability::usable) << status.sentence;
  EXPECT_EQ(status.runtime->version, 12090);
}

TEST(FindCuda, SaysOfTheFirstWhatIsTheMatterWhereNoneWillDo) {
  const FakeCudart fake(13);
  fake.set_driver_version(11000);
  setenv("KVMEM_CUDART_PATH", fake.path().c_str(), 1);
  EXPECT_EQ(find_cuda({}).usability, Usability::driver_too_old);
  unsetenv("KVMEM_CUDART_PATH");
}

// A made-up root folder.
class Root {
 public:
  Root() : path_(std::filesystem::temp_directory_path() / ("kvmem-" + std::to_string(getpid()))) {}
  Root(const Root&) = delete;
  Root& operator=(const Root&) = delete;
  ~Root() { std::filesystem::remove_all(path_); }
  void write(const std::string& file, const std::string& text) const {
    std::filesystem::create_directories((path_ / file).parent_path());
    std::ofstream(path_ / file) << text;
  }
  [[nodiscard]] std::string path() const { return path_.string() + "/"; }

 private:
  std::filesystem::path path_;
};

TEST(DriverRelease, IsReadFromEitherKernelModule) {
  const Root root;
  EXPECT_EQ(driver_release(root.path()), "");
  root.write("proc/driver/nvidia/version",
             "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.105.08  Wed Oct 29 2025\n"
             "GCC version:  gcc version 12.2.0 (Debian 12.2.0-14)\n");
  EXPECT_EQ(driver_release(root.path()), "580.105.08");
  root.write("proc/driver/nvidia/version",
             "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  575.51.03  Release Build\n");
  EXPECT_EQ(driver_release(root.path()), "575.51.03");
}

TEST(NumaNode, IsWhatTheKernelSaysOfThePciDevice) {
  const Root root;
  root.write("sys/bus/pci/devices/0000:c1:00.0/numa_node", "1\n");
  root.write("sys/bus/pci/devices/0000:02:00.0/numa_node", "-1\n");
  EXPECT_EQ(numa_node_of("0000:c1:00.0", root.path()), 1);
  EXPECT_EQ(numa_node_of("0000:02:00.0", root.path()), std::nullopt);
  EXPECT_EQ(numa_node_of("0000:03:00.0", root.path()), std::nullopt);
  EXPECT_EQ(numa_node_of("", root.path()), std::nullopt);
}

}  // namespace
}  // namespace kvmem::cuda
