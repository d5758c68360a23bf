// The shared memory of another region, often another process's: looked at before it is mapped.
//
// All that could turn an access into a signal, or let two processes disagree about the size, is
// refused by name. Throws InvalidArgument. Any thread.
#pragma once

#include <cstddef>

namespace kvmem {

struct AttachedMemory {
  int memfd = -1;  // a further descriptor of it, the caller's to close
  std::size_t bytes = 0, page_bytes = 0;
};

[[nodiscard]] AttachedMemory attach_memory(int descriptor, std::size_t bytes);

}  // namespace kvmem
