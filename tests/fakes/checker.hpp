// What the fake saw that hardware would corrupt silently or refuse: rules by name, and the
// violations of them. Any thread.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <mutex>
#include <string>

#include "base/error.hpp"

namespace kvmem::fake {

#define KVMEM_FAKE_RULES(X) \
  X(unregistered_host)      \
  X(straddles)              \
  X(read_only)              \
  X(freed_in_flight)        \
  X(unmapped_registered)    \
  X(foreign_record)         \
  X(re_record)              \
  X(wait_unrecorded)        \
  X(early_source)           \
  X(descriptors_changed)    \
  X(legacy_batch)           \
  X(too_many_descriptors)   \
  X(last_error)             \
  X(current_device)         \
  X(foreign_context)        \
  X(other_device)           \
  X(unsafe_capture)         \
  X(blocking_stream)        \
  X(after_exit)             \
  X(unknown_handle)

enum class Rule : std::uint8_t {
#define KVMEM_FAKE_ROW(name) name,
  KVMEM_FAKE_RULES(KVMEM_FAKE_ROW)
#undef KVMEM_FAKE_ROW
};

inline constexpr const char* rule_names[] = {
#define KVMEM_FAKE_ROW(name) #name,
    KVMEM_FAKE_RULES(KVMEM_FAKE_ROW)
#undef KVMEM_FAKE_ROW
};
inline constexpr std::size_t rule_count = std::size(rule_names);

class Checker {
 public:
  // A violation ends the process, once it was printed.
  void make_strict() noexcept { strict_ = true; }

  template <class... What>
  void report(Rule rule, const What&... what) noexcept {
    if (!enabled(rule)) return;
    try {
      keep(rule, text(rule_names[static_cast<std::size_t>(rule)], ": ", what...));
    } catch (...) {  // no memory for the text
      keep_unsaid(rule);
    }
  }

  [[nodiscard]] bool enabled(Rule rule) const noexcept {
    return !disabled_[static_cast<std::size_t>(rule)].load();
  }
  void enable(const char* name, bool enabled);  // aborts for a name that is none
  [[nodiscard]] std::size_t count() const noexcept;
  [[nodiscard]] const char* violation(std::size_t i) const noexcept;
  void forget() noexcept;
  void reset() noexcept;

 private:
  void keep(Rule rule, std::string violation);
  void keep_unsaid(Rule rule) noexcept;

  mutable std::mutex mutex_;
  std::deque<std::string> violations_;  // a deque: each keeps its address
  std::atomic<bool> disabled_[rule_count] = {};
  std::atomic<std::uint64_t> unsaid_{0};
  bool strict_ = false;
};

}  // namespace kvmem::fake
