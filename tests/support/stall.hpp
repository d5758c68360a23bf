// A gate in a stream: what is queued behind it runs only after open().
#pragma once

#include <memory>
#include <utility>

#include "device/model_device.hpp"

namespace kvmem::test {

class Stall {
 public:
  Stall(std::shared_ptr<ModelDevice> device, StreamHandle stream) : Stall(std::move(device)) {
    device_->wait(stream, event_);
  }
  explicit Stall(std::shared_ptr<ModelDevice> device) : device_(std::move(device)) {
    event_ = device_->create_event(false);
    device_->record_unsignalled(event_);
  }
  Stall(const Stall&) = delete;
  Stall& operator=(const Stall&) = delete;
  ~Stall() {
    open();
    device_->destroy_event(event_);
  }

  [[nodiscard]] EventHandle event() const noexcept { return event_; }
  void open() {
    if (!std::exchange(open_, true)) device_->signal(event_);
  }

 private:
  std::shared_ptr<ModelDevice> device_;
  EventHandle event_ = 0;
  bool open_ = false;
};

}  // namespace kvmem::test
