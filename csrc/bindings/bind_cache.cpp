#include "bindings/bind_cache.hpp"

#include "base/check.hpp"

namespace kvmem::bindings {

namespace {

// ---- what Python holds ----

struct PyHit {
  PyHit(Shared<Cache> own_cache, CacheHit own)
      : cache(std::move(own_cache)), held(std::move(own)) {}
  PyHit(const PyHit&) = delete;
  PyHit& operator=(const PyHit&) = delete;

  CacheHit& hit() {  // throws AlreadyReleased
    if (loading) throw AlreadyReleased("the hit is being loaded by another thread");
    return held;
  }

  void let_go() { cache = {}; }  // it holds nothing any more

  Shared<Cache> cache;  // outlives what it holds there
  CacheHit held;
  bool loading = false;  // a call without the GIL has it
};

// ---- arguments ----

Pending pending_argument(const std::string& pending) {
  KVMEM_EXPECTS(pending == "stop" || pending == "attach", "pending is '", pending,
                "', neither 'stop' nor 'attach'");
  return pending == "attach" ? Pending::attach : Pending::stop;
}

// ---- calls ----

Shared<Cache> make_cache(const py::dict& values) {
  CacheOptions options = cache_options(values);
  const Unlocked unlocked;
  return Cache::make(std::move(options));
}

std::unique_ptr<PyHit> reserve(const Shared<Cache>& self, const py::object& keys,
                               const std::string& owner, const std::string& pending,
                               std::optional<double> expires_seconds) {
  const KeysArgument given(keys, self->index().key_bytes());
  return std::make_unique<PyHit>(self, self->reserve(given.pointers(), given.key_bytes(), owner,
                                                     pending_argument(pending), expires_seconds));
}

Shared<CacheTransfer> load(const Shared<Cache>& self, PyHit& hit, const py::object& blocks,
                           const py::object& after, const std::string& priority) {
  CacheHit& held = hit.hit();
  const Cache::Blocks targets = blocks_argument(*self, blocks, held.length());
  const Ordered order = after_argument(after);
  const Priority its_priority = priority_argument(priority);
  struct Loading {  // until the GIL is had again
    explicit Loading(bool& own_flag) : flag(own_flag) { flag = true; }
    Loading(const Loading&) = delete;
    Loading& operator=(const Loading&) = delete;
    ~Loading() { flag = false; }
    bool& flag;
  };
  Shared<CacheTransfer> transfer;
  {
    const Loading loading(hit.loading);
    const Unlocked unlocked;
    transfer = self->load(held, targets, taken_order(*self, order), its_priority);
  }
  hit.let_go();
  return transfer;
}

Advice advise(Cache& self, const py::object& keys, double prefill_tokens_per_s,
              double block_tokens) {
  const KeysArgument given(keys, self.index().key_bytes());
  return self.advise(given.pointers(), given.key_bytes(), prefill_tokens_per_s, block_tokens);
}

py::tuple take_events(Cache& self) {
  const IndexEvents taken = self.index().take_events();
  const std::size_t groups = self.options().groups.size();
  py::list events;
  for (const IndexEvent& event : taken.events) {
    events.append(py::make_tuple(
        event.kind == IndexEvent::Kind::stored ? "stored" : "removed",
        event.group < groups ? "host" : "disk", self.options().groups[event.group % groups].name,
        py::bytes(reinterpret_cast<const char*>(event.key.data()), self.index().key_bytes())));
  }
  return py::make_tuple(events, taken.lost);
}

// Why, how a read from disk ended, and the digest of the other manifest.
py::tuple why_miss(const Cache& self, const py::object& key) {
  KVMEM_EXPECTS(PyBytes_Check(key.ptr()), "key is ", shown(key), ", not bytes");
  const std::string_view bytes = key.cast<std::string_view>();
  const Miss miss = self.why_miss(reinterpret_cast<const std::byte*>(bytes.data()), bytes.size());
  py::object outcome = py::none(), digest = py::none();
  if (miss.disk) outcome = py::str(name(*miss.disk));
  if (miss.manifest)
    digest = py::bytes(reinterpret_cast<const char*>(miss.manifest->data()), miss.manifest->size());
  return py::make_tuple(miss_reason_names[static_cast<std::size_t>(miss.why)], outcome, digest);
}

CacheCloseReport close(Cache& self, const py::object& timeout) {
  const auto limit = timeout_argument(timeout);
  const Unlocked unlocked;
  return self.close(limit, signals());
}

void bind_hit(py::module_& module) {
  py::class_<PyHit>(
      module, "CacheHit",
      "The longest usable prefix of some keys, held on whatever tier: len() is its length in "
      "keys.\n"
      "It ends with the object, unless it was loaded, and is a context manager. One thread at a "
      "time.")
      .def("__len__", [](const PyHit& self) { return self.held.length(); })
      .def_property_readonly(
          "tiers",
          [](PyHit& self) {
            const CacheHit& hit = self.hit();
            py::dict blocks;
            blocks["host"] = hit.host_blocks();
            blocks["disk"] = hit.disk_blocks();
            return blocks;
          },
          "By tier, how many blocks of all groups are held there; on disk: not in host memory.")
      .def_property_readonly(
          "pending", [](const PyHit& self) { return self.held.pending(); },
          "A key in flight stopped it, or is among those that it holds.")
      .def(
          "keep",
          [](PyHit& self, const py::object& length) {
            return self.hit().keep(size_argument("length", length, 0));
          },
          py::arg("length"),
          "Shortens it to the longest usable prefix of at most so many keys, and answers how many: "
          "the minimum over\n"
          "ranks, say. Raises AlreadyReleased.")
      .def(
          "release",
          [](PyHit& self) {
            self.hit().release();
            self.let_go();
          },
          "Gives it up. Raises AlreadyReleased the second time, and once it was loaded.")
      .def("__enter__", [](const py::object& self) { return self; })
      .def("__exit__", [](PyHit& self, const py::args&) {
        try {
          self.hit().release();
          self.let_go();
        } catch (const AlreadyReleased&) {  // it was loaded
        }
      });
}

void bind_loads(CacheClass& cache) {
  const auto kw = py::kw_only();
  const auto after = py::arg("after");
  cache
      .def("reserve", &reserve, py::arg("keys"), kw, py::arg("owner") = "",
           py::arg("pending") = "stop", py::arg("expires_seconds") = py::none(),
           "Finds the longest usable prefix over all tiers and holds it, in one step. pending: "
           "'stop' before a key in\n"
           "flight, or 'attach' to it. expires_seconds: from now, unless it is loaded before.")
      .def("load", &load, py::arg("hit"), py::arg("blocks"), kw, after,
           py::arg("priority") = "demand",
           "Copies what a hit holds into device blocks, after the last readers of those; the hit "
           "is the load's from then\n"
           "on. blocks: int64[len(hit)], or a dict of those by group; what a group does not need "
           "of the hit is not looked\n"
           "at. Returns at once, also where it attached to keys in flight. Raises AlreadyReleased, "
           "InvalidArgument, Busy,\n"
           "Closed, DeviceLost, PoolExhausted (max_transfers); the hit is as it was then.")
      .def("_advise", &advise)
      .def("poll", &Cache::poll, py::call_guard<Unlocked>(),
           "Moves on what is unfinished, and answers how many transfers are.")
      .def(
          "flush",
          [](Cache& self, const py::object& timeout) {
            const auto limit = timeout_argument(timeout);
            const Unlocked unlocked;
            return self.flush(limit, signals());
          },
          py::arg("timeout") = py::none(),
          "Writes what the disk does not have. False at the deadline, and when the disk does not "
          "take it.")
      .def("close", &close, py::arg("timeout") = 30.0,
           "Stops new work, waits for the old, cancels the rest, writes to disk in what is left of "
           "the time, and closes\n"
           "the disk. The managers stay open. Twice is fine.")
      .def("__enter__", [](const py::object& self) { return self; })
      .def("__exit__", [](Cache& self, const py::args&) { close(self, py::float_(30.0)); });
}

void bind_books(CacheClass& cache) {
  cache
      .def(
          "note_tokens",
          [](Cache& self, const std::string& owner, const py::object& count) {
            self.note_tokens(owner, size_argument("count", count, 0));
          },
          py::arg("owner"), py::arg("count"), "The owner has generated so many tokens.")
      .def("drop_owner", &Cache::drop_owner, py::arg("owner"),
           "Ends the owner's hits and its books, and answers how many hits. Its counts stay in the "
           "total; what it is\n"
           "storing or loading goes on, but a load that still waits for keys in flight fails.")
      .def(
          "owner",
          [](const Cache& self, const std::string& owner) {
            return owner_counts(self.owner(owner));
          },
          py::arg("owner"), "The counts of one owner, or None where there is no book of it.")
      .def(
          "evict",
          [](Cache& self, const py::object& keys) {
            const OwnKeys given(KeysArgument(keys, self.index().key_bytes()));
            const Unlocked unlocked;  // it waits for whoever moves the cache on
            return self.evict(given.pointers(), given.key_bytes());
          },
          py::arg("keys"),
          "These are not found from now on, on no tier, whoever holds them, and erased on disk "
          "behind the call: flush()\n"
          "waits for that. Answers how many blocks.")
      .def(
          "clear",
          [](Cache& self) {
            const Unlocked unlocked;
            return self.clear();
          },
          "evict() of all keys.")
      .def("_why_miss", &why_miss)
      .def("take_events", &take_events,
           "What became readable and what went, as ([(kind, tier, group, key), ...], lost): kind "
           "is 'stored' or\n"
           "'removed', tier 'host' or 'disk', lost is how many older ones were dropped at "
           "max_events.")
      .def("stats", &cache_stats, "Counts, bytes and rates. A dict; every key names its unit.")
      .def("_check", &Cache::check);
}

}  // namespace

void bind_cache(py::module_& module) {
  bind_cache_transfer(module);
  bind_cache_reports(module);
  bind_hit(module);
  CacheClass cache(module, "Cache");
  cache.def(py::init(&make_cache), py::arg("options"));
  bind_stores(module, cache);
  bind_loads(cache);
  bind_books(cache);
}

}  // namespace kvmem::bindings
