// A host device that must be polled, as CUDA must: nothing tells when an event is reached.
#pragma once

#include <memory>
#include <utility>

#include "device/host_device.hpp"

namespace kvmem::test {

class PolledDevice final : public Device {
 public:
  explicit PolledDevice(std::shared_ptr<ModelDevice> host)
      : host_(std::move(host)), info_(host_->info()) {
    info_.wakes_sleepers = false;
  }

  const DeviceInfo& info() const noexcept override { return info_; }
  Nanoseconds now() const noexcept override { return host_->now(); }
  void* allocate(std::size_t bytes) override { return host_->allocate(bytes); }
  void deallocate(void* base, std::size_t bytes) noexcept override {
    host_->deallocate(base, bytes);
  }
  void pin(void* base, std::size_t bytes) override { host_->pin(base, bytes); }
  bool unpin(void* base, std::size_t bytes) noexcept override { return host_->unpin(base, bytes); }
  StreamHandle create_stream() override { return host_->create_stream(); }
  void destroy_stream(StreamHandle stream) noexcept override { host_->destroy_stream(stream); }
  std::uint64_t stream_id(StreamHandle stream) override { return host_->stream_id(stream); }
  EventHandle create_event(bool timing) override { return host_->create_event(timing); }
  void destroy_event(EventHandle event) noexcept override { host_->destroy_event(event); }
  void record(EventHandle event, StreamHandle stream) override { host_->record(event, stream); }
  void wait(StreamHandle stream, EventHandle event) override { host_->wait(stream, event); }
  EventState query(EventHandle event) noexcept override { return host_->query(event); }
  bool recorded(EventHandle event) const override { return host_->recorded(event); }
  Nanoseconds event_time(EventHandle event) override { return host_->event_time(event); }
  void copy(const CopyDescriptors& batch, Direction direction, SourceAccess access,
            StreamHandle stream) override {
    host_->copy(batch, direction, access, stream);
  }
  void sleep(std::uint64_t seen, Nanoseconds at_most, bool help) override {
    progress().sleep(seen, std::chrono::nanoseconds(at_most),
                     help ? Progress::Sleeper::waiter : Progress::Sleeper::reaper);
  }

 private:
  std::shared_ptr<ModelDevice> host_;
  DeviceInfo info_;
};

}  // namespace kvmem::test
