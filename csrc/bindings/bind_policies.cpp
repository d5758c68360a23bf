#include "bindings/keys_argument.hpp"
#include "cache/policy.hpp"

namespace kvmem::bindings {

namespace {

using Numbers = py::array_t<std::uint64_t, py::array::c_style>;
using Reals = py::array_t<double, py::array::c_style | py::array::forcecast>;

// How many there are, and with `each` of which.
py::object hits(const std::string& policy, const py::object& capacity, const Numbers& keys,
                const std::optional<Reals>& values, bool each) {
  const std::size_t blocks = size_argument("capacity", capacity);
  KVMEM_EXPECTS(blocks < (std::size_t{1} << 31U), "capacity is ", blocks,
                ", which must be below 2^31 blocks");
  const std::span all(keys.data(), static_cast<std::size_t>(keys.size()));
  std::span<const double> worth;
  if (values) worth = {values->data(), static_cast<std::size_t>(values->size())};
  KVMEM_EXPECTS(!values || worth.size() == all.size(), "there are ", worth.size(), " values for ",
                all.size(), " keys");
  py::array_t<bool> hit(each ? keys.size() : 0);
  const std::span told(reinterpret_cast<std::uint8_t*>(hit.mutable_data()),
                       static_cast<std::size_t>(hit.size()));
  const PolicyKind kind = policy_named(policy);
  const std::uint64_t count = [&] {
    const Unlocked unlocked;
    return count_hits(kind, static_cast<EntryId>(blocks), all, worth, told);
  }();
  return each ? py::object(hit) : py::object(py::int_(count));
}

}  // namespace

void bind_policies(py::module_& module) {
  module.def("policy_hits", &hits, py::arg("policy"), py::arg("capacity"), py::arg("keys"),
             py::arg("values"), py::arg("each"));
}

}  // namespace kvmem::bindings
