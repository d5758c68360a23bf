#include "contract/device_contract.hpp"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <random>

namespace kvmem::contract {

namespace {
constexpr auto patience = std::chrono::seconds(60);
constexpr Nanoseconds nap = 20'000'000;
}  // namespace

Bytes pattern(std::size_t bytes, unsigned seed) {
  std::mt19937_64 random(seed);
  Bytes some(bytes);
  for (std::size_t at = 0; at < bytes; at += sizeof(std::uint64_t)) {
    const std::uint64_t word = random();
    std::memcpy(some.data() + at, &word, std::min(sizeof word, bytes - at));
  }
  return some;
}

bool same(std::span<const std::byte> a, std::span<const std::byte> b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size()) == 0;
}

DeviceContract::DeviceContract() : under_test_(GetParam().open()) {}

void DeviceContract::TearDown() {
  while (!stalled_.empty()) unstall(stalled_.back());
  for (const StreamHandle stream : streams_) settle_stream(stream);
  for (const StreamHandle stream : streams_) device().destroy_stream(stream);
  for (const EventHandle event : events_) device().destroy_event(event);
  for (const auto& [base, bytes] : device_memory_) device().deallocate(base, bytes);
  if (!device().info().needs_pinned_host) return;
  for (const auto& [base, bytes] : host_memory_) device().unpin(base.get(), bytes);
}

StreamHandle DeviceContract::new_stream() {
  return streams_.emplace_back(device().create_stream());
}

EventHandle DeviceContract::new_event(bool timing) {
  return events_.emplace_back(device().create_event(timing));
}

void DeviceContract::destroy_stream(StreamHandle stream) {
  std::erase(streams_, stream);
  device().destroy_stream(stream);
}

void DeviceContract::destroy_event(EventHandle event) {
  std::erase(events_, event);
  device().destroy_event(event);
}

void DeviceContract::stall(StreamHandle stream) {
  under_test_->stall(stream);
  stalled_.push_back(stream);
}

void DeviceContract::unstall(StreamHandle stream) {
  std::erase(stalled_, stream);
  under_test_->unstall(stream);
}

std::span<std::byte> DeviceContract::host_memory(std::size_t bytes, unsigned seed) {
  const std::size_t pages = round_up(bytes, slot_alignment_bytes);
  HostMemory memory(static_cast<std::byte*>(std::aligned_alloc(slot_alignment_bytes, pages)),
                    &std::free);
  if (device().info().needs_pinned_host) device().pin(memory.get(), pages);
  const std::span<std::byte> span(memory.get(), bytes);
  std::ranges::copy(pattern(bytes, seed), span.begin());
  host_memory_.emplace_back(std::move(memory), pages);
  return span;
}

std::byte* DeviceContract::device_memory(std::size_t bytes) {
  auto* const base = static_cast<std::byte*>(device().allocate(bytes));
  device_memory_.emplace_back(base, bytes);
  return base;
}

void DeviceContract::write_device(std::byte* target, std::span<const std::byte> source) {
  const auto staged = host_memory(source.size());
  std::ranges::copy(source, staged.begin());
  const StreamHandle stream = new_stream();
  to_device(target, staged, stream);
  settle_stream(stream);
}

Bytes DeviceContract::read_device(const std::byte* source, std::size_t bytes) {
  const auto staged = host_memory(bytes);
  const StreamHandle stream = new_stream();
  to_host(staged, source, stream);
  settle_stream(stream);
  return bytes_of(staged);
}

void DeviceContract::copy(Batch batch, Direction direction, StreamHandle stream) {
  batches_.push_back(std::move(batch));
  device().copy(batches_.back().descriptors(), direction, SourceAccess::stream_order, stream);
}

void DeviceContract::copy_from(std::byte* target, std::span<const std::byte> source,
                               SourceAccess access, StreamHandle stream) {
  Batch& batch = batches_.emplace_back();
  batch.add(target, source.data(), source.size());
  device().copy(batch.descriptors(), Direction::to_device, access, stream);
}

void DeviceContract::to_device(std::byte* target, std::span<const std::byte> source,
                               StreamHandle stream) {
  Batch batch;
  batch.add(target, source.data(), source.size());
  copy(std::move(batch), Direction::to_device, stream);
}

void DeviceContract::to_host(std::span<std::byte> target, const std::byte* source,
                             StreamHandle stream) {
  Batch batch;
  batch.add(target.data(), source, target.size());
  copy(std::move(batch), Direction::to_host, stream);
}

EventHandle DeviceContract::record_now(StreamHandle stream, bool timing) {
  const EventHandle event = new_event(timing);
  device().record(event, stream);
  return event;
}

void DeviceContract::settle(EventHandle event) {
  const auto limit = std::chrono::steady_clock::now() + patience;
  while (true) {
    const std::uint64_t seen = device().progress().value();
    const EventState state = query(event);
    if (state == EventState::done) return;
    ASSERT_EQ(state, EventState::pending);
    ASSERT_LT(std::chrono::steady_clock::now(), limit) << "the event is never reached";
    device().sleep(seen, nap, true);
  }
}

void DeviceContract::let_others_work() {
  std::byte* const memory = device_memory(4096);
  const Bytes sent = pattern(4096, 99);
  write_device(memory, sent);
  EXPECT_EQ(read_device(memory, sent.size()), sent);
}

}  // namespace kvmem::contract
