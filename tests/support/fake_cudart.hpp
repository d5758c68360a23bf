// One of the two builds of the fake CUDA runtime (tests/fakes), loaded into this process: its path
// for kvmem's loader, its controls for the test. Made anew by each test; at its end the checker
// must have seen nothing.
#pragma once

#include <dlfcn.h>
#include <unistd.h>

#include <stdexcept>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "device/cuda/cuda_device.hpp"
#include "device/model_device.hpp"
#include "fakes/fake_cudart.h"

namespace kvmem::test {

class FakeCudart {
 public:
  explicit FakeCudart(int major) : path_(path_of(major)) { reset(); }
  FakeCudart(const FakeCudart&) = delete;
  FakeCudart& operator=(const FakeCudart&) = delete;
  ~FakeCudart() {
    for (const std::string& violation : take_violations()) ADD_FAILURE() << violation;
    reset();
  }

  // CMake puts them beside the test programs.
  [[nodiscard]] static std::string path_of(int major) {
    std::string self(4096, '\0');
    const ssize_t length = readlink("/proc/self/exe", self.data(), self.size());
    self.resize(length > 0 ? static_cast<std::size_t>(length) : 0);
    return self.substr(0, self.rfind('/')) + "/fakes/libcudart.so." + std::to_string(major);
  }

  [[nodiscard]] const std::string& path() const noexcept { return path_; }
  [[nodiscard]] std::shared_ptr<const cuda::Cudart> runtime() const {
    return cuda::load_cudart(path_);
  }
  // A function of the runtime itself, for what the engine does behind kvmem's back.
  template <class Function>
  [[nodiscard]] Function* function(const char* name) const {
    void* const found = dlsym(library_, name);
    if (found == nullptr) throw std::runtime_error(std::string("the fake has no ") + name);
    return reinterpret_cast<Function*>(found);
  }
  [[nodiscard]] ModelDevice& model(int device = 0) const {
    return *static_cast<ModelDevice*>(model_(device));
  }
  void attach(int device, ModelDevice& model) const { attach_(device, &model); }

  [[nodiscard]] std::vector<std::string> take_violations() const {
    std::vector<std::string> all;
    for (std::size_t i = 0; i < violations_(); ++i) all.emplace_back(violation_(i));
    forget_violations_();
    return all;
  }

 private:
  std::string path_;
  void* library_ = open(path_);

  static void* open(const std::string& path) {
    void* const library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) throw std::runtime_error(dlerror());
    return library;
  }

  decltype(&kvmem_fake_model) model_ = function<decltype(kvmem_fake_model)>("kvmem_fake_model");
  decltype(&kvmem_fake_attach) attach_ = function<decltype(kvmem_fake_attach)>("kvmem_fake_attach");
  decltype(&kvmem_fake_violations) violations_ =
      function<decltype(kvmem_fake_violations)>("kvmem_fake_violations");
  decltype(&kvmem_fake_violation) violation_ =
      function<decltype(kvmem_fake_violation)>("kvmem_fake_violation");
  decltype(&kvmem_fake_forget_violations) forget_violations_ =
      function<decltype(kvmem_fake_forget_violations)>("kvmem_fake_forget_violations");

 public:
  // The other controls, by their names without the prefix.
#define KVMEM_FAKE_CONTROL(name) \
  decltype(&kvmem_fake_##name) name = function<decltype(kvmem_fake_##name)>("kvmem_fake_" #name)
  KVMEM_FAKE_CONTROL(reset);
  KVMEM_FAKE_CONTROL(set_device_count);
  KVMEM_FAKE_CONTROL(set_driver_version);
  KVMEM_FAKE_CONTROL(set_count_error);
  KVMEM_FAKE_CONTROL(set_attribute);
  KVMEM_FAKE_CONTROL(set_pci_bus_id);
  KVMEM_FAKE_CONTROL(declare_device_memory);
  KVMEM_FAKE_CONTROL(declare_staged);
  KVMEM_FAKE_CONTROL(forget_memory);
  KVMEM_FAKE_CONTROL(fail);
  KVMEM_FAKE_CONTROL(lose);
  KVMEM_FAKE_CONTROL(forget_faults);
  KVMEM_FAKE_CONTROL(calls);
  KVMEM_FAKE_CONTROL(faults);
  KVMEM_FAKE_CONTROL(enable);
  KVMEM_FAKE_CONTROL(set_most_descriptors);
  KVMEM_FAKE_CONTROL(allow);
  KVMEM_FAKE_CONTROL(enter);
  KVMEM_FAKE_CONTROL(leave);
  KVMEM_FAKE_CONTROL(capture_invalidated);
  KVMEM_FAKE_CONTROL(live_streams);
  KVMEM_FAKE_CONTROL(live_events);
  KVMEM_FAKE_CONTROL(registered_bytes);
  KVMEM_FAKE_CONTROL(allocated_bytes);
  KVMEM_FAKE_CONTROL(has_context);
#undef KVMEM_FAKE_CONTROL
};

}  // namespace kvmem::test
