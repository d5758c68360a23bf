#include "offload/manager.hpp"

#include <algorithm>

#include "base/check.hpp"

namespace kvmem {

// ---- construction ----

namespace {

void expect_config(const ManagerConfig& config, const KVLayout& layout) {
  const auto at_least = [](const char* name, std::size_t value, std::size_t least) {
    KVMEM_EXPECTS(value >= least, name, " is ", value, ", at least ", least);
  };
  at_least("max_queued_bytes (one block)", config.max_queued_bytes, layout.block_bytes());
  at_least("max_transfers", config.max_transfers, 1);
  at_least("window_bytes", config.window_bytes, smallest_window_bytes);
  at_least("window_descriptors", config.window_descriptors, 1);
  at_least("max_reports", config.max_reports, 1);
  KVMEM_EXPECTS(config.max_reports <= most_reports, "max_reports is ", config.max_reports,
                ", at most ", most_reports);
  at_least("checksum_every", config.checksum_every, 1);
  at_least("checksum_workers", config.checksum_workers, 1);
  KVMEM_EXPECTS(config.checksum_workers <= most_checksum_workers, "checksum_workers is ",
                config.checksum_workers, ", at most ", most_checksum_workers);
  at_least("staging_pieces", config.staging_pieces, 1);
  at_least("staging_piece_bytes", config.staging_piece_bytes, slot_alignment_bytes);
}

// What the error says; empty rather than a throw.
std::string what_of(const std::exception_ptr& error) noexcept {
  try {
    if (error) std::rethrow_exception(error);
  } catch (const std::exception& e) {
    try {
      return e.what();
    } catch (...) {
    }
  } catch (...) {
  }
  return {};
}

// Two copies without an order would write one slot.
void expect_each_once(std::span<const SlotIndex> slots) {
  std::vector<SlotIndex> sorted(slots.begin(), slots.end());
  std::ranges::sort(sorted);
  const auto twice = std::ranges::adjacent_find(sorted);
  KVMEM_EXPECTS(twice == sorted.end(), "into: slot ", *twice, " stands twice");
}

}  // namespace

std::shared_ptr<Manager> Manager::make(std::shared_ptr<Runtime> runtime, KVLayout layout,
                                       std::shared_ptr<BlockPool> pool,
                                       const ManagerConfig& config) {
  const std::string& device = runtime->device().info().name;
  KVMEM_EXPECTS(layout.memory() == device, "the layout is in ", layout.memory(),
                " memory, the device is ", device);
  KVMEM_EXPECTS(pool->device() == runtime->device_ptr(), "the pool was made for another device");
  KVMEM_EXPECTS(pool->block_bytes() == layout.block_bytes(), "block_bytes: the pool has ",
                pool->block_bytes(), ", the layout ", layout.block_bytes());
  expect_config(config, layout);
  const bool sums = config.checksum != Checksum::off;
  KVMEM_EXPECTS(!sums || runtime->device().info().has_bytes,
                "checksum needs a device whose memory has bytes");
  std::shared_ptr<Manager> manager(
      new Manager(std::move(runtime), std::move(layout), std::move(pool), config));
  if (sums) manager->open_checksums();
  manager->runtime_->add(manager);
  if (config.reaper) manager->reaper_ = manager->runtime_->lease_reaper();
  return manager;
}

Manager::Manager(std::shared_ptr<Runtime> runtime, KVLayout layout, std::shared_ptr<BlockPool> pool,
                 const ManagerConfig& config)
    : runtime_(std::move(runtime)),
      pool_(std::move(pool)),
      config_(config),
      events_(config.timeline ? std::make_shared<EventPool>(runtime_->device_ptr(), true)
                              : runtime_->events()),
      report_places_("max_reports", config.max_reports, runtime_->device().progress()),
      timeline_(config.timeline_records),
      layout_(std::make_shared<const KVLayout>(std::move(layout))),
      device_uses_(layout_->block_count()),
      host_uses_(pool_->capacity()) {
  reports_.reserve(config.max_reports);
  open_side(Direction::to_host);
  open_side(Direction::to_device);
}

void Manager::open_side(Direction direction) {
  Side& opened = side(direction);
  opened.bytes = std::make_unique<Bound>("max_queued_bytes", config_.max_queued_bytes,
                                         runtime_->device().progress());
  opened.transfers = std::make_unique<Bound>("max_transfers", config_.max_transfers,
                                             runtime_->device().progress());
  // Without a reaper nobody comes back to submit the rest: what is accepted is submitted inside the
  // call.
  const QueueWindow window =
      config_.reaper ? QueueWindow{config_.window_bytes, config_.window_descriptors}
                     : QueueWindow{config_.max_queued_bytes, config_.window_descriptors, true};
  std::shared_ptr<StagingRing> ring;
  if (runtime_->device().info().needs_pinned_host && !pool_->pinned()) {
    ring = std::make_shared<StagingRing>(runtime_->device_ptr(), config_.staging_pieces,
                                         config_.staging_piece_bytes);
  }
  opened.queue =
      std::make_unique<CopyQueue>(events_, window, std::move(ring), [&](const Stream& stream) {
        opened.lines[stream.id()] = runtime_->recycle().line(stream.id(), stream.handle(), true);
      });
}

Manager::~Manager() = default;

Gate::Pass Manager::enter() {
  mark_.expect_same_process("the manager");
  if (runtime_->recycle().device_lost())
    throw DeviceLost("the device was lost; host copies made before stay readable");
  return gate_.enter("the manager");
}

std::shared_ptr<const KVLayout> Manager::layout() const {
  const std::lock_guard lock(mutex_);
  return layout_;
}

// ---- 1 allocate ----

void Manager::add_stream(After& after, StreamHandle stream) {
  after.events.push_back(runtime_->mark_stream(stream).event);
}

void Manager::add_event(After& after, EventHandle event) {
  if (auto mark = runtime_->mark_event(event).event) after.events.push_back(std::move(mark));
}

void Manager::add_transfer(After& after, const Transfer& transfer) {
  KVMEM_EXPECTS(transfer.job()->manager->runtime_ == runtime_, "after: transfer ",
                transfer.job()->id, " belongs to another device");
  after.transfers.push_back(transfer.job());
}

Admission Manager::admit(TransferKind kind, const TransferRequest& request, bool takes_slots) {
  const auto pass = enter();
  KVMEM_EXPECTS(!request.blocks.empty(), "a transfer needs at least one block");
  const auto layout_now = layout();
  layout_now->expect_blocks(request.blocks, kind == TransferKind::restore);
  const Side& wanted =
      side(kind == TransferKind::offload ? Direction::to_host : Direction::to_device);
  std::vector<Admission::Need> needs{
      {wanted.bytes.get(), request.blocks.size() * layout_now->block_bytes()},
      {wanted.transfers.get(), 1}};
  if (request.tag) needs.push_back({&report_places_, 1});
  Admission admission(takes_slots ? pool_.get() : nullptr, request.blocks.size(), std::move(needs));
  admission.requested = runtime_->device().now();
  return admission;
}

bool Manager::wait_for(Admission& admission, std::optional<double> timeout_seconds,
                       const Runtime::Interrupt& interrupt) {
  if (admission.granted()) return true;
  const auto deadline = runtime_->deadline_after(timeout_seconds);
  return runtime_->wait_until([&] { return admission.granted(); }, deadline, interrupt);
}

// ---- 2 submit ----

std::shared_ptr<Transfer> Manager::offload(TransferRequest request, Admission admission) {
  HostBlocks blocks = admission.take_blocks();
  HostBlocks guarded = blocks.hold_for_copy();
  return accept(TransferKind::offload, std::move(request), std::move(guarded), std::move(blocks),
                std::move(admission));
}

std::shared_ptr<Transfer> Manager::offload_into(TransferRequest request, HostBlocks target,
                                                Admission admission) {
  KVMEM_EXPECTS(target.of(pool_->core()), "into: the blocks are of another pool");
  KVMEM_EXPECTS(target.size() == request.blocks.size(), "into has ", target.size(),
                " blocks, the transfer ", request.blocks.size());
  expect_each_once(target.slots());
  HostBlocks guarded = target.hold_for_copy();
  return accept(TransferKind::offload, std::move(request), std::move(guarded), std::move(target),
                std::move(admission));
}

std::shared_ptr<Transfer> Manager::accept(TransferKind kind, TransferRequest request,
                                          HostBlocks guarded, HostBlocks result,
                                          Admission admission) {
  const auto pass = enter();
  auto job = make_job(kind, request, guarded, layout());
  auto transfer = std::make_shared<Transfer>(job);
  Side& accepting = side(*job);
  BlockClaim* const claim = request.claim.get();
  job->requested = admission.requested;
  job->guarded = std::move(guarded);
  job->result = std::move(result);
  if (request.tag)
    job->report = Report{0, std::move(*request.tag), kind, TransferState::queued, {}};
  CopyQueue::Entry entry{job};
  // A demand transfer must not wait for a background one that it is ordered behind.
  if (job->priority() == Priority::demand) CopyQueue::hurry_those_before(*job);
  try {
    activate(job, claim, admission);
  } catch (const Busy&) {
    // What is in the way may have ended and only not been asked yet: a caller who saw a later end
    // counts on that.
    runtime_->recycle().reap_in_turn();
    runtime_->device().progress().bump();  // somebody is to submit what that made room for
    activate(job, claim, admission);
  }
  const bool first = accepting.queue->accept(std::move(entry));  // from here on nothing can fail
  if (kind == TransferKind::restore && job->has_checks()) checksums_->start(job);
  submit_ready();
  // A reaper sleeps soundly while nothing waits.
  if (first && accepting.queue->waiting() > 0) runtime_->device().progress().bump();
  return transfer;
}

void Manager::activate(const std::shared_ptr<TransferJob>& job, BlockClaim* claim,
                       Admission& admission) {
  const std::lock_guard lock(mutex_);
  // Again, under the lock: close() counts what is active behind it, so that nothing starts later.
  if (gate_.closed()) throw Closed("the manager is closed");
  if (job->layout != layout_)
    throw Busy("the layout was rebound during the call", job->device_blocks.front(), 0);
  const BlockClaim::Aside aside(claim, *job);
  expect_free(job->kind, job->device_blocks, job->host_slots, job->behind(), claim);
  if (checksums_) choose_checks(*job);
  active_.emplace(last_id_ + 1, job);
  job->id = ++last_id_;
  if (job->report) job->report->id = job->id;
  admission.take_amounts();  // finish() gives them back
  begin_uses(*job);
  ++side(*job).stats.accepted;
  if (job->has_checks()) job->expect_check();
  if (job->kind == TransferKind::offload) offloaded_ += job->host_slots.size();
}

std::shared_ptr<TransferJob> Manager::make_job(TransferKind kind, const TransferRequest& request,
                                               const HostBlocks& guarded,
                                               std::shared_ptr<const KVLayout> layout_now) {
  const Direction direction =
      kind == TransferKind::offload ? Direction::to_host : Direction::to_device;
  const SlotArena arena{pool_->data(), pool_->slot_bytes(), pool_->pin_chunk_bytes()};
  CopyBatch batch(*layout_now, direction, request.blocks, guarded.slots(), arena,
                  side(direction).queue->descriptor_bytes(), kind == TransferKind::restore);
  // Once it is pinned it stays so; what is not yet goes through the ring.
  const bool staged =
      runtime_->device().info().needs_pinned_host && !pool_->pinned(guarded.slots());
  auto job = std::make_shared<TransferJob>(std::move(batch), request.priority, request.after.events,
                                           request.after.transfers, staged);
  job->manager = shared_from_this();
  job->layout = std::move(layout_now);
  job->kind = kind;
  job->device_blocks = request.blocks;
  job->host_slots.assign(guarded.slots().begin(), guarded.slots().end());
  return job;
}

void Manager::submit_ready() noexcept {
  if (mark_.must_leak()) return;
  settle_checks();
  // Until neither moves: a transfer of one direction may wait for the submission of one of the
  // other.
  for (bool moved = true; moved;) {
    moved = false;
    for (Side& each : sides_) moved |= submit_some(each, Turn::wait);
  }
}

// One slice in flight, and what it holds: the transfer, and so its blocks and its descriptors.
struct Manager::SliceGuard final : Parked {
  explicit SliceGuard(std::shared_ptr<Manager> owner) : manager(std::move(owner)) {}
  void ended(bool was_lost) noexcept override { manager->slice_ended(slice, was_lost); }
  std::shared_ptr<Manager> manager;
  Slice slice;
};

bool Manager::submit_some(Side& submitting, Turn turn) noexcept {
  CopyQueue& queue = *submitting.queue;
  if (queue.waiting() == 0) return false;
  CopyQueue::Gone gone;  // dropped behind the lock
  std::unique_lock one_at_a_time(queue.submitting(), std::defer_lock);
  if (turn == Turn::wait) one_at_a_time.lock();
  // Who is submitting just now looks at every job.
  if (turn == Turn::skip && !one_at_a_time.try_lock()) return false;
  bool moved = false;
  try {
    for (;;) {
      auto guard = std::make_unique<SliceGuard>(shared_from_this());  // before anything is taken
      if (!queue.next(guard->slice)) break;
      forget_overwritten(guard->slice);
      queue.submit(guard->slice);
      guard->event = guard->slice.event;
      const auto line = submitting.lines.find(guard->slice.lane->stream.id());
      runtime_->recycle().park(line->second, std::move(guard));
      moved = true;
    }
  } catch (
      ...) {  // no memory for a guard, or no stream: nothing was taken; a later call tries again
  }
  gone = queue.take_gone();
  return moved;
}

bool Manager::has_waiting() const noexcept {
  return (checksums_ && checksums_->has_ended()) ||
         std::ranges::any_of(sides_, [](const Side& each) { return each.queue->waiting() > 0; });
}

// ---- 3 complete, 4 recycle ----

void Manager::slice_ended(Slice& slice, bool lost) noexcept {
  auto& job = static_cast<TransferJob&>(*slice.job);
  job.lost |= lost;
  if (side(job).queue->ended(slice, lost)) return finish(job);
  if (!job.has_checks() || !CopyQueue::begin_check(job)) return;
  job.copied = runtime_->device().now();
  checksums_->start(std::static_pointer_cast<TransferJob>(slice.job));
  // In virtual time it has ended by now: who sees a later end counts on this one.
  if (runtime_->device().info().virtual_time) settle_checks();
}

void Manager::finish(TransferJob& job) noexcept {
  Side& finishing = side(job);
  const Nanoseconds observed = job.copied >= 0 ? job.copied : runtime_->device().now();
  const std::exception_ptr error = CopyQueue::error(job);
  const TransferState state = error             ? TransferState::failed
                              : job.cancelled() ? TransferState::cancelled
                                                : TransferState::done;
  const CopyQueue::Times times = finishing.queue->settle(job);
  std::string why = what_of(error);
  HostBlocks unwanted;
  {
    // Before the blocks go home: whoever gets them next must not find them in use.
    const std::lock_guard lock(mutex_);
    end_uses(job);
    if (state != TransferState::done) unwanted = std::move(job.result);
  }
  // And all of it before the end shows: who sees the end may count on it.
  unwanted.release();
  if (job.lost)
    job.guarded.poison();
  else
    job.guarded.release();
  record(job, state, observed, times);
  finishing.bytes->give_back(job.batch().bytes());
  finishing.transfers->give_back(1);

  std::vector<Waker> wakers;
  std::shared_ptr<TransferJob> last_hold;  // the job may end with this call
  {
    const std::lock_guard lock(mutex_);
    if (job.report) {
      job.report->state = state;
      job.report->error = std::move(why);
      reports_.push_back(std::move(*job.report));  // has room: the transfer had its place
    }
    job.error = error;
    wakers.swap(job.wakers);
    if (auto node = active_.extract(job.id)) last_hold = std::move(node.mapped());
    job.ended.store(state);
  }
  for (Waker& waker : wakers) waker.fire();
  runtime_->device().progress().bump_for_waiters();
}

// ---- 5 restore ----

std::shared_ptr<Transfer> Manager::restore(TransferRequest request, const HostCopy& copy,
                                           Admission admission) {
  const HostBlocks& source = copy.blocks();
  KVMEM_EXPECTS(source.of(pool_->core()), "the host copy is of another pool");
  KVMEM_EXPECTS(source.size() == request.blocks.size(), "the host copy has ", source.size(),
                " blocks, the restore names ", request.blocks.size());
  auto differing = copy.layout().geometry_differences(*layout());
  if (!differing.empty()) {
    const std::string first = differing.front();
    throw Incompatible(text("the host copy does not fit the layout: ", first),
                       std::move(differing));
  }
  HostBlocks guarded = source.hold_for_copy();
  return accept(TransferKind::restore, std::move(request), std::move(guarded), {},
                std::move(admission));
}

}  // namespace kvmem
