// How copies go out: as one batch, or one by one where batches cannot be used. Any thread.
#pragma once

#include <atomic>
#include <memory>
#include <string>

#include "device/cuda/cuda_calls.hpp"
#include "device/cuda/cuda_device.hpp"

namespace kvmem::cuda {

// Is the release one of those, or does a prefix of whole parts name it? "580" is 580.159.04 too,
// but not 5800.
[[nodiscard]] bool is_named(const std::string& release, const std::vector<std::string>& drivers);

class Copies {
 public:
  Copies(const Cudart& runtime, const DeviceFacts& facts, const Options& options);

  // Within Calls::run(). What the runtime said; `failed` is the copy that it was about, if it told.
  static constexpr std::size_t no_copy = ~std::size_t{0};
  Error submit(const Functions& call, const CopyDescriptors& batch, Direction direction,
               SourceAccess access, StreamHandle stream, std::size_t& failed) noexcept;

  [[nodiscard]] bool in_batches() const noexcept { return path_.load() == Path::batch; }
  [[nodiscard]] std::string path() const;  // CudaDevice::copy_path()

 private:
  enum class Path : std::uint8_t {
    batch,
    // One by one:
    switched_off,
    runtime_without,
    host_pointers_differ,
    driver_named,
    driver_too_old,        // it said so: 36
    driver_does_not_know,  // it said so: 801
  };
  static Error batched(const Functions& call, const CopyDescriptors& batch, SourceAccess access,
                       Stream stream, std::size_t& failed) noexcept;
  static Error one_by_one(const Functions& call, const CopyDescriptors& batch, Direction direction,
                          Stream stream, std::size_t& failed) noexcept;

  const int arguments_;  // of the batched call; 0: there is none
  const std::string release_;
  std::atomic<Path> path_;
};

}  // namespace kvmem::cuda
