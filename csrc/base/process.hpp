// The two facts about the process that change what a destructor may do: it is a forked child, or it
// is exiting.
//
// In a forked child no thread of ours exists and a lock may be held for ever, so nothing of the
// parent's may be used: public calls throw Forked and destructors leak. While the process exits,
// other threads may still run and drivers may be unloaded, so destructors make no device call, join
// nothing, unmap nothing: the kernel reclaims it.
#pragma once

#include <cstdint>

namespace kvmem {

class ProcessMark {  // made by the process that may use the object that carries it
 public:
  ProcessMark() noexcept;
  [[nodiscard]] bool forked() const noexcept;  // this is a child of the process that made the mark
  void expect_same_process(const char* what) const;  // throws Forked
  [[nodiscard]] bool must_leak() const noexcept;     // forked, or exiting: touch nothing

 private:
  std::uint32_t generation_;
};

[[nodiscard]] bool process_is_exiting() noexcept;
void set_process_exiting() noexcept;  // also called by an atexit handler of ours

}  // namespace kvmem
