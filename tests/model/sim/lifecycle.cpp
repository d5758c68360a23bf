// Worlds come and go: drain, rebind, close, lose, and the end of everything.
#include <cstdio>
#include <cstdlib>

#include "model/sim/simulation.hpp"

namespace kvmem::sim {

namespace {

constexpr double long_time = 1000;  // virtual seconds: far beyond what anything here takes

}  // namespace

void Tally::add(const Tally& other) {
  for (std::size_t i = 0; i < kinds; ++i) {
    tried[i] += other.tried[i];
    accepted[i] += other.accepted[i];
  }
  faults += other.faults;
  done += other.done;
  failed += other.failed;
  cancelled += other.cancelled;
  blocks_compared += other.blocks_compared;
}

Simulation::Simulation(const WorldShape& shape) : shape_(shape) {
  shape_.device.needs_pinned_host |= shape_.over_fake.has_value();
  open();
}

Simulation::~Simulation() {
  // After a violation anything may be in flight: let it end, so that nothing is freed under it.
  try {
    lift();
    while (device_->step()) runtime_->advance();
  } catch (...) {
  }
  tear_down();
  if (violation_.empty()) return;
  std::fprintf(stderr, "at the end of a world: %s\n", violation_.c_str());
  std::abort();
}

void Simulation::run(const Operation& operation) {
  const auto kind = static_cast<std::size_t>(operation.kind);
  ++tally_.tried[kind];
  try {
    if (apply(operation)) ++tally_.accepted[kind];
  } catch (const CopyFailed& error) {
    if (faults_planned_ == 0) throw Violation(text("without a fault: ", error.what()));
  } catch (const DeviceLost& error) {
    if (!device_->lost()) throw Violation(text("a device is not lost: ", error.what()));
  } catch (const Error& error) {
    throw Violation(text(name_of(operation.kind), " threw: ", error.what()));
  }
  if (device_->lost()) static_cast<void>(lose(operation.draw));  // by a fault, within the call
  check();
}

bool Simulation::apply(const Operation& operation) {
  const Draw& draw = operation.draw;
  switch (operation.kind) {
    case Kind::acquire:
      return acquire(draw);
    case Kind::ticket:
      return ticket(draw);
    case Kind::share:
      return share(draw);
    case Kind::release:
      return release(draw);
    case Kind::release_after:
      return release_after(draw);
    case Kind::offload:
      return offload(draw);
    case Kind::offload_into:
      return offload_into(draw);
    case Kind::admit:
      return admit(draw);
    case Kind::restore:
      return restore(draw);
    case Kind::wait_on:
      return wait_on(draw);
    case Kind::wait:
      return wait(draw);
    case Kind::cancel:
      return cancel(draw);
    case Kind::drop:
      return drop(draw);
    case Kind::poll:
      return poll();
    case Kind::drain:
      return drain(draw);
    case Kind::rebind:
      return rebind(draw);
    case Kind::close:
      return close(draw);
    case Kind::write:
      return write(draw);
    case Kind::read:
      return read(draw);
    case Kind::stall:
      return stall(draw);
    case Kind::step:
      return step(draw);
    case Kind::advance:
      return advance(draw);
    case Kind::hold:
      return hold(draw);
    case Kind::fail:
      return fail(draw);
    case Kind::lose:
      return lose(draw);
  }
  return false;
}

void Simulation::open() {
  if (shape_.over_fake) {
    auto over = std::make_shared<test::CudaOverVirtual>(*shape_.over_fake, shape_.device);
    // The engine records its own events again as it likes, also such as kvmem has asked.
    over->fake().enable("re_record", 0);
    device_ = std::move(over);
  } else {
    device_ = make_virtual_device(shape_.device);
  }
  runtime_ = Runtime::make(device_);
  PoolOptions options;
  options.block_bytes = block_bytes;
  options.capacity_bytes = shape_.slots * slot_alignment_bytes;
  options.pin = shape_.pin;
  pool_ = std::make_shared<BlockPool>(device_, options);
  cache_ = std::make_unique<Cache>(shape_.device_blocks, device_);
  scratch_ = std::make_unique<Scratch>(*device_);
  engine_events_ = std::make_shared<EventPool>(device_, false);
  streams_.emplace_back(device_);
  streams_.emplace_back(device_);
  content_.assign(shape_.device_blocks, {});
  slot_keys_.assign(shape_.slots, 0);
  bytes_.clear();
  restore_ends_.assign(1, TransferState::queued);
  last_seq_ = 0;
  all_blocks_.clear();
  for (std::size_t i = 0; i < shape_.device_blocks; ++i)
    all_blocks_.push_back(static_cast<BlockId>(i));
  open_manager();
}

void Simulation::open_manager() {
  manager_ = Manager::make(runtime_, cache_->layout(), pool_, shape_.manager);
  expected_ = {};
  records_ = 0;
  used_.clear();
}

void Simulation::lift() {
  device_->forget_faults();
  lift_what_blocks();
}

void Simulation::lift_what_blocks() {
  device_->release_copies();
  for (auto& stalled : stalls_) {
    if (!stalled) continue;
    device_->signal(*stalled);
    device_->destroy_event(*stalled);
    stalled.reset();
  }
}

void Simulation::let_all_end() {
  lift();
  if (!manager_->drain(long_time, {})) throw Violation("a transfer never ends");
  while (device_->step()) runtime_->advance();
  runtime_->advance();
  if (device_->pending_copies() > 0) throw Violation("a copy of the engine's never ends");
  const auto quiet = [&] { return runtime_->recycle().in_flight() == 0; };
  if (!runtime_->wait_until(quiet, runtime_->deadline_after(long_time), {}))
    throw Violation("a guard never ends");
  count_faults();
  releasing_.clear();
  note_ends();
  faults_planned_ = 0;
  note_kernels();
  if (!kernels_.empty()) throw Violation("a kernel of the engine's never ends");
  check_uses();
}

void Simulation::count_faults() {
  tally_.faults += device_->faults() - faults_counted_;
  faults_counted_ = device_->faults();
}

void Simulation::let_go() {
  waiting_offloads_.clear();
  tickets_.clear();
  leases_.clear();
  stored_.clear();
  for (SimTransfer& transfer : transfers_) transfer.handle.reset();
}

void Simulation::expect_quiet() {
  check();
  static_cast<void>(poll());
  if (!unreported_.empty()) throw Violation("a tagged transfer was never reported");
  const ManagerStats now = manager_->stats();
  for (const DirectionStats& one : now.directions) {
    if (one.waiting + one.queued_bytes + one.window_bytes + one.window_descriptors +
            one.lanes_owned >
        0)
      throw Violation("something of a queue was not given back");
  }
}

void Simulation::finish() {
  let_all_end();
  let_go();
  expect_quiet();
  if (pool_->stats().slots.free != shape_.slots) throw Violation("slots leaked");
}

void Simulation::tear_down() {
  transfers_.clear();
  waiting_offloads_.clear();
  tickets_.clear();
  leases_.clear();
  releasing_.clear();
  stored_.clear();
  kernels_.clear();
  unreported_.clear();
  ended_now_.clear();
  wakes_ = {};
  pool_seen_ = {};
  checked_at_ = 0;
  stalls_ = {};  // their events die with the device
  count_faults();
  faults_planned_ = faults_counted_ = 0;
  manager_.reset();
  pool_.reset();
  streams_.clear();
  engine_events_.reset();
  runtime_.reset();
  scratch_.reset();
  cache_.reset();
  if (const auto violations = this->violations(); !violations.empty()) violation_ = violations[0];
  device_.reset();
}

std::vector<std::string> Simulation::violations() {
  auto* const checker = dynamic_cast<test::Checker*>(device_.get());
  return checker != nullptr ? checker->take_violations() : std::vector<std::string>{};
}

bool Simulation::drain(const Draw& draw) {
  if (draw[0] % 2 == 0) {
    let_all_end();
    return true;
  }
  const bool quiet = manager_->drain(1e-6 * (draw[1] % 50), {});
  note_ends();
  const bool all_ended = std::ranges::all_of(transfers_, &SimTransfer::ended);
  if (quiet != all_ended) throw Violation("drain() misjudged whether all is quiet");
  return quiet;
}

bool Simulation::rebind(const Draw& draw) {
  if (draw[0] % 4 != 0) let_all_end();
  auto moved = std::make_unique<Cache>(shape_.device_blocks, device_);
  const bool unfinished =
      std::ranges::any_of(transfers_, [](const SimTransfer& transfer) { return !transfer.ended; });
  if (unfinished || !kernels_.empty()) {
    if (unfinished)
      expect_throw<Busy>("rebind with unfinished transfers",
                         [&] { manager_->rebind(moved->layout()); });
    return false;
  }
  manager_->rebind(moved->layout());
  cache_ = std::move(moved);
  content_.assign(shape_.device_blocks, {});
  return true;
}

bool Simulation::close(const Draw& draw) {
  device_->forget_faults();
  if (draw[0] % 2 == 0) lift();
  const CloseReport report = manager_->close(1e-6 * (draw[1] % 50), {});
  std::size_t in_flight = 0, at_least = 0, at_most = 0;  // cancelled by the call
  for (SimTransfer& transfer : transfers_) {
    if (transfer.ended) continue;
    const TransferState state = transfer.job->state();
    in_flight += is_terminal(state) ? 0U : 1U;
    // What close() gave up on counts as cancelled by the engine.
    const bool given_up = !is_terminal(state) || state == TransferState::cancelled;
    at_most += given_up ? 1U : 0U;
    at_least += given_up && (!is_terminal(state) || !transfer.cancelled) ? 1U : 0U;
    transfer.cancelled |= given_up && !report.quiet;
  }
  if (report.quiet) at_least = at_most = 0;
  expect(report.cancelled >= at_least && report.cancelled <= at_most, "close() cancelled ",
         report.cancelled, ", expected ", at_least, " to ", at_most);
  if (report.in_flight != in_flight) throw Violation("close() reports another count in flight");
  if (report.quiet && in_flight > 0) throw Violation("close() says quiet, and it is not");
  TransferRequest request;
  request.blocks = {0};
  expect_throw<Closed>("a closed manager", [&] {
    static_cast<void>(manager_->admit(TransferKind::offload, request, true));
  });
  for (WaitingOffload& waiting : waiting_offloads_) {
    expect(waiting.granted || wakes_.take(waiting.token) > 0,
           "who waits is not woken by the close");
    wakes_.forget(waiting.token);
    try {
      if (!waiting.admission.granted()) throw Violation("who waits is not told of the close");
    } catch (const Closed&) {
    }
  }
  waiting_offloads_.clear();
  let_all_end();
  expect_quiet();
  forget_transfers();  // nobody asks any more
  open_manager();
  return true;
}

void Simulation::forget_transfers() {
  for (const SimTransfer& transfer : transfers_) {
    if (transfer.token != 0) wakes_.forget(transfer.token);
  }
  transfers_.clear();
}

}  // namespace kvmem::sim
