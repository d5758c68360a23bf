// How a check says that an invariant does not hold.
#pragma once

#include <stdexcept>

#include "base/error.hpp"

namespace kvmem::sim {

struct Violation : std::logic_error {
  using std::logic_error::logic_error;
};

template <class... Parts>
void expect(bool condition, const Parts&... parts) {
  if (!condition) throw Violation(text(parts...));
}

template <class Error, class Call>
void expect_throw(const char* what, Call&& call) {
  try {
    call();
  } catch (const Error&) {
    return;
  }
  throw Violation(text(what, " did not say so"));
}

}  // namespace kvmem::sim
