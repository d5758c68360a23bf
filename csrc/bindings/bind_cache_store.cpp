#include "base/check.hpp"
#include "bindings/bind_cache.hpp"
#include "cache/pending_store.hpp"

namespace kvmem::bindings {

Cache::Blocks blocks_argument(const Cache& cache, const py::object& blocks, std::size_t keys) {
  const auto& groups = cache.options().groups;
  Cache::Blocks all(groups.size());
  if (!py::isinstance<py::dict>(blocks)) {
    if (py::hasattr(blocks, "keys")) return blocks_argument(cache, py::dict(blocks), keys);
    KVMEM_EXPECTS(groups.size() == 1, "blocks is ", shown(blocks), ", and the cache has ",
                  groups.size(), " groups: a dict by group is needed");
    all[0] = ids_argument("blocks", blocks);
    return all;
  }
  const py::dict given = blocks;
  std::size_t named = 0;
  for (std::size_t g = 0; g < groups.size(); ++g) {
    const py::str name(groups[g].name);
    if (!given.contains(name)) {
      all[g].assign(keys, -1);
      continue;
    }
    ++named;
    all[g] = ids_argument(text("blocks['", groups[g].name, "']").c_str(), given[name]);
  }
  KVMEM_EXPECTS(named == given.size(), "blocks is ", shown(blocks),
                ", and names a group that the cache does not have");
  return all;
}

After taken_order(const Cache& cache, const Ordered& order) {
  Manager& manager = *cache.options().groups.front().manager;  // all are of one runtime
  After after;
  for (const StreamHandle stream : order.streams) manager.add_stream(after, stream);
  for (const EventHandle event : order.events) manager.add_event(after, event);
  for (const auto& transfer : order.transfers) manager.add_transfer(after, *transfer);
  return after;
}

namespace {

// What of a store does not change while it waits for room.
struct StoreArguments {
  StoreArguments(const Shared<Cache>& cache, const py::object& given_keys,
                 const py::object& given_blocks, const py::object& after, std::string own_owner,
                 const std::string& given_priority)
      : keys(KeysArgument(given_keys, cache->index().key_bytes())),
        blocks(blocks_argument(*cache, given_blocks, keys.pointers().size())),
        order(after_argument(after)),
        owner(std::move(own_owner)),
        priority(priority_argument(given_priority)) {}

  // Without the GIL, and so is its end.
  [[nodiscard]] Cache::Request request(const Cache& cache, double value) const {
    return {.keys = keys.pointers(),
            .key_bytes = keys.key_bytes(),
            .owner = owner,
            .after = taken_order(cache, order),
            .priority = priority,
            .value = value};
  }

  OwnKeys keys;
  Cache::Blocks blocks;
  Ordered order;
  std::string owner;
  Priority priority;
};

Shared<CacheTransfer> store(const Shared<Cache>& self, const py::object& keys,
                            const py::object& blocks, const py::object& after,
                            const std::string& owner, const std::string& priority, double value,
                            const py::object& timeout) {
  const StoreArguments given(self, keys, blocks, after, owner, priority);
  const auto limit = timeout_argument(timeout);
  const Unlocked unlocked;
  return self->store(given.request(*self, value), given.blocks, limit, signals());
}

Shared<CacheTransfer> try_store(const Shared<Cache>& self, const py::object& keys,
                                const py::object& blocks, const py::object& after,
                                const std::string& owner, const std::string& priority,
                                double value) {  // null, and so None, without room
  const StoreArguments given(self, keys, blocks, after, owner, priority);
  const Unlocked unlocked;
  return self->try_store(given.request(*self, value), given.blocks);
}

// A store that is awaited. Its order is taken when it is made.
class StoreDraft {
 public:
  StoreDraft(const Shared<Cache>& own_cache, const py::object& keys, const py::object& blocks,
             const py::object& after, const std::string& owner, const std::string& priority,
             double value)
      : cache_(own_cache), given_(own_cache, keys, blocks, after, owner, priority) {
    const Unlocked unlocked;
    pending_.emplace(own_cache, given_.request(*cache_, value), given_.blocks);
  }
  StoreDraft(const StoreDraft&) = delete;
  StoreDraft& operator=(const StoreDraft&) = delete;
  ~StoreDraft() { drop(); }

  bool granted(const std::shared_ptr<WakeList>& list, std::uint64_t token) {
    return pending_->accepted(list, token);
  }
  Shared<CacheTransfer> start() { return pending_->take(); }
  void drop() {  // the device destroys events that were never seen done
    if (!pending_) return;
    const UnlockedIf unlocked(calls_block(*cache_->runtime()));
    pending_.reset();
  }

 private:
  Shared<Cache> cache_;  // outlives what waits there
  StoreArguments given_;
  std::optional<PendingStore> pending_;
};

std::unique_ptr<StoreDraft> draft_store(const Shared<Cache>& self, const py::object& keys,
                                        const py::object& blocks, const py::object& after,
                                        const std::string& owner, const std::string& priority,
                                        double value) {
  return std::make_unique<StoreDraft>(self, keys, blocks, after, owner, priority, value);
}

}  // namespace

void bind_stores(py::module_& module, CacheClass& cache) {
  py::class_<StoreDraft>(module, "_StoreDraft")
      .def("granted", &StoreDraft::granted, py::call_guard<Unlocked>())
      .def("start", &StoreDraft::start)
      .def("drop", &StoreDraft::drop);

  const auto kw = py::kw_only();
  const auto after = py::arg("after");
  cache
      .def("store", &store, py::arg("keys"), py::arg("blocks"), kw, after, py::arg("owner") = "",
           py::arg("priority") = "background", py::arg("value") = 1.0,
           py::arg("timeout") = py::none(),
           "Copies what is missing of the longest leading part of the keys that is admitted and "
           "finds room, after\n"
           "everything in `after`, and waits for that room, behind the stores that came before. "
           "blocks: the device block\n"
           "of each key, int64[keys], or a dict of those by group, with -1 where a group has none. "
           "value: of these keys,\n"
           "for the policy gdsf. Raises PoolExhausted at the deadline, which says who holds what; "
           "InvalidArgument, Busy,\n"
           "Closed, DeviceLost.")
      .def("try_store", &try_store, py::arg("keys"), py::arg("blocks"), kw, after,
           py::arg("owner") = "", py::arg("priority") = "background", py::arg("value") = 1.0,
           "The same, or None where the first missing key finds no room, or other stores wait for "
           "some.")
      .def("_draft_store", &draft_store);
}

}  // namespace kvmem::bindings
