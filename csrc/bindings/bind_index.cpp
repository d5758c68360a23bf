#include <array>
#include <limits>

#include "base/check.hpp"
#include "bindings/bind.hpp"
#include "bindings/keys_argument.hpp"

namespace kvmem::bindings {

namespace {

using IndexPtr = std::shared_ptr<Index>;

// ---- what Python holds ----

// A reservation is an object and ends with it, unless it was begun.
struct PyReservation {
  PyReservation(std::shared_ptr<Index> own_index, const Reservation& own)
      : index(std::move(own_index)), reservation(own), held(own.id != 0) {}
  PyReservation(const PyReservation&) = delete;
  PyReservation& operator=(const PyReservation&) = delete;
  ~PyReservation() { let_go(); }
  void let_go() noexcept {
    if (!std::exchange(held, false)) return;
    try {
      index->release(reservation.id);
    } catch (...) {  // it expired, its owner was dropped, or this is a forked child
    }
  }
  void release() {  // throws AlreadyReleased
    if (reservation.id == 0) return;
    if (!std::exchange(held, false)) throw AlreadyReleased("the reservation was released or begun");
    index->release(reservation.id);
  }

  std::shared_ptr<Index> index;
  Reservation reservation;
  bool held;
};

struct PyPlan {  // of either kind
  PlanId id;
  std::size_t length;
  std::size_t present, attached;
  std::vector<PlannedSlots> groups;
  std::shared_ptr<Index> index;
};

py::dict by_group(const PyPlan& plan, bool slots) {
  py::dict all;
  for (std::size_t g = 0; g < plan.groups.size(); ++g) {
    const auto& numbers = slots ? plan.groups[g].slots : plan.groups[g].positions;
    all[py::str(plan.index->options().groups[g].name)] = slots_array(numbers);
  }
  return all;
}

// ---- arguments ----

// Each index counts its plans by itself.
void expect_own(const IndexPtr& self, const IndexPtr& its, const char* what) {
  KVMEM_EXPECTS(self == its, "the ", what, " is of another index");
}

PlanId plan_argument(const IndexPtr& self, py::handle plan) {
  if (!py::isinstance<PyPlan>(plan)) return size_argument("plan", plan, 0);
  const auto& its = plan.cast<const PyPlan&>();
  expect_own(self, its.index, "plan");
  return its.id;
}

std::shared_ptr<Index> make_index(const py::list& groups, const std::string& policy,
                                  const py::object& ranks, const py::object& key_bytes,
                                  double low_free, double high_free, const py::object& max_plans,
                                  const py::object& max_events) {
  IndexOptions options;
  for (const py::handle group : groups) {
    const auto [name, need, slots] = group.cast<std::tuple<std::string, py::object, py::object>>();
    const std::size_t count = size_argument("slots", slots);
    KVMEM_EXPECTS(count < std::numeric_limits<SlotIndex>::max(), "slots is ", count,
                  ", which must be less than 2^32 - 1");
    options.groups.push_back({name, need_argument(need), static_cast<SlotIndex>(count)});
  }
  options.policy = policy_named(policy);
  options.ranks = size_argument("ranks", ranks);
  options.key_bytes = key_bytes.is_none() ? 0 : size_argument("key_bytes", key_bytes);
  options.low_free = low_free;
  options.high_free = high_free;
  options.max_plans = size_argument("max_plans", max_plans);
  options.max_events = max_events_argument(max_events);
  return std::make_shared<Index>(std::move(options));
}

std::vector<KeyRange> ranges_argument(const Index& index, const py::object& ranges,
                                      std::size_t keys) {
  KVMEM_EXPECTS(py::isinstance<py::dict>(ranges), "ranges is ", shown(ranges),
                ", not a dict of (first, last) by group");
  std::vector<KeyRange> all(index.options().groups.size());
  std::size_t named = 0;
  const py::dict given = ranges;
  for (std::size_t g = 0; g < all.size(); ++g) {
    const py::str name(index.options().groups[g].name);
    all[g] = {0, keys};
    if (index.options().groups[g].need.kind == NeedKind::state && keys > 0) all[g].first = keys - 1;
    if (!given.contains(name)) continue;
    ++named;
    const py::object pair = given[name];
    KVMEM_EXPECTS(py::isinstance<py::tuple>(pair) && py::len(pair) == 2, "the range of group '",
                  index.options().groups[g].name, "' is ", shown(pair), ", not (first, last)");
    all[g] = {size_argument("first", pair[py::int_(0)], 0),
              size_argument("last", pair[py::int_(1)], 0)};
  }
  KVMEM_EXPECTS(named == given.size(), "ranges is ", shown(ranges),
                ", and names a group that the index does not have");
  return all;
}

// ---- calls ----

std::optional<PyPlan> plan_store(const IndexPtr& self, const py::object& keys,
                                 const std::string& owner, const py::object& ranges, double value,
                                 bool must) {
  std::vector<KeyRange> of_groups;
  if (!ranges.is_none()) {  // they may run code of the caller's: before the keys are looked at
    const std::size_t count = KeysArgument(keys, self->key_bytes()).pointers().size();
    of_groups = ranges_argument(*self, ranges, count);
  }
  const KeysArgument given(keys, self->key_bytes());
  auto plan = self->try_plan_store(given.pointers(), given.key_bytes(), owner, of_groups, value);
  if (!plan && must) throw self->exhausted(given.pointers().size());
  if (!plan) return std::nullopt;
  return PyPlan{plan->id,       plan->covered,           plan->present,
                plan->attached, std::move(plan->groups), self};
}

std::unique_ptr<PyReservation> reserve(const IndexPtr& self, const py::object& keys,
                                       const std::string& owner, const std::string& pending,
                                       std::optional<double> expires_seconds) {
  KVMEM_EXPECTS(pending == "stop" || pending == "attach", "pending is '", pending,
                "', neither 'stop' nor 'attach'");
  const KeysArgument given(keys, self->key_bytes());
  return std::make_unique<PyReservation>(
      self, self->reserve(given.pointers(), given.key_bytes(), owner,
                          pending == "attach" ? Pending::attach : Pending::stop, expires_seconds));
}

std::size_t keep(const IndexPtr& self, PyReservation& reservation, const py::object& length) {
  const std::size_t wanted = size_argument("length", length, 0);
  expect_own(self, reservation.index, "reservation");
  if (reservation.reservation.id == 0) return 0;
  if (!reservation.held) throw AlreadyReleased("the reservation was released or begun");
  const std::size_t kept = self->keep(reservation.reservation.id, wanted);
  reservation.reservation.length = kept;
  if (kept == 0) {
    reservation.held = false;
    reservation.reservation.id = 0;
  }
  return kept;
}

std::optional<PyPlan> begin(const IndexPtr& self, PyReservation& reservation) {
  expect_own(self, reservation.index, "reservation");
  PyPlan plan{0, 0, 0, 0, {}, self};
  if (reservation.reservation.id == 0) {
    plan.groups.resize(self->options().groups.size());
    return plan;
  }
  if (!reservation.held) throw AlreadyReleased("the reservation was released or begun");
  auto load = self->begin(reservation.reservation.id);
  if (!load) return std::nullopt;
  reservation.held = false;
  plan.length = load->length;
  plan.groups = std::move(load->groups);
  if (load->length > 0) plan.id = reservation.reservation.id;
  return plan;
}

py::dict stats(const IndexPtr& self) {
  const IndexStats now = self->stats();
  py::dict groups;
  for (const GroupStats& group : now.groups) {
    py::dict its;
    its["slots"] = group.slots;
    its["free"] = group.free;
    its["writing"] = group.writing;
    its["ready"] = group.ready;
    its["leaving"] = group.leaving;
    its["evictable"] = group.evictable;
    groups[py::str(group.name)] = its;
  }
  py::dict all;
  all["groups"] = groups;
  all["plans"] = now.plans;
  all["reservations"] = now.reservations;
  all["keys_asked"] = now.keys_asked;
  all["keys_reserved"] = now.keys_reserved;
  all["keys_pending"] = now.keys_pending;
  all["blocks_loaded"] = now.blocks_loaded;
  all["blocks_load_failed"] = now.blocks_load_failed;
  all["blocks_planned"] = now.blocks_planned;
  all["blocks_published"] = now.blocks_published;
  all["blocks_store_failed"] = now.blocks_store_failed;
  all["blocks_present"] = now.blocks_present;
  all["blocks_attached"] = now.blocks_attached;
  all["evicted"] = now.evicted;
  all["removed"] = now.removed;
  all["refused"] = now.refused;
  all["expired"] = now.expired;
  all["events_lost"] = now.events_lost;
  all["bytes"] = now.bytes;
  return all;
}

py::tuple take_events(const IndexPtr& self) {
  const IndexEvents taken = self->take_events();
  py::list events;
  for (const IndexEvent& event : taken.events) {
    events.append(py::make_tuple(
        event.kind == IndexEvent::Kind::stored ? "stored" : "removed",
        self->options().groups[event.group].name,
        py::bytes(reinterpret_cast<const char*>(event.key.data()), self->key_bytes())));
  }
  return py::make_tuple(events, taken.lost);
}

const char* name_of(EntryState state) {
  switch (state) {
    case EntryState::ready:
      return "ready";
    case EntryState::writing:
      return "writing";
    default:
      return "missing";
  }
}

void bind_plans(py::module_& module) {
  py::class_<PyReservation>(
      module, "Reservation",
      "The longest usable prefix of some keys, held: len() is its length in keys. It ends with the "
      "object, unless it was begun, and is a context manager. One thread at a time.")
      .def("__len__", [](const PyReservation& self) { return self.reservation.length; })
      .def_property_readonly("id", [](const PyReservation& self) { return self.reservation.id; })
      .def_property_readonly(
          "pending", [](const PyReservation& self) { return self.reservation.pending; },
          "A key in flight stopped it, or is among those reserved.")
      .def("release", &PyReservation::release,
           "Gives it up. Raises AlreadyReleased the second time, and once it was begun.")
      .def("__enter__", [](py::object self) { return self; })
      .def("__exit__", [](PyReservation& self, const py::args&) { self.let_go(); });
  py::class_<PyPlan>(
      module, "Plan",
      "Slots to write or to read. len() is how many leading keys it covers; each rank finishes it "
      "once. Immutable.")
      .def("__len__", [](const PyPlan& self) { return self.length; })
      .def_readonly("id", &PyPlan::id, "Never given twice; 0 where there is nothing to do.")
      .def_readonly("present", &PyPlan::present, "Blocks that were readable already.")
      .def_readonly("attached", &PyPlan::attached, "Blocks that another plan is writing.")
      .def_property_readonly(
          "slots", [](const PyPlan& self) { return by_group(self, true); },
          "By group: int64[blocks], the slot of each block to write or to read.")
      .def_property_readonly(
          "positions", [](const PyPlan& self) { return by_group(self, false); },
          "By group: int64[blocks], ascending, which of the keys each slot is for.");
}

using IndexClass = py::class_<Index, IndexPtr>;

void bind_planning(IndexClass& index) {
  index
      .def(py::init(&make_index), py::kw_only(), py::arg("groups"), py::arg("policy"),
           py::arg("ranks"), py::arg("key_bytes"), py::arg("low_free"), py::arg("high_free"),
           py::arg("max_plans"), py::arg("max_events"))
      .def(
          "plan_store",
          [](const IndexPtr& self, const py::object& keys, const std::string& owner,
             const py::object& ranges,
             double value) { return plan_store(self, keys, owner, ranges, value, true); },
          py::arg("keys"), py::arg("owner") = "", py::kw_only(), py::arg("ranges") = py::none(),
          py::arg("value") = 1.0,
          "Gives slots to what is missing of the longest leading part of the keys that finds room. "
          "What others are writing is attached to. ranges: by group, (first, last) of the keys "
          "that it has blocks for; all of them, or the last one for a group of state. value: see "
          "the policy. Raises PoolExhausted where not even the first missing key finds room, and "
          "says who holds what.")
      .def(
          "try_plan_store",
          [](const IndexPtr& self, const py::object& keys, const std::string& owner,
             const py::object& ranges,
             double value) { return plan_store(self, keys, owner, ranges, value, false); },
          py::arg("keys"), py::arg("owner") = "", py::kw_only(), py::arg("ranges") = py::none(),
          py::arg("value") = 1.0, "The same; None instead of PoolExhausted.")
      .def(
          "reserve", &reserve, py::arg("keys"), py::arg("owner") = "", py::arg("pending") = "stop",
          py::arg("expires_seconds") = py::none(),
          "Finds the longest usable prefix and holds it, in one step. pending: 'stop' before a key "
          "in flight, or 'attach' to it. expires_seconds: from now, unless it is begun before.")
      .def("keep", &keep, py::arg("reservation"), py::arg("length"),
           "Shortens a reservation to the longest usable prefix of at most so many keys, and "
           "answers how many: the minimum over ranks, say.")
      .def(
          "begin", &begin, py::arg("reservation"),
          "Its slots may be read from now on, until each rank has finished. None while an attached "
          "key is in flight; shorter than reserved where its store failed.")
      .def(
          "plan_load",
          [](const IndexPtr& self, const py::object& keys, const std::string& owner) {
            const auto reservation = reserve(self, keys, owner, "stop", std::nullopt);
            return begin(self, *reservation);
          },
          py::arg("keys"), py::arg("owner") = "", "reserve() and begin() in one.")
      .def(
          "finish",
          [](const IndexPtr& self, const py::object& plan, const py::object& rank, bool ok) {
            return self->finish(plan_argument(self, plan), size_argument("rank", rank, 0), ok);
          },
          py::arg("plan"), py::arg("rank") = 0, py::arg("ok") = true,
          "A rank's copies have ended, well or not. Stored keys become readable when the last rank "
          "says ok; slots are free when all have ended. plan: one, or its id. True for the last "
          "rank. Raises InvalidArgument for a plan that has ended and a rank that has finished.");
}

void bind_books(IndexClass& index) {
  index
      .def(
          "drop_owner",
          [](const IndexPtr& self, const std::string& owner) { return self->drop_owner(owner); },
          py::arg("owner"),
          "Ends the owner's reservations, and answers how many. What was begun stays until each "
          "rank has finished.")
      .def(
          "remove",
          [](const IndexPtr& self, const py::object& keys) {
            const KeysArgument given(keys, self->key_bytes());
            return self->remove(given.pointers(), given.key_bytes());
          },
          py::arg("keys"),
          "These are not found from now on, whoever holds them, and those in flight are never "
          "published. Answers how many blocks.")
      .def(
          "clear", [](const IndexPtr& self) { return self->clear(); }, "remove() of all keys.")
      .def(
          "trim",
          [](const IndexPtr& self, const py::object& most) {
            return self->trim(size_argument("most", most, 0));
          },
          py::arg("most"),
          "Evicts at most so many where fewer than low_free are free. Answers how many.")
      .def_property_readonly(
          "wants_trim", [](const IndexPtr& self) { return self->wants_trim(); },
          "Whether trim() would evict something.")
      .def(
          "peek",
          [](const IndexPtr& self, const py::object& keys) {
            const KeysArgument given(keys, self->key_bytes());
            return self->peek(given.pointers(), given.key_bytes());
          },
          py::arg("keys"), "How many leading keys could be reserved now. Holds nothing.")
      .def(
          "state",
          [](const IndexPtr& self, const py::bytes& key, const py::object& group) {
            const std::string_view bytes(key);
            const std::size_t number = size_argument("group", group, 0);
            const std::size_t groups = self->options().groups.size();
            KVMEM_EXPECTS(number < groups, "group is ", number, ", and there are ", groups);
            return name_of(self->state(reinterpret_cast<const std::byte*>(bytes.data()),
                                       bytes.size(), static_cast<GroupIndex>(number)));
          },
          py::arg("key"), py::arg("group") = 0, "Of one key in one group, by its number.")
      .def_property_readonly("key_bytes",
                             [](const IndexPtr& self) -> std::optional<std::size_t> {
                               const std::size_t bytes = self->key_bytes();
                               return bytes == 0 ? std::nullopt : std::optional(bytes);
                             })
      .def("take_events", &take_events,
           "What became readable and what went, as ([(kind, group, key), ...], lost): kind is "
           "'stored' or 'removed', lost is how many older ones were dropped at max_events.")
      .def(
          "holdings",
          [](const IndexPtr& self) {
            py::dict all;
            for (const Holding& holding : self->holdings())
              all[words_of(holding.owner)] = py::make_tuple(holding.plans, holding.blocks);
            return all;
          },
          "By owner: (unfinished plans and reservations, blocks that they hold).")
      .def("stats", &stats, "Counts of slots by group and state, and of what happened so far.");
}

}  // namespace

void bind_index(py::module_& module) {
  bind_policies(module);
  bind_plans(module);
  IndexClass index(module, "Index");
  bind_planning(index);
  bind_books(index);
}

}  // namespace kvmem::bindings
