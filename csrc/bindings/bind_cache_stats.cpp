#include "bindings/bind_cache.hpp"

namespace kvmem::bindings {

namespace {

py::dict group_facts(const GroupStats& group) {
  py::dict facts;
  facts["slots"] = group.slots;
  facts["free"] = group.free;
  facts["writing"] = group.writing;
  facts["ready"] = group.ready;
  facts["leaving"] = group.leaving;
  facts["evictable"] = group.evictable;
  facts["retired"] = group.retired;
  return facts;
}

// By group and tier. The index has the groups of the disk behind those of the host.
py::dict groups_facts(const Cache& cache, const IndexStats& index) {
  py::dict all;
  const std::size_t count = cache.options().groups.size();
  for (std::size_t g = 0; g < count; ++g) {
    py::dict tiers;
    tiers["host"] = group_facts(index.groups[g]);
    if (cache.options().disk) tiers["disk"] = group_facts(index.groups[g + count]);
    all[py::str(cache.options().groups[g].name)] = tiers;
  }
  return all;
}

py::dict outcomes(const std::array<std::uint64_t, disk_outcomes>& counts) {
  py::dict all;
  for (std::size_t i = 0; i < counts.size(); ++i) {
    if (counts[i] > 0) all[name(static_cast<DiskOutcome>(i))] = counts[i];
  }
  return all;
}

py::dict disk_calls(const DiskCounts& counts) {
  py::dict facts;
  facts["calls"] = counts.calls;
  facts["bytes"] = counts.bytes;
  facts["ended"] = outcomes(counts.ended);
  return facts;
}

py::object words_or_none(const std::string& words) {
  return words.empty() ? py::object(py::none()) : py::object(py::str(words));
}

py::object disk_facts(const CacheStats& stats) {
  if (!stats.disk || !stats.feed) return py::none();
  const DiskStats& disk = *stats.disk;
  py::dict facts;
  facts["slots"] = disk.slots;
  facts["retired"] = disk.retired;
  facts["slot_bytes"] = disk.slot_bytes;
  facts["reads"] = disk_calls(disk.reads);
  facts["writes"] = disk_calls(disk.writes);
  facts["queued"] = disk.queued;
  facts["running"] = disk.running;
  facts["peak_queued"] = disk.peak_queued;
  facts["refused"] = disk.refused;
  facts["degraded"] = disk.degraded ? py::object(py::str(*disk.degraded)) : py::none();
  facts["degradations"] = disk.degradations;
  facts["remade"] = disk.remade;
  facts["direct"] = disk.direct;
  facts["why_not_direct"] = words_or_none(disk.why_not_direct);
  facts["why_empty"] = words_or_none(disk.why_empty);
  facts["recovered"] = disk.recovered;
  facts["superseded"] = disk.superseded;
  facts["scanned"] = outcomes(disk.scanned);
  facts["open_seconds"] = disk.open_seconds;
  facts["scan_seconds"] = disk.scan_seconds;
  facts["blocks_written"] = stats.feed->written;
  facts["blocks_unwritten"] = stats.feed->unwritten;
  facts["blocks_corrupt"] = stats.feed->corrupt;
  facts["blocks_foreign"] = stats.feed->foreign;
  facts["blocks_promoted"] = stats.disk_promoted;
  facts["reads_failed"] = stats.disk_reads_failed;
  facts["to_write"] = stats.feed->queued;
  facts["writing"] = stats.feed->writing;
  facts["erasing"] = stats.feed->erasing;
  return facts;
}

void add_index(py::dict& facts, const IndexStats& index) {
  facts["keys_asked"] = index.keys_asked;
  facts["keys_reserved"] = index.keys_reserved;
  facts["keys_pending"] = index.keys_pending;
  facts["blocks_present"] = index.blocks_present;
  facts["blocks_attached"] = index.blocks_attached;
  facts["plans"] = index.plans;
  facts["reservations"] = index.reservations;
  facts["evicted"] = index.evicted;
  facts["removed"] = index.removed;
  facts["refused"] = index.refused;
  facts["expired"] = index.expired;
  facts["events_lost"] = index.events_lost;
  facts["index_bytes"] = index.bytes;
}

}  // namespace

py::object owner_counts(const std::optional<OwnerCounts>& counts) {
  if (!counts) return py::none();
  py::dict facts;
  facts["offloads"] = counts->offloads;
  facts["restores"] = counts->restores;
  facts["offloaded_bytes"] = counts->offloaded_bytes;
  facts["restored_bytes"] = counts->restored_bytes;
  facts["offloaded_again"] = counts->offloaded_again;
  facts["unused_bytes"] = counts->unused_bytes;
  facts["tokens"] = counts->tokens;
  facts["refused"] = counts->refused;
  facts["bytes_per_token"] = counts->bytes_per_token();
  return facts;
}

py::dict cache_stats(const Cache& cache) {
  const CacheStats stats = cache.stats();
  py::dict facts;
  facts["groups"] = groups_facts(cache, stats.index);
  facts["transfers"] = stats.transfers;
  facts["waiters"] = stats.waiters;
  facts["landing_free"] = stats.landing_free;
  facts["stores"] = stats.stores;
  facts["stores_failed"] = stats.stores_failed;
  facts["loads"] = stats.loads;
  facts["loads_failed"] = stats.loads_failed;
  facts["cancelled"] = stats.cancelled;
  facts["keys_loaded"] = stats.keys_loaded;
  facts["keys_not_admitted"] = stats.keys_not_admitted;
  facts["keys_refused"] = stats.keys_refused;
  facts["blocks_stored"] = stats.blocks_stored;
  facts["blocks_from_host"] = stats.blocks_from_host;
  facts["blocks_from_disk"] = stats.blocks_from_disk;
  add_index(facts, stats.index);
  facts["owners"] = owner_counts(stats.owners);
  facts["host_bytes_per_second"] = stats.host_bytes_per_second;
  facts["disk_bytes_per_second"] = stats.disk_bytes_per_second;
  facts["disk"] = disk_facts(stats);
  return facts;
}

void bind_cache_reports(py::module_& module) {
  py::class_<Advice>(module, "Advice", "What advise() says; times are predicted, in seconds.")
      .def_property_readonly(
          "kind",
          [](const Advice& self) {
            return self.kind == AdviceKind::restore     ? "restore"
                   : self.kind == AdviceKind::recompute ? "recompute"
                                                        : "wait";
          },
          "restore | recompute | wait")
      .def_readonly("restorable", &Advice::restorable, "Leading keys that can be loaded now.")
      .def_readonly("pending", &Advice::pending,
                    "So many more once the stores in flight have ended.")
      .def_readonly("restore_seconds", &Advice::restore_seconds,
                    "For all the keys: load what can be, recompute the rest.")
      .def_readonly("recompute_seconds", &Advice::recompute_seconds)
      .def_readonly("wait_seconds", &Advice::wait_seconds,
                    "The same, with what is pending loaded too.")
      .def("__repr__", [](const Advice& self) {
        return text("Advice(restorable=", self.restorable, ", pending=", self.pending,
                    ", restore_seconds=", self.restore_seconds,
                    ", recompute_seconds=", self.recompute_seconds,
                    ", wait_seconds=", self.wait_seconds, ")");
      });
  py::class_<CacheCloseReport>(module, "CacheCloseReport", "What close() found.")
      .def_readonly("quiet", &CacheCloseReport::quiet, "All transfers had ended in time.")
      .def_readonly("cancelled", &CacheCloseReport::cancelled,
                    "Transfers cancelled at the deadline.")
      .def_readonly("in_flight", &CacheCloseReport::in_flight,
                    "Transfers that have not ended; their blocks stay guarded.")
      .def_readonly("unwritten", &CacheCloseReport::unwritten,
                    "Blocks that the disk should have and has not.")
      .def_property_readonly(
          "disk",
          [](const CacheCloseReport& self) -> py::object {
            if (!self.disk) return py::none();
            py::dict facts;
            facts["dropped"] = self.disk->dropped;
            facts["running"] = self.disk->running;
            facts["sync_error"] = self.disk->sync_error;
            return facts;
          },
          "Of the disk, or None: calls dropped and still running, the errno of its last sync.")
      .def("__repr__", [](const CacheCloseReport& self) {
        return text("CacheCloseReport(quiet=", self.quiet ? "True" : "False",
                    ", cancelled=", self.cancelled, ", in_flight=", self.in_flight,
                    ", unwritten=", self.unwritten, ")");
      });
}

}  // namespace kvmem::bindings
