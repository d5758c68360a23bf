// Calls on slot files that stand still until they are let go.
#pragma once

#include <condition_variable>
#include <mutex>
#include <string>
#include <utility>

#include "support/wait_for.hpp"
#include "tier/memory_files.hpp"

namespace kvmem::test {

class FileGate {
 public:
  // Holds every call of a kind back until the gate is opened, all but the first so many.
  [[nodiscard]] MemoryFiles::Plan plan(std::string what, int passing = 0) {
    return [this, what = std::move(what),
            passing](const MemoryFiles::Call& call) -> std::optional<std::int64_t> {
      if (call.what != what || !call.path.ends_with(".kv")) return std::nullopt;
      std::unique_lock lock(mutex_);
      const bool held = ++came_ > passing;
      opened_.wait(lock, [&] { return open_ || !held; });
      return std::nullopt;
    };
  }
  // Of those that passed, too.
  [[nodiscard]] bool has_seen(int calls) {
    return comes_true([&] {
      const std::lock_guard lock(mutex_);
      return came_ >= calls;
    });
  }
  void open() {
    const std::lock_guard lock(mutex_);
    open_ = true;
    opened_.notify_all();
  }

 private:
  std::mutex mutex_;
  std::condition_variable opened_;
  bool open_ = false;
  int came_ = 0;
};

}  // namespace kvmem::test
