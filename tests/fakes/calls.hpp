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

// The two that look at the last error are no calls that fail by themselves: "*" leaves them out.
#define KVMEM_FAKE_CALLS(X)                      \
  X(cudaDriverGetVersion, nothing)               \
  X(cudaRuntimeGetVersion, nothing)              \
  X(cudaGetLastError, driver)                    \
  X(cudaPeekAtLastError, driver)                 \
  X(cudaGetDeviceCount, driver)                  \
  X(cudaSetDevice, driver)                       \
  X(cudaGetDevice, driver)                       \
  X(cudaDeviceGetAttribute, driver)              \
  X(cudaDeviceGetPCIBusId, driver)               \
  X(cuDevicePrimaryCtxGetState, driver)          \
  X(cudaThreadExchangeStreamCaptureMode, driver) \
  X(cudaMalloc, device)                          \
  X(cudaFree, device)                            \
  X(cudaMemGetInfo, device)                      \
  X(cudaHostAlloc, device)                       \
  X(cudaFreeHost, device)                        \
  X(cudaHostRegister, device)                    \
  X(cudaHostUnregister, device)                  \
  X(cudaPointerGetAttributes, device)            \
  X(cudaStreamCreateWithFlags, device)           \
  X(cudaStreamDestroy, device)                   \
  X(cudaStreamGetId, device)                     \
  X(cudaStreamGetDevice, device)                 \
  X(cudaStreamIsCapturing, device)               \
  X(cudaStreamWaitEvent, device)                 \
  X(cudaStreamQuery, device)                     \
  X(cudaStreamSynchronize, device)               \
  X(cudaStreamBeginCapture, device)              \
  X(cudaStreamEndCapture, device)                \
  X(cudaEventCreateWithFlags, device)            \
  X(cudaEventDestroy, device)                    \
  X(cudaEventRecord, device)                     \
  X(cudaEventQuery, device)                      \
  X(cudaEventSynchronize, device)                \
  X(cudaEventElapsedTime, device)                \
  X(cudaMemcpyAsync, device)                     \
  X(cudaMemcpyBatchAsync, device)

enum class Call : std::uint8_t {
#define KVMEM_FAKE_ROW(name, needs) name,
  KVMEM_FAKE_CALLS(KVMEM_FAKE_ROW)
#undef KVMEM_FAKE_ROW
};

struct CallFacts {
  const char* name;
  Needs needs;
};
inline constexpr CallFacts call_facts[] = {
#define KVMEM_FAKE_ROW(name, needs) {#name, Needs::needs},
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
