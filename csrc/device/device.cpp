#include "device/device.hpp"

#include "base/check.hpp"

namespace kvmem {

void expect_descriptors(const CopyDescriptors& batch, const DeviceInfo& info) {
  KVMEM_EXPECTS(batch.count <= info.max_descriptors, "a batch of ", batch.count,
                " copies exceeds max_descriptors ", info.max_descriptors);
  KVMEM_EXPECTS(batch.targets && batch.sources && batch.sizes, "a batch without arrays");
  for (std::size_t i = 0; i < batch.count; ++i) {
    KVMEM_EXPECTS(batch.targets[i] && batch.sources[i], "copy ", i, " of the batch has no address");
    KVMEM_EXPECTS(batch.sizes[i] > 0, "copy ", i, " of the batch has no bytes");
  }
}

}  // namespace kvmem
