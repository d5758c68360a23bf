#include "bindings/bind_cache.hpp"
#include "bindings/bind_interest.hpp"

namespace kvmem::bindings {

namespace {

using Class = py::class_<CacheTransfer, Shared<CacheTransfer>>;

py::list failed_keys(const CacheTransfer& self) {
  py::list keys;
  for (const std::size_t position : self.failed_positions()) {
    const auto key = self.key(position);
    keys.append(py::bytes(reinterpret_cast<const char*>(key.data()), key.size()));
  }
  return keys;
}

void bind_facts(Class& transfer) {
  const auto of_store = [](std::size_t CacheJob::* count) {
    return [count](const CacheTransfer& self) { return self.job().*count; };
  };
  transfer
      .def_property_readonly(
          "id", [](const CacheTransfer& self) { return self.job().id; },
          "0 where there was nothing to copy.")
      .def_property_readonly(
          "kind", [](const CacheTransfer& self) { return kvmem::name_of(self.job().kind); },
          "store | load")
      .def_property_readonly("loaded", &CacheTransfer::loaded,
                             "Of a load that has ended: how many leading keys were delivered and "
                             "verified, whichever way it ended.")
      .def_property_readonly("failed_keys", &failed_keys,
                             "Of a load that has ended: the keys of which a block did not arrive.")
      .def_property_readonly("covered", of_store(&CacheJob::covered),
                             "Of a store: how many leading keys the cache has when all goes well.")
      .def_property_readonly("present", of_store(&CacheJob::present),
                             "Of a store: blocks that were there already.")
      .def_property_readonly("attached", of_store(&CacheJob::attached),
                             "Of a store: blocks that another one is storing.")
      .def_property_readonly(
          "refused",
          [](const CacheTransfer& self) -> py::object {
            if (self.job().refused.empty()) return py::none();
            return words_of(self.job().refused);
          },
          "Of a store: why not all keys were admitted, in words, or None.");
}

}  // namespace

void bind_cache_transfer(py::module_& module) {
  Class transfer(module, "CacheTransfer", py::dynamic_attr(),
                 "Interest in one store or load of a cache; dropping it is always safe. It ends "
                 "once. A store\n"
                 "that is done can be found from then on; a load that is done delivered every "
                 "block. Of a load\n"
                 "that failed, `loaded` keys were delivered; its other targets, and all of those "
                 "of a cancelled\n"
                 "one, hold undefined bytes. Any thread.");
  bind_facts(transfer);
  bind_interest(
      transfer,
      {.wait = "Waits for the end, in seconds. Raises its error (CopyFailed, Corrupt, DeviceLost, "
               "Cancelled) or TimedOut.",
       .wait_on =
           "Work queued on `stream` from now on runs after this transfer, or after that stage of "
           "it and those before.\n"
           "Returns when all of it has been submitted: of a load, when what it reads from disk is "
           "in host memory.\n"
           "Raises its error if it has one by then; a later failure shows in its end alone."});
}

}  // namespace kvmem::bindings
