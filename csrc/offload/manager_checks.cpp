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
  std::vector<std::uint32_t>& positions = job.checks.positions;
  positions.clear();  // of a first try
  const std::size_t every = config_.checksum == Checksum::always ? 1 : config_.checksum_every;
  for (std::size_t i = 0; i < job.host_slots.size(); ++i) {
    const bool wanted = job.kind == TransferKind::restore
                            ? pool_->sum(job.host_slots[i]).has_value()
                            : (offloaded_ + i) % every == 0;
    if (wanted) positions.push_back(static_cast<std::uint32_t>(i));
  }
  if (!positions.empty()) Checksums::prepare(job);
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
