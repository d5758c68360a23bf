#include <limits>

#include "base/check.hpp"
#include "bindings/bind_cache.hpp"
#include "bindings/keys_argument.hpp"

namespace kvmem::bindings {

namespace {

// One of several words.
template <class Word, std::size_t count>
Word word_argument(const char* name, const py::object& value,
                   const std::pair<const char*, Word> (&words)[count]) {
  std::string known;
  for (const auto& [word, meaning] : words) {
    if (py::isinstance<py::str>(value) && value.cast<std::string>() == word) return meaning;
    known += text(known.empty() ? "" : ", ", "'", word, "'");
  }
  throw InvalidArgument(text(name, " is ", shown(value), ", none of ", known));
}

double number_argument(const char* name, const py::object& value) {
  const PyNumberMethods* const as_number = Py_TYPE(value.ptr())->tp_as_number;
  const bool is_number = !PyBool_Check(value.ptr()) && as_number != nullptr &&
                         (as_number->nb_float != nullptr || as_number->nb_index != nullptr);
  KVMEM_EXPECTS(is_number, name, " is ", shown(value), ": not a number");
  const double number = PyFloat_AsDouble(value.ptr());
  if (!PyErr_Occurred()) return number;
  PyErr_Clear();
  throw InvalidArgument(text(name, " is ", shown(value), ": too large"));
}

std::optional<double> limit_argument(const char* name, const py::object& value) {
  if (value.is_none()) return std::nullopt;
  return number_argument(name, value);
}

std::chrono::nanoseconds duration(const char* name, const py::object& value) {
  const double seconds = seconds_argument(name, value);
  KVMEM_EXPECTS(seconds <= 1e9, name, " is ", seconds, " s, at most 1e9");
  return std::chrono::nanoseconds(nanoseconds(seconds));
}

template <class Number>
Number count_argument(const char* name, const py::object& value, std::size_t least) {
  const std::size_t count = size_argument(name, value, least);
  KVMEM_EXPECTS(count <= static_cast<std::size_t>(std::numeric_limits<Number>::max()), name, " is ",
                count, ", at most ", std::numeric_limits<Number>::max());
  return static_cast<Number>(count);
}

CacheGroup group_argument(py::handle group) {
  const auto [name, need, manager, slots] =
      group.cast<std::tuple<std::string, py::object, Shared<Manager>, py::object>>();
  CacheGroup made{name, need_argument(need), manager, 0};
  if (!slots.is_none()) made.slots = count_argument<SlotIndex>("slots", slots, 1);
  return made;
}

ThrashBudget thrash_argument(const py::dict& values) {
  ThrashBudget budget;
  budget.max_bytes_per_token = limit_argument("max_bytes_per_token", values["max_bytes_per_token"]);
  budget.max_unused_share = limit_argument("max_unused_share", values["max_unused_share"]);
  budget.max_again_share = limit_argument("max_again_share", values["max_again_share"]);
  budget.resume = number_argument("resume", values["resume"]);
  budget.least_bytes = size_argument("least_bytes", values["least_bytes"], 0);
  return budget;
}

CacheDisk disk_argument(const py::dict& values) {
  constexpr std::pair<const char*, DiskWrite> writes[] = {{"through", DiskWrite::through},
                                                          {"back", DiskWrite::back}};
  constexpr std::pair<const char*, DiskSync> syncs[] = {{"never", DiskSync::never},
                                                        {"on_close", DiskSync::on_close},
                                                        {"each_write", DiskSync::each_write}};
  CacheDisk disk;
  disk.write = word_argument("write", values["write"], writes);
  disk.write_back_free = number_argument("write_back_free", values["write_back_free"]);
  disk.landing_blocks = size_argument("landing_blocks", values["landing_blocks"]);
  disk.max_writes = size_argument("max_writes", values["max_writes"]);
  DiskOptions& options = disk.options;
  options.path = values["path"].cast<std::string>();
  options.capacity_bytes = size_argument("capacity_bytes", values["capacity_bytes"]);
  const auto digest = values["manifest"].cast<std::string>();
  KVMEM_INVARIANT(digest.size() == options.manifest.size());
  std::transform(digest.begin(), digest.end(), options.manifest.begin(),
                 [](char byte) { return static_cast<std::byte>(byte); });
  options.workers = count_argument<int>("workers", values["workers"], 1);
  options.max_queued = size_argument("max_queued", values["max_queued"]);
  options.sync = word_argument("sync", values["sync"], syncs);
  options.direct = py::bool_(values["direct"]);
  options.keep = py::bool_(values["keep"]);
  options.probe_after = duration("probe_after_seconds", values["probe_after_seconds"]);
  options.stall_after = duration("stall_after_seconds", values["stall_after_seconds"]);
  options.close_within = duration("close_within_seconds", values["close_within_seconds"]);
  return disk;
}

}  // namespace

CacheOptions cache_options(const py::dict& values) {
  CacheOptions options;
  const py::list groups = values["groups"];
  for (const py::handle group : groups) options.groups.push_back(group_argument(group));
  const py::object policy = values["policy"];
  KVMEM_EXPECTS(py::isinstance<py::str>(policy), "policy is ", shown(policy), ": not a string");
  options.policy = policy_named(policy.cast<std::string>());
  options.admit_after = count_argument<unsigned>("admit_after", values["admit_after"], 1);
  if (const py::object key_bytes = values["key_bytes"]; !key_bytes.is_none())
    options.key_bytes = size_argument("key_bytes", key_bytes);
  options.low_free = number_argument("low_free", values["low_free"]);
  options.high_free = number_argument("high_free", values["high_free"]);
  options.max_transfers = size_argument("max_transfers", values["max_transfers"]);
  options.max_plans = size_argument("max_plans", values["max_plans"]);
  options.max_events = max_events_argument(values["max_events"]);
  options.max_owners = size_argument("max_owners", values["max_owners"]);
  options.host_bytes_per_second =
      number_argument("host_bytes_per_second", values["host_bytes_per_second"]);
  options.disk_bytes_per_second =
      number_argument("disk_bytes_per_second", values["disk_bytes_per_second"]);
  if (!values["thrash"].is_none()) options.thrash = thrash_argument(values["thrash"]);
  if (!values["disk"].is_none()) options.disk = disk_argument(values["disk"]);
  return options;
}

}  // namespace kvmem::bindings
