// The CPU as a device: device memory is ordinary memory, each stream is a FIFO that copy workers
// execute, events are real, bytes move at memory speed. A thread that sleeps here with `help`
// copies instead.
//
// Workers share the pieces of one batch and sleep while nothing may run. Whoever moves the last
// piece of a copy passes the events behind it and moves progress(); no other thread is needed.
//
// The owner must be quiet when the device is dropped: work still pending then is dropped, after the
// piece that each worker is in. Once the process exits, no byte is moved any more: what is pending
// stays so. A device dropped then, or in a forked child, is leaked whole. In a forked child every
// call throws Forked, but query() answers `lost` and the other noexcept calls do nothing.
#pragma once

#include <memory>

#include "device/model_device.hpp"

namespace kvmem {

struct HostDeviceOptions {
  unsigned workers = 0;     // 0: one per core, at most 4
  bool no_workers = false;  // only sleepers with `help` copy: a test chooses when bytes move
  // Of each thread that copies; 0: as fast as memory goes. For tests that want to see copies in
  // flight.
  double most_bytes_per_second = 0;
};

// Throws Error when a worker cannot be started.
[[nodiscard]] std::shared_ptr<ModelDevice> make_host_device(const HostDeviceOptions& options = {});

}  // namespace kvmem
