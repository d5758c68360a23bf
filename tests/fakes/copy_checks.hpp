// What is checked of the memory of copies before the model gets them. With the state's lock.
#pragma once

#include "fakes/state.hpp"

namespace kvmem::fake {

class CopyChecks {
 public:
  CopyChecks(State& state, Call call, const ModelDevice& model)
      : state_(state), call_(call), model_(model) {}

  // Reports each rule at most once. An error: the runtime would have refused it.
  [[nodiscard]] Error look_at(const CopyDescriptors& batch, SourceAccess access,
                              std::size_t& failed);
  // Of what was looked at: CUDA goes by the addresses. `kind` where those say nothing.
  [[nodiscard]] Direction direction(cuda::MemcpyKind kind = cuda::by_address) const noexcept;

 private:
  enum class Place : std::uint8_t { unknown, device, pinned, staged };
  struct Side {
    Place place = Place::unknown;
    bool holds = false;  // all of it
    bool read_only = false;
  };
  [[nodiscard]] Side side_of(const std::byte* at, std::size_t bytes) const;
  [[nodiscard]] bool look_at_side(const char* verb, const std::byte* at, std::size_t bytes,
                                  const Side& side);
  void look_for_early_sources(const CopyDescriptors& batch);
  template <class... What>
  void report_once(Rule rule, const What&... what) {
    if (std::exchange(reported_[static_cast<std::size_t>(rule)], true)) return;
    state_.checker.report(rule, facts_of(call_).name, ": ", what...);
  }

  State& state_;
  const Call call_;
  const ModelDevice& model_;
  Side target_, source_;  // of the first copy
  bool reported_[rule_count] = {};
};

}  // namespace kvmem::fake
