// kvmem's CUDA device on the fake runtime: the tests of another device then run through the CUDA
// device's own code and the checker. What the checker sees fails the test at the end.
//
// The fake stands on a model that the test controls, whose time is then the device's too, since
// tests compare it exactly; or on its own, which runs freely.
#pragma once

#include <algorithm>
#include <memory>
#include <utility>

#include "device/virtual_device.hpp"
#include "support/declared_memory.hpp"
#include "support/fake_cudart.hpp"

namespace kvmem::test {

struct OverFake {
  int major = 13;  // of the runtime: 12 or 13
  bool batch = true;
};

// Base: ModelDevice or VirtualDevice.
template <class Base>
class CudaOver : public Base, public Checker {
 public:
  CudaOver(const OverFake& over, std::shared_ptr<Base> model)
      : Base("the CUDA device"), fake_(over.major), model_(std::move(model)), free_running_(false) {
    fake_.attach(0, *model_);
    open(over);
    info_.name = model_->info().name;
    info_.virtual_time = model_->info().virtual_time;
  }
  explicit CudaOver(const OverFake& over)
      : Base("the CUDA device"), fake_(over.major), free_running_(true) {
    open(over);
    model_ = std::shared_ptr<Base>(std::shared_ptr<void>(), &fake_.model());  // the fake owns it
  }

  [[nodiscard]] FakeCudart& fake() noexcept { return fake_; }
  [[nodiscard]] cuda::CudaDevice& cuda() noexcept { return *cuda_; }
  void declare(const void* base, std::size_t bytes) override {
    fake_.declare_device_memory(0, base, bytes);
  }
  void forget(const void* base) override { fake_.forget_memory(base); }
  std::vector<std::string> take_violations() override { return fake_.take_violations(); }

  // ---- through the CUDA device ----
  const DeviceInfo& info() const noexcept override { return info_; }
  void* allocate(std::size_t bytes) override {
    return call([&] { return cuda_->allocate(bytes); });
  }
  void deallocate(void* base, std::size_t bytes) noexcept override {
    call([&] { cuda_->deallocate(base, bytes); });
  }
  void pin(void* base, std::size_t bytes) override {
    call([&] { cuda_->pin(base, bytes); });
  }
  bool unpin(void* base, std::size_t bytes) noexcept override {
    return call([&] { return cuda_->unpin(base, bytes); });
  }
  StreamHandle create_stream() override {
    return call([&] { return cuda_->create_stream(); });
  }
  void destroy_stream(StreamHandle stream) noexcept override {
    call([&] { cuda_->destroy_stream(stream); });
  }
  std::uint64_t stream_id(StreamHandle stream) override {
    return call([&] { return cuda_->stream_id(stream); });
  }
  EventHandle create_event(bool timing) override {
    return call([&] { return cuda_->create_event(timing); });
  }
  void destroy_event(EventHandle event) noexcept override {
    call([&] { cuda_->destroy_event(event); });
  }
  void adopt_thread() noexcept override { cuda_->adopt_thread(); }
  void record(EventHandle event, StreamHandle stream) override {
    call([&] { cuda_->record(event, stream); });
  }
  void wait(StreamHandle stream, EventHandle event) override {
    call([&] { cuda_->wait(stream, event); });
  }
  EventState query(EventHandle event) noexcept override {
    return call([&] { return cuda_->query(event); });
  }
  bool recorded(EventHandle event) const override {
    return call([&] { return cuda_->recorded(event); });
  }
  void copy(const CopyDescriptors& batch, Direction direction, SourceAccess access,
            StreamHandle stream) override {
    call([&] { cuda_->copy(batch, direction, access, stream); });
  }

  // ---- through the model ----
  Nanoseconds now() const noexcept override { return free_running_ ? cuda_->now() : model_->now(); }
  Nanoseconds event_time(EventHandle event) override {
    if (info_.virtual_time) return model_->event_time(event);
    return call([&] { return cuda_->event_time(event); });
  }
  void sleep(std::uint64_t seen, Nanoseconds at_most, bool help) override {
    if (free_running_ || !help) {
      return this->progress().sleep(seen, std::chrono::nanoseconds(at_most),
                                    help ? Progress::Sleeper::waiter : Progress::Sleeper::reaper);
    }
    if (this->progress().value() != seen) return;
    model_->sleep(model_->progress().value(), at_most, true);
    this->progress().bump();
  }
  void record_unsignalled(EventHandle event) override { model_->record_unsignalled(event); }
  void signal(EventHandle event) override {
    model_->signal(event);
    this->progress().bump();
  }
  bool may_touch(const void* base, std::size_t bytes) const override {
    return model_->may_touch(base, bytes);
  }
  bool may_write(const void* base, std::size_t bytes) const override {
    return model_->may_write(base, bytes);
  }

 protected:
  [[nodiscard]] Base& model() const noexcept { return *model_; }

 private:
  void open(const OverFake& over) {
    cuda::Options options;
    options.batch = over.batch;
    if (model_)
      options.max_descriptors = std::min(options.max_descriptors, model_->info().max_descriptors);
    cuda_ = cuda::make_cuda_device(fake_.runtime(), options);
    info_ = cuda_->info();
    info_.calls_block = false;  // nor are they made by further threads
    info_.numa_node.reset();
  }
  // The thread must be behind it as it was before.
  template <class Call>
  auto call(Call&& call) const {
    struct Public {
      explicit Public(const FakeCudart& on) : fake(on) { fake.enter(); }
      ~Public() { fake.leave(); }
      const FakeCudart& fake;
    } const now(fake_);
    return call();
  }

  FakeCudart fake_;
  std::shared_ptr<Base> model_;
  std::shared_ptr<cuda::CudaDevice> cuda_;
  DeviceInfo info_;
  const bool free_running_;
};

class CudaOverVirtual final : public CudaOver<VirtualDevice> {
 public:
  CudaOverVirtual(const OverFake& over, VirtualOptions options)
      : CudaOver(over, make_virtual_device(pinned(options))) {}

  bool step() override {
    const bool ended = model().step();
    progress().bump();
    return ended;
  }
  void advance(Nanoseconds by) override {
    model().advance(by);
    progress().bump();
  }
  std::optional<Nanoseconds> next_time() override { return model().next_time(); }
  void fail_nth(DeviceCall call, std::uint64_t nth, Fault how, std::uint64_t times) override {
    model().fail_nth(call, nth, how, times);
  }
  void forget_faults() override { model().forget_faults(); }
  void pause_faults(bool paused) override { model().pause_faults(paused); }
  std::uint64_t faults() const override { return model().faults(); }
  void lose() override {
    model().lose();
    fake().lose(0);
    progress().bump();
  }
  bool lost() const override { return model().lost(); }
  void hold_copies(std::uint64_t count) override { model().hold_copies(count); }
  void release_copies() override { model().release_copies(); }
  std::size_t pending_copies() const override { return model().pending_copies(); }
  std::size_t held_copies() const override { return model().held_copies(); }

 private:
  static VirtualOptions pinned(VirtualOptions options) {
    options.needs_pinned_host = true;
    return options;
  }
};

}  // namespace kvmem::test
