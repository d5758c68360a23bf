// A program of CUDA's for the tests of the fake: it calls the C functions as an engine would, and
// nothing of kvmem's cuda device.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "device/virtual_device.hpp"
#include "support/fake_cudart.hpp"

namespace kvmem::test {

using cuda::Error;
using cuda::Event;
using cuda::Stream;

// Whole pages that go by themselves, between two that nobody uses: so a hole in them is one page,
// which hardly anything fits into.
class Pages {
 public:
  explicit Pages(std::size_t bytes = 4096, int value = 0) : bytes_(bytes) {
    void* const all = mmap(nullptr, bytes + 8192, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (all == MAP_FAILED) throw std::bad_alloc();
    base_ = static_cast<std::byte*>(all) + 4096;
    mprotect(base_, bytes, PROT_READ | PROT_WRITE);
    std::memset(base_, value, bytes);
  }
  Pages(const Pages&) = delete;
  Pages& operator=(const Pages&) = delete;
  ~Pages() {
    munmap(at(0) - 4096, 4096);
    for (std::size_t offset = 0; offset <= bytes_; offset += 4096) {
      if (offset != gone_) munmap(at(offset), 4096);
    }
  }
  // Once: somebody else may get the page.
  void unmap_page(std::size_t offset) {
    gone_ = offset;
    munmap(at(offset), 4096);
  }

  [[nodiscard]] void* base() const noexcept { return base_; }
  [[nodiscard]] std::byte* at(std::size_t offset) const noexcept {
    return static_cast<std::byte*>(base_) + offset;
  }
  [[nodiscard]] std::size_t bytes() const noexcept { return bytes_; }

 private:
  void* base_;
  std::size_t bytes_;
  std::size_t gone_ = ~std::size_t{0};
};

// The arrays of a batch.
struct Arrays {
  std::vector<void*> targets;
  std::vector<const void*> sources;
  std::vector<std::size_t> sizes;
  cuda::MemcpyAttributes attributes;
  std::size_t first = 0;
  std::size_t failed = 0;

  void add(void* target, const void* source, std::size_t bytes) {
    targets.push_back(target);
    sources.push_back(source);
    sizes.push_back(bytes);
  }
};

class FakeTest : public ::testing::TestWithParam<int> {
 protected:
  using HostAlloc = Error(void**, std::size_t, unsigned);
  using BeginCapture = Error(Stream, cuda::CaptureMode);
  using EndCapture = Error(Stream, void**);
  using OfStream = Error(Stream);
  using OfEvent = Error(Event);

  template <class Function, class... Values>
  auto call(const char* name, Values... values) {
    return fake.function<Function>(name)(values...);
  }

  Error malloc(void** base, std::size_t bytes) {
    return call<cuda::Malloc>("cudaMalloc", base, bytes);
  }
  [[nodiscard]] void* device_memory(std::size_t bytes = 4096) {
    void* base = nullptr;
    EXPECT_EQ(malloc(&base, bytes), 0);
    return base;
  }
  Error free(void* base) { return call<cuda::Free>("cudaFree", base); }
  Error register_(const void* base, std::size_t bytes, unsigned flags = 1) {
    return call<cuda::HostRegister>("cudaHostRegister", const_cast<void*>(base), bytes, flags);
  }
  Error register_(const Pages& pages) { return register_(pages.base(), pages.bytes()); }
  Error unregister(const void* base) {
    return call<cuda::HostUnregister>("cudaHostUnregister", const_cast<void*>(base));
  }

  [[nodiscard]] Stream stream(unsigned flags = cuda::stream_non_blocking) {
    Stream made = nullptr;
    EXPECT_EQ(call<cuda::StreamCreateWithFlags>("cudaStreamCreateWithFlags", &made, flags), 0);
    return made;
  }
  Error destroy(Stream it) { return call<cuda::StreamDestroy>("cudaStreamDestroy", it); }
  [[nodiscard]] Event event(unsigned flags = cuda::event_disable_timing) {
    Event made = nullptr;
    EXPECT_EQ(call<cuda::EventCreateWithFlags>("cudaEventCreateWithFlags", &made, flags), 0);
    return made;
  }
  Error destroy(Event it) { return call<cuda::EventDestroy>("cudaEventDestroy", it); }
  Error record(Event it, Stream on) { return call<cuda::EventRecord>("cudaEventRecord", it, on); }
  Error wait(Stream on, Event it) {
    return call<cuda::StreamWaitEvent>("cudaStreamWaitEvent", on, it, 0U);
  }
  Error query(Event it) { return call<cuda::EventQuery>("cudaEventQuery", it); }
  Error synchronize(Event it) { return call<OfEvent>("cudaEventSynchronize", it); }
  Error synchronize(Stream it) { return call<OfStream>("cudaStreamSynchronize", it); }
  Error elapsed(float* milliseconds, Event from, Event to) {
    return call<cuda::EventElapsedTime>("cudaEventElapsedTime", milliseconds, from, to);
  }
  Error begin_capture(Stream it, cuda::CaptureMode mode = cuda::capture_global) {
    return call<BeginCapture>("cudaStreamBeginCapture", it, mode);
  }
  Error end_capture(Stream it) {
    void* graph = nullptr;
    return call<EndCapture>("cudaStreamEndCapture", it, &graph);
  }

  Error copy(void* target, const void* source, std::size_t bytes, Stream on) {
    return call<cuda::MemcpyAsync>("cudaMemcpyAsync", target, source, bytes, cuda::by_address, on);
  }
  Error batch(Arrays& arrays, Stream on, int order = cuda::access_order_stream) {
    arrays.attributes.source_access_order = order;
    const std::size_t count = arrays.sizes.size();
    if (GetParam() == 12) {
      return call<cuda::MemcpyBatchAsync12>("cudaMemcpyBatchAsync", arrays.targets.data(),
                                            const_cast<void**>(arrays.sources.data()),
                                            arrays.sizes.data(), count, &arrays.attributes,
                                            &arrays.first, std::size_t{1}, &arrays.failed, on);
    }
    return call<cuda::MemcpyBatchAsync13>("cudaMemcpyBatchAsync", arrays.targets.data(),
                                          arrays.sources.data(), arrays.sizes.data(), count,
                                          &arrays.attributes, &arrays.first, std::size_t{1}, on);
  }

  Error set_device(int device) { return call<cuda::SetDevice>("cudaSetDevice", device); }
  [[nodiscard]] int current_device() {
    int device = -1;
    EXPECT_EQ(call<cuda::GetDevice>("cudaGetDevice", &device), 0);
    return device;
  }
  Error last_error() { return call<cuda::GetLastError>("cudaGetLastError"); }
  Error peek() { return call<cuda::PeekAtLastError>("cudaPeekAtLastError"); }

  // From now on device 0 is one whose clock only the test moves.
  VirtualDevice& attach(const VirtualOptions& options = {}) {
    attached_ = make_virtual_device(options);
    fake.attach(0, *attached_);
    return *attached_;
  }

  void expect_violation(const std::string& rule) {
    const std::vector<std::string> seen = fake.take_violations();
    ASSERT_EQ(seen.size(), 1U) << (seen.empty() ? "none" : seen[1]);
    EXPECT_TRUE(seen[0].starts_with(rule + ": ")) << seen[0];
  }
  void expect_nothing() { EXPECT_EQ(fake.take_violations(), std::vector<std::string>{}); }

  std::shared_ptr<VirtualDevice> attached_;  // outlives the fake's use of it
  FakeCudart fake{GetParam()};
};

inline std::string build_name(const ::testing::TestParamInfo<int>& build) {
  return "Cuda" + std::to_string(build.param);
}

}  // namespace kvmem::test
