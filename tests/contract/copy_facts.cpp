#include <algorithm>
#include <numeric>
#include <random>

#include "base/error.hpp"
#include "contract/device_contract.hpp"

namespace kvmem::contract {
namespace {

constexpr auto done = EventState::done;
constexpr auto pending = EventState::pending;

TEST_P(DeviceContract, BytesComeBackFromTheDeviceAsTheyWent) {
  const StreamHandle stream = new_stream();
  const auto source = host_memory(1 << 20, 1), target = host_memory(1 << 20);
  std::byte* const memory = device_memory(source.size());
  to_device(memory, source, stream);
  to_host(target, memory, stream);
  settle_stream(stream);
  EXPECT_EQ(bytes_of(target), bytes_of(source));
}

TEST_P(DeviceContract, ACopyMayBeginAndEndAnywhere) {
  constexpr std::size_t area = 3000;
  const StreamHandle stream = new_stream();
  std::byte* const memory = device_memory(area);
  for (const std::size_t bytes : {1U, 2U, 3U, 63U, 64U, 65U, 2047U, 2048U, 2301U}) {
    for (const std::size_t at : {0U, 1U, 7U, 63U, 501U}) {
      const auto source = host_memory(area, 2), target = host_memory(area, 3);
      Bytes expected = bytes_of(target);
      std::copy_n(source.begin() + 5, bytes, expected.begin() + 11);
      to_device(memory + at, source.subspan(5, bytes), stream);
      to_host(target.subspan(11, bytes), memory + at, stream);
      settle_stream(stream);
      ASSERT_EQ(bytes_of(target), expected) << bytes << " bytes at " << at;
    }
  }
}

TEST_P(DeviceContract, ALargeCopyHasArrivedWhenItsEventIsDone) {
  const StreamHandle stream = new_stream();
  const auto source = host_memory((std::size_t{24} << 20) + 12'345, 4);
  const auto target = host_memory(source.size());
  std::byte* const memory = device_memory(source.size());
  to_device(memory, source, stream);
  to_host(target, memory, stream);
  settle_stream(stream);
  EXPECT_TRUE(same(target, source));
}

// Every other segment of the source, in random order, to every other segment of the target.
Batch scattered(std::byte* target, const std::byte* source, std::size_t count, std::size_t bytes) {
  std::vector<std::size_t> places(count);
  std::iota(places.begin(), places.end(), std::size_t{0});
  std::ranges::shuffle(places, std::minstd_rand(7));
  Batch batch;
  for (std::size_t i = 0; i < count; ++i) {
    batch.add(target + 2 * places[i] * bytes, source + 2 * i * bytes, bytes);
  }
  return batch;
}

void apply(const Batch& batch, const std::byte* base, Bytes& target) {
  for (std::size_t i = 0; i < batch.sizes.size(); ++i) {
    std::copy_n(batch.sources[i], batch.sizes[i], target.begin() + (batch.targets[i] - base));
  }
}

TEST_P(DeviceContract, AScatteredBatchArrivesOnTheDeviceByteForByte) {
  const std::size_t count = std::min<std::size_t>(10'000, device().info().max_descriptors);
  constexpr std::size_t bytes = 333;
  const StreamHandle stream = new_stream();
  const auto source = host_memory(2 * count * bytes, 5);
  std::byte* const memory = device_memory(source.size());
  Bytes expected = pattern(source.size(), 6);
  write_device(memory, expected);
  const Batch batch = scattered(memory, source.data(), count, bytes);
  apply(batch, memory, expected);
  copy(batch, Direction::to_device, stream);
  settle_stream(stream);
  EXPECT_TRUE(same(read_device(memory, source.size()), expected));
}

TEST_P(DeviceContract, AScatteredBatchArrivesOnTheHostByteForByte) {
  const std::size_t count = std::min<std::size_t>(10'000, device().info().max_descriptors);
  constexpr std::size_t bytes = 333;
  const StreamHandle stream = new_stream();
  const auto target = host_memory(2 * count * bytes, 5);
  std::byte* const memory = device_memory(target.size());
  const Bytes content = pattern(target.size(), 6);
  write_device(memory, content);
  Bytes expected = bytes_of(target);
  apply(scattered(target.data(), content.data(), count, bytes), target.data(), expected);
  copy(scattered(target.data(), memory, count, bytes), Direction::to_host, stream);
  settle_stream(stream);
  EXPECT_TRUE(same(target, expected));
}

TEST_P(DeviceContract, ABatchMayMixLargeAndSmallSegments) {
  const StreamHandle stream = new_stream();
  const auto source = host_memory(std::size_t{8} << 20, 8);
  std::byte* const memory = device_memory(source.size());
  Batch batch;
  std::minstd_rand random(9);
  for (std::size_t at = 0; at < source.size();) {
    const std::size_t wanted = random() % 4 == 0 ? random() % 3'000'000 : random() % 5'000;
    const std::size_t bytes = std::min(wanted + 1, source.size() - at);
    batch.add(memory + at, source.data() + at, bytes);
    at += bytes;
  }
  copy(std::move(batch), Direction::to_device, stream);
  settle_stream(stream);
  EXPECT_TRUE(same(read_device(memory, source.size()), source));
}

TEST_P(DeviceContract, AnEmptyBatchIsNothing) {
  const StreamHandle stream = new_stream();
  device().copy(CopyDescriptors{}, Direction::to_host, SourceAccess::stream_order, stream);
  settle_stream(stream);
}

TEST_P(DeviceContract, ABatchWithANullOrAnEmptySegmentIsRefusedWhole) {
  const StreamHandle stream = new_stream();
  const auto source = host_memory(100, 1);
  std::byte* const memory = device_memory(100);
  const Bytes before = pattern(100, 2);
  write_device(memory, before);
  Batch no_target, no_source, no_bytes;
  for (Batch* batch : {&no_target, &no_source, &no_bytes}) batch->add(memory, source.data(), 50);
  no_target.add(nullptr, source.data(), 50);
  no_source.add(memory + 50, nullptr, 50);
  no_bytes.add(memory + 50, source.data() + 50, 0);
  for (const Batch& batch : {no_target, no_source, no_bytes}) {
    EXPECT_THROW(copy(batch, Direction::to_device, stream), InvalidArgument);
  }
  const CopyDescriptors no_arrays{nullptr, nullptr, nullptr, 1};
  EXPECT_THROW(device().copy(no_arrays, Direction::to_device, SourceAccess::stream_order, stream),
               InvalidArgument);
  settle_stream(stream);
  EXPECT_EQ(read_device(memory, 100), before);
}

TEST_P(DeviceContract, CopiesOfOneStreamKeepTheirOrder) {
  const StreamHandle stream = new_stream();
  const auto first = host_memory(3'000'000, 1), second = host_memory(3'000'000, 2);
  const auto target = host_memory(first.size());
  std::byte* const memory = device_memory(first.size());
  for (int round = 0; round < 3; ++round) {
    to_device(memory, first, stream);
    to_device(memory, second, stream);
    to_host(target, memory, stream);
    to_device(memory, first, stream);
  }
  settle_stream(stream);
  EXPECT_TRUE(same(target, second));
  EXPECT_TRUE(same(read_device(memory, first.size()), first));
}

TEST_P(DeviceContract, ACopyBehindAStallMovesNothing) {
  const StreamHandle stream = new_stream();
  const auto target = host_memory(5000, 1);
  const Bytes before = bytes_of(target);
  std::byte* const memory = device_memory(5000);
  write_device(memory, pattern(5000, 2));
  stall(stream);
  to_host(target, memory, stream);
  const EventHandle event = record_now(stream);
  let_others_work();
  EXPECT_EQ(query(event), pending);
  EXPECT_EQ(bytes_of(target), before);
  unstall(stream);
  settle(event);
  EXPECT_EQ(bytes_of(target), pattern(5000, 2));
}

TEST_P(DeviceContract, ASourceIsNotReadBeforeItsStreamReachesTheCopy) {
  const StreamHandle stream = new_stream();
  const auto source = host_memory(5000, 1);
  std::byte* const memory = device_memory(5000);
  stall(stream);
  to_device(memory, source, stream);
  let_others_work();
  std::ranges::copy(pattern(5000, 2), source.begin());
  unstall(stream);
  settle_stream(stream);
  EXPECT_EQ(read_device(memory, 5000), pattern(5000, 2));
}

TEST_P(DeviceContract, ASourceThatMayBeReadAtAnyTimeIsCopiedToo) {
  const StreamHandle stream = new_stream();
  const auto source = host_memory(70'000, 3);
  std::byte* const memory = device_memory(source.size());
  Batch batch;
  batch.add(memory, source.data(), source.size());
  device().copy(batch.descriptors(), Direction::to_device, SourceAccess::any, stream);
  settle_stream(stream);
  EXPECT_EQ(read_device(memory, source.size()), bytes_of(source));
}

TEST_P(DeviceContract, CopiesOfTwoStreamsEndOutOfOrderWhenTheFirstIsStalled) {
  const StreamHandle first = new_stream(), second = new_stream();
  const auto source = host_memory(5000, 1);
  std::byte* const memory = device_memory(10'000);
  stall(first);
  to_device(memory, source, first);
  const EventHandle first_end = record_now(first);
  to_device(memory + 5000, source, second);
  settle_stream(second);
  EXPECT_EQ(query(first_end), pending);
  EXPECT_EQ(read_device(memory + 5000, 5000), bytes_of(source));
  unstall(first);
  settle(first_end);
  EXPECT_EQ(read_device(memory, 5000), bytes_of(source));
}

TEST_P(DeviceContract, AWaitOrdersTheCopiesOfTwoStreams) {
  const StreamHandle writer = new_stream(), reader = new_stream();
  std::byte* const memory = device_memory(2'000'000);
  for (unsigned round = 0; round < 10; ++round) {
    const auto source = host_memory(2'000'000, round), target = host_memory(2'000'000, 100);
    to_device(memory, source, writer);
    device().wait(reader, record_now(writer));
    to_host(target, memory, reader);
    const EventHandle read = record_now(reader);
    device().wait(writer, read);  // and the next write comes after this read
    if (round % 2 == 0) continue;
    settle(read);
    ASSERT_TRUE(same(target, source)) << "round " << round;
  }
}

TEST_P(DeviceContract, BothDirectionsMayBeBusyAtOnce) {
  const StreamHandle up = new_stream(), down = new_stream();
  const auto source = host_memory(4'000'000, 1), target = host_memory(4'000'000);
  std::byte* const memory = device_memory(8'000'000);
  write_device(memory + 4'000'000, pattern(4'000'000, 2));
  to_device(memory, source, up);
  to_host(target, memory + 4'000'000, down);
  const EventHandle up_end = record_now(up), down_end = record_now(down);
  settle(down_end);
  settle(up_end);
  EXPECT_EQ(query(down_end), done);
  EXPECT_TRUE(same(target, pattern(4'000'000, 2)));
  EXPECT_TRUE(same(read_device(memory, 4'000'000), source));
}

TEST_P(DeviceContract, ATargetIsNotWrittenBeforeItsStreamReachesTheCopy) {
  for (const SourceAccess access : {SourceAccess::stream_order, SourceAccess::any}) {
    const StreamHandle stream = new_stream();
    const auto source = host_memory(100'000, 1), target = host_memory(source.size());
    std::byte* const memory = device_memory(source.size());
    const Bytes before = pattern(source.size(), 2);
    write_device(memory, before);
    stall(stream);
    copy_from(memory, source, access, stream);
    EXPECT_TRUE(read_device(memory, source.size()) == before);
    unstall(stream);
    settle_stream(stream);
    EXPECT_TRUE(same(read_device(memory, source.size()), source));
  }
}

TEST_P(DeviceContract, ABatchOfMoreThanTheDeviceTakesIsRefusedWhole) {
  const StreamHandle stream = new_stream();
  const std::size_t count = device().info().max_descriptors + 1;
  const auto source = host_memory(1, 1);
  std::byte* const memory = device_memory(count);
  write_device(memory, Bytes(count, std::byte{7}));
  Batch batch;
  for (std::size_t i = 0; i < count; ++i) batch.add(memory + i, source.data(), 1);
  EXPECT_THROW(copy(std::move(batch), Direction::to_device, stream), InvalidArgument);
  settle_stream(stream);
  EXPECT_TRUE(read_device(memory, count) == Bytes(count, std::byte{7}));
}

TEST_P(DeviceContract, TheArraysOfABatchMayGoOnceItsEventWasSeenDone) {
  const StreamHandle stream = new_stream();
  const auto source = host_memory(1000, 1);
  std::byte* const memory = device_memory(source.size());
  for (int i = 0; i < 3; ++i) {
    auto batch = std::make_unique<Batch>();
    batch->add(memory, source.data(), source.size());
    device().copy(batch->descriptors(), Direction::to_device, SourceAccess::any, stream);
    settle_stream(stream);
    batch.reset();  // a sanitizer sees who reads them later
  }
  EXPECT_EQ(read_device(memory, source.size()), bytes_of(source));
}

}  // namespace
}  // namespace kvmem::contract
