// A CUDA device behind the seam, through the runtime that was found: the process's primary context,
// which the engine uses too.
//
// Each call leaves the caller's current device, its last error and its capture mode as it found
// them, makes no context on another device, and can be made while any stream captures a graph. What
// cannot be put back (an error that the caller has not looked at yet) is left alone by making the
// call on a thread of its own.
//
// Copies go out in batches where runtime, driver and device take them, else one by one; a batch
// that the driver refuses as too new (36) or not supported (801) is made one by one, and so are all
// behind it. Handles are the runtime's own: an engine's streams and events are used as they are,
// and one that was never a stream is not noticed (but small integers are). A stream of another
// device, or one that is capturing, is refused.
//
// An error that the runtime calls sticky loses the device for good: no call is made any more, and
// destructors leak. So they do once the process has begun to exit, and in a forked child.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "device/cuda/cuda_status.hpp"
#include "device/device.hpp"

namespace kvmem::cuda {

struct Options {
  int ordinal = 0;
  bool batch = true;  // false: copies go out one by one
  // Of one submission: some drivers crash or hang with more, see docs/CUDA.md.
  std::size_t max_descriptors = 4096;
  // Releases of the kernel module whose batches are not to be used: "580.159.04", or a prefix of
  // whole parts such as "580".
  std::vector<std::string> no_batch_drivers{};
};

class CudaDevice : public Device {
 public:
  // How copies go out now: "batch, 9 arguments", or "one by one: " and why.
  [[nodiscard]] virtual std::string copy_path() const = 0;
  [[nodiscard]] virtual const DeviceFacts& facts() const noexcept = 0;
  [[nodiscard]] virtual const Cudart& runtime() const noexcept = 0;
};

// Makes the device's primary context. Throws InvalidArgument for an ordinal or an option that is
// none, DeviceUnavailable where the device cannot be used.
[[nodiscard]] std::shared_ptr<CudaDevice> make_cuda_device(std::shared_ptr<const Cudart> runtime,
                                                           const Options& options = {});

}  // namespace kvmem::cuda
