// Checksums of host blocks: which get one, and what follows from it.
#include "offload/manager.hpp"

namespace kvmem {

void Manager::open_checksums() {
  pool_->keep_sums();
  const bool virtual_time = runtime_->device().info().virtual_time;
  checksums_ =
      std::make_unique<Checksums>(pool_, virtual_time ? std::size_t{0} : config_.checksum_workers);
}

// Of an offload all blocks, or each nth of those accepted; of a restore those that have a sum.
void Manager::choose_checks(TransferJob& job) const {
  std::vector<BlockCheck>& chosen = job.checks.blocks;
  chosen.clear();  // of a first try
  const std::size_t every = config_.checksum == Checksum::always ? 1 : config_.checksum_every;
  for (std::size_t i = 0; i < job.host_slots.size(); ++i) {
    const bool restore = job.kind == TransferKind::restore;
    const auto sum = restore ? pool_->sum(job.host_slots[i]) : std::nullopt;
    const bool wanted = restore ? sum.has_value() : (offloaded_ + i) % every == 0;
    if (wanted) chosen.push_back({static_cast<std::uint32_t>(i), sum.value_or(0)});
  }
  if (!chosen.empty()) Checksums::prepare(job);
}

// When an offload begins to write and no earlier: one that it runs behind keeps its own sums until
// then. Also where this manager keeps none: another one may.
void Manager::forget_overwritten(const Slice& slice) noexcept {
  const auto& job = static_cast<const TransferJob&>(*slice.job);
  if (job.kind == TransferKind::offload && slice.begin == 0) pool_->forget_sums(job.host_slots);
}

void Manager::settle_checks() noexcept {
  if (!checksums_) return;
  while (const std::shared_ptr<TransferJob> job = checksums_->take_ended()) {
    const std::exception_ptr error = Checksums::error(*job);
    if (!error && !job->cancelled()) job->checked = runtime_->device().now();
    if (!CopyQueue::end_check(*job, error)) continue;
    finish(*job);
    // What ran behind it may be of another side or manager: somebody is to look.
    runtime_->device().progress().bump();
  }
}

}  // namespace kvmem
