// Ordinary memory that a test lets stand for device memory: where a device checks whose memory it
// is given, it is told.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "device/device.hpp"

namespace kvmem::test {

class Checker {  // a device that does
 public:
  virtual ~Checker() = default;
  virtual void declare(const void* base, std::size_t bytes) = 0;
  virtual void forget(const void* base) = 0;
  // What was done that hardware would corrupt silently or refuse, since the last look.
  [[nodiscard]] virtual std::vector<std::string> take_violations() = 0;
};

class DeclaredMemory {
 public:
  DeclaredMemory(std::shared_ptr<Device> device, const void* base, std::size_t bytes)
      : device_(std::move(device)), base_(base) {
    if (auto* const checker = dynamic_cast<Checker*>(device_.get())) checker->declare(base, bytes);
  }
  DeclaredMemory(const DeclaredMemory&) = delete;
  DeclaredMemory& operator=(const DeclaredMemory&) = delete;
  ~DeclaredMemory() {
    if (auto* const checker = dynamic_cast<Checker*>(device_.get())) checker->forget(base_);
  }

 private:
  std::shared_ptr<Device> device_;
  const void* base_;
};

}  // namespace kvmem::test
