// A virtual device whose clock is the real one: a thread of its own moves it, and so does whoever
// calls the device.
#pragma once

#include <memory>

#include "device/virtual_device.hpp"

namespace kvmem::fake {

class FreeRunning {
 public:
  FreeRunning();
  FreeRunning(const FreeRunning&) = delete;
  FreeRunning& operator=(const FreeRunning&) = delete;
  ~FreeRunning();  // waits for the thread

  [[nodiscard]] VirtualDevice& device() noexcept;
  void catch_up();       // with the real time
  void wake() noexcept;  // there is something to do

 private:
  struct Shared;
  std::shared_ptr<Shared> shared_;
};

}  // namespace kvmem::fake
