// The functions of the fake, by name: what each needs, how often each was called, and which calls
// are planned to fail.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <vector>

#include "device/cuda/cuda_abi.hpp"

namespace kvmem::fake {

using cuda::Error;

enum class Needs : std::uint8_t {
  nothing,
  driver,  // and says so where there is none
  device,  // and fails once that is lost
};

// Does it make a context on the thread's current device? As the real runtimes do, which were looked
// at: most calls do, also those that are about a handle of another device.
enum class Context : std::uint8_t { no, yes, in_12 = KVMEM_FAKE_CUDART < 13000 ? yes : no };

// The two that look at the last error are no calls that fail by themselves: "*" leaves them out.
#define KVMEM_FAKE_CALLS(X)                           \
  X(cudaDriverGetVersion, nothing, no)                \
  X(cudaRuntimeGetVersion, nothing, no)               \
  X(cudaGetLastError, driver, no)                     \
  X(cudaPeekAtLastError, driver, no)                  \
  X(cudaGetDeviceCount, driver, no)                   \
  X(cudaSetDevice, driver, no)                        \
  X(cudaGetDevice, driver, no)                        \
  X(cudaDeviceGetAttribute, driver, no)               \
  X(cudaDeviceGetPCIBusId, driver, no)                \
  X(cuDevicePrimaryCtxGetState, driver, no)           \
  X(cudaThreadExchangeStreamCaptureMode, driver, yes) \
  X(cudaMalloc, device, yes)                          \
  X(cudaFree, device, yes)                            \
  X(cudaMemGetInfo, device, yes)                      \
  X(cudaHostAlloc, device, yes)                       \
  X(cudaFreeHost, device, yes)                        \
  X(cudaHostRegister, device, yes)                    \
  X(cudaHostUnregister, device, yes)                  \
  X(cudaPointerGetAttributes, device, no)             \
  X(cudaStreamCreateWithFlags, device, yes)           \
  X(cudaStreamDestroy, device, yes)                   \
  X(cudaStreamGetId, device, yes)                     \
  X(cudaStreamGetDevice, device, no)                  \
  X(cudaStreamIsCapturing, device, yes)               \
  X(cudaStreamWaitEvent, device, yes)                 \
  X(cudaStreamQuery, device, yes)                     \
  X(cudaStreamSynchronize, device, yes)               \
  X(cudaStreamBeginCapture, device, yes)              \
  X(cudaStreamEndCapture, device, yes)                \
  X(cudaEventCreateWithFlags, device, yes)            \
  X(cudaEventDestroy, device, yes)                    \
  X(cudaEventRecord, device, yes)                     \
  X(cudaEventQuery, device, no)                       \
  X(cudaEventSynchronize, device, no)                 \
  X(cudaEventElapsedTime, device, in_12)              \
  X(cudaMemcpyAsync, device, yes)                     \
  X(cudaMemcpyBatchAsync, device, yes)

enum class Call : std::uint8_t {
#define KVMEM_FAKE_ROW(name, needs, context) name,
  KVMEM_FAKE_CALLS(KVMEM_FAKE_ROW)
#undef KVMEM_FAKE_ROW
};

struct CallFacts {
  const char* name;
  Needs needs;
  Context context;
};
inline constexpr CallFacts call_facts[] = {
#define KVMEM_FAKE_ROW(name, needs, context) {#name, Needs::needs, Context::context},
    KVMEM_FAKE_CALLS(KVMEM_FAKE_ROW)
#undef KVMEM_FAKE_ROW
};
inline constexpr std::size_t call_count = std::size(call_facts);

[[nodiscard]] constexpr const CallFacts& facts_of(Call call) {
  return call_facts[static_cast<std::size_t>(call)];
}
[[nodiscard]] inline std::optional<Call> try_call_of(const char* name) {
  for (std::size_t i = 0; i < call_count; ++i) {
    if (std::strcmp(call_facts[i].name, name) == 0) return static_cast<Call>(i);
  }
  return std::nullopt;
}

// Not thread-safe: the state's lock guards it.
class Faults {
 public:
  struct Verdict {
    Error error;
    bool happens;
  };

  // No call: of any.
  void add(std::optional<Call> call, std::uint64_t nth, std::uint64_t times, const Verdict& how) {
    planned_.push_back({call, nth, times, how});
  }
  void forget() { planned_.clear(); }
  [[nodiscard]] std::uint64_t come() const noexcept { return come_; }
  [[nodiscard]] std::uint64_t calls(std::optional<Call> call) const noexcept {
    return call ? calls_[static_cast<std::size_t>(*call)] : any_;
  }

  // Counts the call.
  [[nodiscard]] std::optional<Verdict> next(Call call) {
    const bool any = call != Call::cudaGetLastError && call != Call::cudaPeekAtLastError;
    ++calls_[static_cast<std::size_t>(call)];
    if (any) ++any_;
    std::optional<Verdict> verdict;
    for (Planned& planned : planned_) {
      if (planned.call ? *planned.call != call : !any) continue;
      if (planned.left > 1) {
        --planned.left;
      } else if (planned.times > 0) {
        --planned.times;
        verdict = planned.how;
      }
    }
    if (verdict) ++come_;
    return verdict;
  }

 private:
  struct Planned {
    std::optional<Call> call;
    std::uint64_t left, times;
    Verdict how;
  };
  std::array<std::uint64_t, call_count> calls_{};
  std::uint64_t any_ = 0, come_ = 0;
  std::vector<Planned> planned_;
};

}  // namespace kvmem::fake
