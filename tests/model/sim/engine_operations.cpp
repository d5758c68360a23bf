// What the engine does with its own streams, and what the device does meanwhile.
#include <cstring>

#include "model/sim/simulation.hpp"

namespace kvmem::sim {

// A write is legal behind all that transfers still read and write there.
bool Simulation::may_write(BlockId block) const {
  return std::ranges::all_of(transfers_, [&](const SimTransfer& transfer) {
    return transfer.ended || !transfer.touches(block) ||
           ((transfer.waited >> stream_of(block)) & 1U) != 0;
  });
}

bool Simulation::write(const Draw& draw) {
  for (std::size_t i = 0; i < shape_.device_blocks; ++i) {
    const auto block = static_cast<BlockId>((draw[0] + i) % shape_.device_blocks);
    if (!may_write(block)) continue;
    Kernel kernel;
    kernel.scratch = scratch_->take();
    if (kernel.scratch == nullptr) return false;
    const BlockBytes bytes = fresh_bytes();
    std::memcpy(kernel.scratch, bytes.data(), block_bytes);
    const std::byte* from = kernel.scratch;
    for (std::size_t r = 0; r < regions; from += payloads[r++]) {
      kernel.targets.push_back(cache_->segment(block, r));
      kernel.sources.push_back(from);
      kernel.sizes.push_back(payloads[r]);
    }
    kernel.block = block;
    launch(std::move(kernel));
    content_[static_cast<std::size_t>(block)] = {new_key(bytes), 0};
    return true;
  }
  return false;
}

bool Simulation::read(const Draw& draw) {
  for (std::size_t i = 0; i < shape_.device_blocks; ++i) {
    const auto block = static_cast<BlockId>((draw[0] + i) % shape_.device_blocks);
    const unsigned stream = stream_of(block);
    bool all = true, first_stage = true;
    for (const SimTransfer& transfer : transfers_) {
      if (transfer.ended || !transfer.restores || !transfer.touches(block)) continue;
      all &= ((transfer.waited >> stream) & 1U) != 0;
      first_stage &= transfer.waited_stage[stream] != 0;
    }
    if (!all && !first_stage) continue;
    Kernel kernel;
    kernel.scratch = scratch_->take();
    if (kernel.scratch == nullptr) return false;
    std::byte* to = kernel.scratch;
    for (std::size_t r = 0; r < regions; to += payloads[r++]) {
      if (!all && stages[r] != stages[0]) continue;
      kernel.targets.push_back(to);
      kernel.sources.push_back(cache_->segment(block, r));
      kernel.sizes.push_back(payloads[r]);
    }
    kernel.reads = true;
    kernel.block = block;
    kernel.expected = content_[static_cast<std::size_t>(block)];
    launch(std::move(kernel));
    return true;
  }
  return false;
}

void Simulation::launch(Kernel made) {
  without_faults([&] {
    made.event = engine_events_->acquire();
    made.stream = stream_of(made.block);
    kernels_.push_back(std::make_unique<Kernel>(std::move(made)));
    Kernel& kernel = *kernels_.back();
    const StreamHandle stream = streams_[kernel.stream].handle();
    device_->copy(
        {kernel.targets.data(), kernel.sources.data(), kernel.sizes.data(), kernel.sizes.size()},
        kernel.reads ? Direction::to_host : Direction::to_device, SourceAccess::stream_order,
        stream);
    kernel.event.record(stream);
  });
}

// What a kernel has read is compared once the end of the restore is known on which it hangs.
void Simulation::note_kernels() {
  without_faults([&] {
    std::erase_if(kernels_, [&](const std::unique_ptr<Kernel>& kernel) {
      kernel->arrived = kernel->arrived || kernel->event.query() == EventState::done;
      if (!kernel->arrived || (kernel->reads && !settled(kernel->expected))) return false;
      const Key key = kernel->reads ? key_of(kernel->expected) : 0;
      if (key != 0) {
        const BlockBytes& bytes = bytes_.at(key);
        for (std::size_t i = 0; i < kernel->sizes.size(); ++i) {
          const std::ptrdiff_t at = kernel->targets[i] - kernel->scratch;
          if (std::memcmp(kernel->targets[i], bytes.data() + at, kernel->sizes[i]) != 0)
            throw Violation(text("a kernel read wrong bytes from block ", kernel->block));
        }
        ++tally_.blocks_compared;
      }
      scratch_->give_back(kernel->scratch);
      return true;
    });
  });
}

bool Simulation::idle(unsigned stream) const {
  return !stalls_[stream] && std::ranges::none_of(kernels_, [&](const auto& kernel) {
    return kernel->stream == stream && !kernel->arrived;
  });
}

bool Simulation::stall(const Draw& draw) {
  auto& stalled = stalls_[draw[0] % 2];
  if (stalled) {
    device_->signal(*stalled);
    device_->destroy_event(*stalled);
    stalled.reset();
    return true;
  }
  without_faults([&] {
    stalled = device_->create_event(false);
    device_->record_unsignalled(*stalled);
    device_->wait(streams_[draw[0] % 2].handle(), *stalled);
  });
  return true;
}

bool Simulation::step(const Draw& draw) {
  bool moved = false;
  for (unsigned i = 0; i <= draw[0] % 3; ++i) moved |= device_->step();
  return moved;
}

bool Simulation::advance(const Draw& draw) {
  device_->advance(static_cast<Nanoseconds>(draw[0] % 5000));
  if (draw[1] % 2 == 0) runtime_->advance();
  return true;
}

bool Simulation::hold(const Draw& draw) {
  if (device_->held_copies() > 0 || draw[1] % 2 == 0)
    device_->release_copies();
  else
    device_->hold_copies(1 + draw[0] % 2);
  return true;
}

bool Simulation::fail(const Draw& draw) {
  constexpr std::array calls{
      DeviceCall::create_stream, DeviceCall::stream_id,  DeviceCall::create_event,
      DeviceCall::record,        DeviceCall::wait,       DeviceCall::query,
      DeviceCall::copy,          DeviceCall::event_time, DeviceCall::any};
  Fault how = draw[2] % 2 == 0 ? Fault::refused : Fault::in_flight;
  if (draw[2] % 8 == 0) how = Fault::lost;
  device_->fail_nth(calls[draw[0] % calls.size()], 1 + draw[1] % 6, how, 1 + draw[3] % 2);
  faults_planned_ += 1 + draw[3] % 2;
  return true;
}

// ---- bytes by name ----

Key Simulation::key_of(const Content& content) const {
  if (content.restore == 0) return content.key;
  return restore_ends_[content.restore] == TransferState::done ? content.key : 0;
}

bool Simulation::settled(const Content& content) const {
  return content.restore == 0 || is_terminal(restore_ends_[content.restore]);
}

Key Simulation::new_key(const BlockBytes& bytes) {
  bytes_[++last_key_] = bytes;
  return last_key_;
}

BlockBytes Simulation::fresh_bytes() {
  BlockBytes bytes;
  std::uint64_t word = (last_key_ + 1) * 0x9E3779B97F4A7C15ULL;
  for (std::size_t i = 0; i < block_bytes; i += 8) {
    word = (word ^ (word >> 29)) * 0xBF58476D1CE4E5B9ULL + i;
    std::memcpy(bytes.data() + i, &word, 8);
  }
  return bytes;
}

}  // namespace kvmem::sim
