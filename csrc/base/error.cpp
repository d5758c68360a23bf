#include "base/error.hpp"

namespace kvmem {

namespace {
std::string with_numbers(const std::string& what, const Shortage& s) {
  if (s.bound.empty()) return what;
  return text(what, ": ", s.bound, " wanted ", s.wanted, ", free ", s.free, ", largest possible ",
              s.largest, ", held ", s.held, ", quarantined ", s.quarantined);
}
}  // namespace

AtBound::AtBound(const std::string& what, Shortage numbers)
    : Error(with_numbers(what, numbers)), shortage(std::move(numbers)) {}

}  // namespace kvmem
