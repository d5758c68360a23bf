// What holds for every kind of device, whatever it is made of. The facts are in *_facts.cpp, one
// sentence each; a kind joins by instantiating the suite with a DeviceKind (model_contract.cpp).
//
// The facts never touch device memory: they look at it by copying it back. They use few seconds of
// wall time, and wait for conditions, never for time to pass.
#pragma once

#include <cstddef>
#include <cstdlib>
#include <deque>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "device/device.hpp"

namespace kvmem::contract {

// One device under test, and what only its kind knows how to do. A stream is stalled by something
// that is queued on it like any work, at most once at a time; all streams can be at once.
class DeviceUnderTest {
 public:
  DeviceUnderTest() = default;
  DeviceUnderTest(const DeviceUnderTest&) = delete;
  DeviceUnderTest& operator=(const DeviceUnderTest&) = delete;
  virtual ~DeviceUnderTest() = default;

  [[nodiscard]] virtual Device& device() = 0;
  virtual void stall(StreamHandle stream) = 0;
  virtual void unstall(StreamHandle stream) = 0;  // any thread; also of a destroyed stream
};

struct DeviceKind {
  std::string name;
  std::function<std::unique_ptr<DeviceUnderTest>()> open;  // a new one at each call
  bool refuses_unknown_handles = true;  // CUDA trusts the pointers that it is given
  Nanoseconds clock_slack = 0;          // between now() and event_time()
  bool knows_records = true;            // CUDA does not say whether an event was ever recorded
};

inline void PrintTo(const DeviceKind& kind, std::ostream* out) { *out << kind.name; }

inline std::string kind_name(const ::testing::TestParamInfo<DeviceKind>& kind) {
  return kind.param.name;
}

struct Batch {
  std::vector<std::byte*> targets;
  std::vector<const std::byte*> sources;
  std::vector<std::size_t> sizes;

  void add(std::byte* target, const std::byte* source, std::size_t bytes) {
    targets.push_back(target);
    sources.push_back(source);
    sizes.push_back(bytes);
  }
  [[nodiscard]] CopyDescriptors descriptors() const {
    return {targets.data(), sources.data(), sizes.data(), sizes.size()};
  }
};

using Bytes = std::vector<std::byte>;

[[nodiscard]] Bytes pattern(std::size_t bytes, unsigned seed);
[[nodiscard]] bool same(std::span<const std::byte> a, std::span<const std::byte> b);
[[nodiscard]] inline Bytes bytes_of(std::span<const std::byte> some) {
  return {some.begin(), some.end()};
}

class DeviceContract : public ::testing::TestWithParam<DeviceKind> {
 protected:
  DeviceContract();
  void TearDown() override;  // ends every stall, waits for every stream, gives everything back

  [[nodiscard]] Device& device() { return under_test_->device(); }
  [[nodiscard]] StreamHandle new_stream();
  [[nodiscard]] EventHandle new_event(bool timing = false);
  void destroy_stream(StreamHandle stream);
  void destroy_event(EventHandle event);
  void stall(StreamHandle stream);
  void unstall(StreamHandle stream);

  // Host memory that any kind can copy to and from; `seed` fills it.
  [[nodiscard]] std::span<std::byte> host_memory(std::size_t bytes, unsigned seed = 0);
  [[nodiscard]] std::byte* device_memory(std::size_t bytes);
  void write_device(std::byte* target, std::span<const std::byte> source);
  [[nodiscard]] Bytes read_device(const std::byte* source, std::size_t bytes);

  // Queues a copy whose arrays live until the end of the test.
  void copy(Batch batch, Direction direction, StreamHandle stream);
  void copy_from(std::byte* target, std::span<const std::byte> source, SourceAccess access,
                 StreamHandle stream);
  void to_device(std::byte* target, std::span<const std::byte> source, StreamHandle stream);
  void to_host(std::span<std::byte> target, const std::byte* source, StreamHandle stream);

  [[nodiscard]] EventHandle record_now(StreamHandle stream, bool timing = false);
  [[nodiscard]] EventState query(EventHandle event) { return device().query(event); }
  // Sleeps, helping, until the event is no longer pending. Fails the test when that takes too long.
  void settle(EventHandle event);
  void settle_stream(StreamHandle stream) { settle(record_now(stream)); }
  // Gives work that must not run every chance to run: another stream moves bytes both ways.
  void let_others_work();

 private:
  using HostMemory = std::unique_ptr<std::byte, decltype(&std::free)>;

  std::unique_ptr<DeviceUnderTest> under_test_;
  std::vector<StreamHandle> streams_;
  std::vector<EventHandle> events_;
  std::vector<StreamHandle> stalled_;
  std::vector<std::pair<HostMemory, std::size_t>> host_memory_;
  std::vector<std::pair<std::byte*, std::size_t>> device_memory_;
  std::deque<Batch> batches_;
};

}  // namespace kvmem::contract
