#include "base/check.hpp"
#include "bindings/bind.hpp"

namespace kvmem::bindings {

bool is_host_copy(py::handle value);  // bind_transfer.cpp
const HostCopy& host_copy(py::handle value);

namespace {

Checksum checksum_argument(const std::string& name) {
  if (name == "off") return Checksum::off;
  if (name == "sampled") return Checksum::sampled;
  if (name == "always") return Checksum::always;
  throw InvalidArgument(text("checksum is '", name, "', not off, sampled or always"));
}

Shared<Manager> make_manager(const PyDevice& device, const KVLayout& layout, const PyPool& pool,
                             const py::object& max_queued_bytes, const py::object& max_transfers,
                             const py::object& window_bytes, const py::object& window_descriptors,
                             const py::object& max_reports, const std::string& checksum,
                             const py::object& checksum_every, const py::object& checksum_workers,
                             bool reaper, bool timeline) {
  ManagerConfig config;
  config.max_queued_bytes = size_argument("max_queued_bytes", max_queued_bytes);
  config.max_transfers = size_argument("max_transfers", max_transfers);
  config.window_bytes = size_argument("window_bytes", window_bytes);
  config.window_descriptors = size_argument("window_descriptors", window_descriptors);
  config.max_reports = size_argument("max_reports", max_reports);
  config.checksum = checksum_argument(checksum);
  config.checksum_every = size_argument("checksum_every", checksum_every);
  config.checksum_workers = size_argument("checksum_workers", checksum_workers);
  config.reaper = reaper;
  config.timeline = timeline;
  const Unlocked unlocked;
  return Manager::make(device.runtime, layout, pool.pool, config);
}

// ---- a transfer before it is accepted ----

// What a call asks for, and what it still waits for. Blocking and awaiting are two ways to get from
// here to start().
struct Draft {
  Draft(Shared<Manager> own_manager, TransferKind wanted)
      : manager(std::move(own_manager)), kind(wanted) {}
  Draft(const Draft&) = delete;
  Draft& operator=(const Draft&) = delete;
  ~Draft() {  // the device destroys events that were never seen done; none is left after start()
    auto& events = request.after.events;
    const UnlockedIf unlocked(!events.empty() && calls_block(*manager->runtime()));
    events.clear();
  }

  Shared<Manager> manager;
  TransferKind kind;
  TransferRequest request;
  HostBlocks into;  // of an offload into blocks of the caller's
  // of a restore: a holder of its own, whatever becomes of the caller's
  std::optional<HostCopy> source;
  std::optional<Admission> admission;

  Shared<Transfer> start() {
    if (kind == TransferKind::restore)
      return manager->restore(std::move(request), *source, std::move(*admission));
    if (!into.empty())
      return manager->offload_into(std::move(request), std::move(into), std::move(*admission));
    return manager->offload(std::move(request), std::move(*admission));
  }
  void drop() {  // what it waits for and holds; nothing after start()
    admission.reset();
    source.reset();
    into.release();
  }
};

// A holder of its own of HostBlocks, or of slots that somebody holds, by index.
HostBlocks held_argument(const char* name, const Manager& manager, const py::object& held) {
  if (LightType<PyBlocks>::is(held)) return LightType<PyBlocks>::of(held.ptr()).held().share();
  std::vector<SlotIndex> slots;
  for (const std::int64_t slot : ids_argument(name, held)) {
    KVMEM_EXPECTS(slot >= 0 && slot < manager.pool()->capacity(), name, ": slot ", slot,
                  " is out of range: the pool has ", manager.pool()->capacity(), " slots");
    slots.push_back(static_cast<SlotIndex>(slot));
  }
  KVMEM_EXPECTS(!slots.empty(), name, " is empty");
  return manager.pool()->share_indices(slots);
}

HostBlocks into_argument(const Manager& manager, const py::object& into) {
  return into.is_none() ? HostBlocks() : held_argument("into", manager, into);
}

// A HostCopy is known to be complete; of slots by themselves the caller knows.
HostCopy source_argument(const Manager& manager, const py::object& copy) {
  const bool many = py::isinstance<py::sequence>(copy) && !py::isinstance<py::str>(copy) &&
                    !py::isinstance<py::bytes>(copy) && !is_host_copy(copy) && py::len(copy) > 0;
  if (many || LightType<PyBlocks>::is(copy) || py::isinstance<py::array>(copy))
    return {manager.layout(), held_argument("copy", manager, copy)};
  const HostCopy& held = host_copy(copy);
  return held.slice(0, held.blocks().size());
}

// Takes the order now, before any waiting. With the GIL released: marking a stream is a device
// call.
void take_order(Draft& draft, const Ordered& order) {
  Manager& manager = *draft.manager;
  for (const StreamHandle stream : order.streams) manager.add_stream(draft.request.after, stream);
  for (const EventHandle event : order.events) manager.add_event(draft.request.after, event);
  for (const auto& transfer : order.transfers) manager.add_transfer(draft.request.after, *transfer);
}

std::unique_ptr<Draft> draft_offload(const Shared<Manager>& manager, const py::object& blocks,
                                     const py::object& after, const std::string& priority,
                                     const py::object& tag, const py::object& into) {
  auto draft = std::make_unique<Draft>(manager, TransferKind::offload);
  draft->request.blocks = ids_argument("blocks", blocks);
  draft->request.priority = priority_argument(priority);
  draft->request.tag = tag_argument(tag);
  const Ordered order = after_argument(after);
  draft->into = into_argument(*manager, into);
  const Unlocked unlocked;
  draft->admission.emplace(manager->admit(draft->kind, draft->request, draft->into.empty()));
  take_order(*draft, order);
  return draft;
}

std::unique_ptr<Draft> draft_restore(const Shared<Manager>& manager, const py::object& copy,
                                     const py::object& blocks, const py::object& after,
                                     const std::string& priority, const py::object& tag) {
  auto draft = std::make_unique<Draft>(manager, TransferKind::restore);
  draft->source.emplace(source_argument(*manager, copy));
  draft->request.blocks = ids_argument("blocks", blocks);
  draft->request.priority = priority_argument(priority);
  draft->request.tag = tag_argument(tag);
  const Ordered order = after_argument(after);
  const Unlocked unlocked;
  draft->admission.emplace(manager->admit(draft->kind, draft->request, false));
  take_order(*draft, order);
  return draft;
}

Shared<Transfer> start_in_time(Draft& draft, const py::object& timeout) {
  const auto limit = timeout_argument(timeout);
  const Unlocked unlocked;
  if (!draft.manager->wait_for(*draft.admission, limit, signals()))
    draft.admission->throw_timed_out();
  return draft.start();
}

Shared<Transfer> try_start(Draft& draft) {  // null, and so None, at a bound
  const Unlocked unlocked;
  // What is wanted may have come back and only not been seen yet.
  if (!draft.admission->has_room()) draft.manager->runtime()->advance();
  if (!draft.admission->try_take()) return {};
  return draft.start();
}

Shared<Transfer> offload(const Shared<Manager>& self, const py::object& blocks,
                         const py::object& after, const std::string& priority,
                         const py::object& tag, const py::object& into, const py::object& timeout) {
  return start_in_time(*draft_offload(self, blocks, after, priority, tag, into), timeout);
}

Shared<Transfer> try_offload(const Shared<Manager>& self, const py::object& blocks,
                             const py::object& after, const std::string& priority,
                             const py::object& tag, const py::object& into) {
  return try_start(*draft_offload(self, blocks, after, priority, tag, into));
}

Shared<Transfer> restore(const Shared<Manager>& self, const py::object& copy,
                         const py::object& blocks, const py::object& after,
                         const std::string& priority, const py::object& tag,
                         const py::object& timeout) {
  return start_in_time(*draft_restore(self, copy, blocks, after, priority, tag), timeout);
}

Shared<Transfer> try_restore(const Shared<Manager>& self, const py::object& copy,
                             const py::object& blocks, const py::object& after,
                             const std::string& priority, const py::object& tag) {
  return try_start(*draft_restore(self, copy, blocks, after, priority, tag));
}

// ---- what a manager tells ----

py::dict direction_stats(const DirectionStats& stats) {
  py::dict facts;
  facts["accepted"] = stats.accepted;
  facts["done"] = stats.done;
  facts["failed"] = stats.failed;
  facts["cancelled"] = stats.cancelled;
  facts["active"] = stats.active;
  facts["waiting"] = stats.waiting;
  facts["blocks_done"] = stats.blocks_done;
  facts["bytes_done"] = stats.bytes_done;
  facts["bytes_staged"] = stats.bytes_staged;
  facts["queued_bytes"] = stats.queued_bytes;
  facts["window_bytes"] = stats.window_bytes;
  facts["window_descriptors"] = stats.window_descriptors;
  facts["lanes_owned"] = stats.lanes_owned;
  facts["queue_delay_total_us"] = stats.queue_delay_total_us;
  facts["queue_delay_max_us"] = stats.queue_delay_max_us;
  facts["guard_wait_total_us"] = stats.guard_wait_total_us;
  return facts;
}

py::dict checksum_stats(const ChecksumStats& stats) {
  py::dict facts;
  facts["blocks_summed"] = stats.blocks_summed;
  facts["blocks_verified"] = stats.blocks_verified;
  facts["blocks_corrupt"] = stats.blocks_corrupt;
  facts["busy_total_us"] = stats.busy_total_us;
  facts["waiting"] = stats.waiting;
  return facts;
}

py::dict manager_stats(const Manager& self) {
  const ManagerStats stats = self.stats();
  py::dict facts;
  facts["offload"] =
      direction_stats(stats.directions[static_cast<std::size_t>(Direction::to_host)]);
  facts["restore"] =
      direction_stats(stats.directions[static_cast<std::size_t>(Direction::to_device)]);
  facts["restoration_slots"] = stats.restoration_slots;
  facts["reports_waiting"] = stats.reports_waiting;
  facts["reports_taken"] = stats.reports_taken;
  facts["waiters"] = stats.waiters;
  facts["smallest_segment_bytes"] = stats.smallest_segment_bytes;
  facts["checksum"] = checksum_stats(stats.checksum);
  return facts;
}

CloseReport drain(Manager& self, const py::object& timeout) {
  const auto limit = timeout_argument(timeout);
  const Unlocked unlocked;
  CloseReport report;
  report.quiet = self.drain(limit, signals());
  const ManagerStats stats = self.stats();
  for (const DirectionStats& direction : stats.directions) report.in_flight += direction.active;
  report.slots = self.pool()->stats().slots;
  return report;
}

CloseReport close(Manager& self, const py::object& timeout) {
  const auto limit = timeout_argument(timeout);
  const Unlocked unlocked;
  return self.close(limit, signals());
}

void bind_records(py::module_& module) {
  const auto time = [](Nanoseconds TimelineRecord::* stage) {
    return [stage](const TimelineRecord& self) { return seconds(self.*stage); };
  };
  py::class_<TimelineRecord>(
      module, "TimelineRecord",
      "When the stages of one ended transfer were reached: seconds on the device's clock, None\n"
      "for a stage that was not reached or not measured.")
      .def_readonly("id", &TimelineRecord::id)
      .def_property_readonly("kind", [](const TimelineRecord& self) { return name_of(self.kind); })
      .def_property_readonly("priority",
                             [](const TimelineRecord& self) { return name_of(self.priority); })
      .def_property_readonly("state",
                             [](const TimelineRecord& self) { return name_of(self.state); })
      .def_readonly("staged", &TimelineRecord::staged)
      .def_readonly("blocks", &TimelineRecord::blocks)
      .def_readonly("bytes", &TimelineRecord::bytes)
      .def_property_readonly("requested", time(&TimelineRecord::requested))
      .def_property_readonly("submitted", time(&TimelineRecord::submitted))
      .def_property_readonly("started", time(&TimelineRecord::started))
      .def_property_readonly("completed", time(&TimelineRecord::completed))
      .def_property_readonly("observed", time(&TimelineRecord::observed))
      .def_property_readonly("first_use", time(&TimelineRecord::first_use))
      .def_property_readonly("checked", time(&TimelineRecord::checked),
                             "When the checksums were stored, of an offload behind `observed`, or "
                             "verified, of a restore\n"
                             "before `submitted`.");

  py::class_<CloseReport>(module, "CloseReport", "What drain() or close() found.")
      .def_readonly("quiet", &CloseReport::quiet, "Everything had ended in time.")
      .def_readonly("cancelled", &CloseReport::cancelled, "Transfers cancelled at the deadline.")
      .def_readonly("in_flight", &CloseReport::in_flight,
                    "Transfers that have not ended; they stay guarded.")
      .def_property_readonly("slots",
                             [](const CloseReport& self) { return slot_counts(self.slots); })
      .def("__repr__", [](const CloseReport& self) {
        return text("CloseReport(quiet=", self.quiet ? "True" : "False",
                    ", cancelled=", self.cancelled, ", in_flight=", self.in_flight, ")");
      });
}

}  // namespace

void bind_manager(py::module_& module) {
  bind_records(module);
  py::class_<Draft>(module, "_Draft")
      .def("granted", [](Draft& self, const std::shared_ptr<WakeList>& list,
                         std::uint64_t token) { return self.admission->granted(list, token); })
      .def("start", &Draft::start, py::call_guard<Unlocked>())
      .def("drop", &Draft::drop);

  const auto kw = py::kw_only();
  const auto after = py::arg("after");
  const auto none = [](const char* name) { return py::arg(name) = py::none(); };
  py::class_<Manager, Shared<Manager>>(module, "Manager")
      .def(py::init(&make_manager), py::arg("device"), py::arg("layout"), py::arg("pool"), kw,
           py::arg("max_queued_bytes"), py::arg("max_transfers"), py::arg("window_bytes"),
           py::arg("window_descriptors"), py::arg("max_reports"), py::arg("checksum"),
           py::arg("checksum_every"), py::arg("checksum_workers"), py::arg("reaper"),
           py::arg("timeline"))
      .def("offload", &offload, py::arg("blocks"), kw, after, py::arg("priority") = "background",
           none("tag"), none("into"), none("timeout"),
           "Copies device blocks to host blocks, after everything in `after`. Waits for slots, "
           "queue bytes and a report\n"
           "place. `into`: HostBlocks, or indices of held slots, instead of new ones. Raises "
           "PoolExhausted, TimedOut,\n"
           "CapacityError, Busy, InvalidArgument, Closed.")
      .def("try_offload", &try_offload, py::arg("blocks"), kw, after,
           py::arg("priority") = "background", none("tag"), none("into"),
           "The same, or None at a bound.")
      .def("restore", &restore, py::arg("copy"), py::arg("blocks"), kw, after,
           py::arg("priority") = "demand", none("tag"), none("timeout"),
           "Copies a HostCopy into device blocks, after the last readers of those blocks. `copy` "
           "may also be HostBlocks, or\n"
           "indices of held slots, of which the caller knows that they are complete. Raises Busy "
           "when an unfinished transfer\n"
           "that is not in `after` uses one of them, Incompatible, and what offload() raises.")
      .def("try_restore", &try_restore, py::arg("copy"), py::arg("blocks"), kw, after,
           py::arg("priority") = "demand", none("tag"), "The same, or None at a bound.")
      .def("_draft_offload", &draft_offload)
      .def("_draft_restore", &draft_restore)
      .def("poll", &Manager::poll, py::call_guard<Unlocked>(),
           "Reports of tagged transfers that ended since the last call. Drives submission and "
           "reaping.")
      .def(
          "busy",
          [](const Manager& self, const py::object& blocks) {
            return self.busy(ids_argument("blocks", blocks));
          },
          py::arg("blocks"), "Those of the blocks that an unfinished transfer reads or writes.")
      .def("stats", &manager_stats,
           "Counts, bytes and delays by direction. A dict; every key names its unit.")
      .def("timeline", &Manager::timeline, py::call_guard<Unlocked>(),
           "list[TimelineRecord] of ended transfers, oldest first.")
      .def("drain", &drain, none("timeout"),
           "Waits until nothing is unfinished; the report says whether it came to that.")
      .def(
          "rebind", [](Manager& self, const KVLayout& layout) { self.rebind(layout); },
          py::arg("layout"),
          "Other addresses of equal geometry, while drained. Raises Busy, Incompatible.")
      .def("close", &close, py::arg("timeout") = 30.0,
           "Stops new work, waits for the old, cancels the rest. What is then in flight stays "
           "guarded. Twice is fine.")
      .def_property_readonly("closed", &Manager::closed)
      .def("__enter__", [](const py::object& self) { return self; })
      .def("__exit__", [](Manager& self, const py::args&) { close(self, py::float_(30.0)); });
}

}  // namespace kvmem::bindings
