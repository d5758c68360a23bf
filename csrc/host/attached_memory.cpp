#include "host/attached_memory.hpp"

#include <fcntl.h>
#include <linux/magic.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "base/check.hpp"
#include "base/types.hpp"

namespace kvmem {

namespace {

#ifdef F_SEAL_FUTURE_WRITE
constexpr int future_write_seal = F_SEAL_FUTURE_WRITE;
#else
constexpr int future_write_seal = 0x0010;  // Linux 5.1; older headers do not have it
#endif

constexpr std::size_t stat_block_bytes = 512;

void expect_seals(int descriptor) {
  const int seals = fcntl(descriptor, F_GET_SEALS);
  KVMEM_EXPECTS(seals >= 0, "descriptor ", descriptor, " is no memfd (", std::strerror(errno), ")");
  KVMEM_EXPECTS((seals & F_SEAL_SHRINK) != 0, "the memory of descriptor ", descriptor,
                " may still shrink (no F_SEAL_SHRINK): a copy behind its end would be SIGBUS");
  KVMEM_EXPECTS((seals & (F_SEAL_WRITE | future_write_seal)) == 0, "the memory of descriptor ",
                descriptor, " is sealed against writing");
}

// Of the mapping. The preferred block size of stat() is that of transparent huge pages, where they
// are on.
std::size_t page_bytes_of(int descriptor) {
  struct statfs system{};
  KVMEM_EXPECTS(fstatfs(descriptor, &system) == 0, "descriptor ", descriptor, ": ",
                std::strerror(errno));
  return static_cast<std::size_t>(system.f_type == HUGETLBFS_MAGIC ? system.f_bsize
                                                                   : sysconf(_SC_PAGESIZE));
}

}  // namespace

AttachedMemory attach_memory(int descriptor, std::size_t bytes) {
  expect_seals(descriptor);
  AttachedMemory memory;
  memory.page_bytes = page_bytes_of(descriptor);
  memory.bytes = round_up(bytes, memory.page_bytes);
  struct stat facts{};
  KVMEM_EXPECTS(fstat(descriptor, &facts) == 0, "descriptor ", descriptor, ": ",
                std::strerror(errno));
  KVMEM_EXPECTS(static_cast<std::size_t>(facts.st_size) == memory.bytes,
                "the memory of descriptor ", descriptor, " has ", facts.st_size,
                " bytes; block_bytes and capacity_bytes take ", memory.bytes);
  // Whoever made it has reserved all of it, or an access may find no page.
  const std::size_t reserved = static_cast<std::size_t>(facts.st_blocks) * stat_block_bytes;
  KVMEM_EXPECTS(reserved >= memory.bytes, "the memory of descriptor ", descriptor,
                " has holes: ", reserved, " of its ", memory.bytes, " bytes are reserved");
  memory.memfd = fcntl(descriptor, F_DUPFD_CLOEXEC, 0);
  KVMEM_EXPECTS(memory.memfd >= 0, "descriptor ", descriptor, ": ", std::strerror(errno));
  return memory;
}

}  // namespace kvmem
