#include "fakes/checker.hpp"

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <utility>

namespace kvmem::fake {

namespace {

constexpr int strict_status = 97;

}  // namespace

void Checker::keep(Rule rule, std::string violation) {
  if (strict_ || rule == Rule::after_exit) {
    std::fprintf(stderr, "fake CUDA runtime: %s\n", violation.c_str());
    if (strict_) _exit(strict_status);
  }
  const std::lock_guard lock(mutex_);
  violations_.push_back(std::move(violation));
}

void Checker::keep_unsaid(Rule rule) noexcept {
  std::fprintf(stderr, "fake CUDA runtime: %s\n", rule_names[static_cast<std::size_t>(rule)]);
  if (strict_) _exit(strict_status);
  ++unsaid_;
}

void Checker::enable(const char* name, bool enabled) {
  const auto* const found = std::ranges::find_if(
      rule_names, [&](const char* rule) { return std::strcmp(rule, name) == 0; });
  if (found == std::end(rule_names)) {
    std::fprintf(stderr, "fake CUDA runtime: there is no rule %s\n", name);
    std::abort();
  }
  disabled_[found - rule_names] = !enabled;
}

std::size_t Checker::count() const noexcept {
  const std::lock_guard lock(mutex_);
  return violations_.size() + static_cast<std::size_t>(unsaid_.load());
}

const char* Checker::violation(std::size_t i) const noexcept {
  const std::lock_guard lock(mutex_);
  if (i < violations_.size()) return violations_[i].c_str();
  return i - violations_.size() < unsaid_.load() ? "a rule, and no memory to say which" : nullptr;
}

void Checker::forget() noexcept {
  const std::lock_guard lock(mutex_);
  violations_.clear();
  unsaid_ = 0;
}

void Checker::reset() noexcept {
  forget();
  for (std::atomic<bool>& disabled : disabled_) disabled = false;
}

}  // namespace kvmem::fake
