#include "disk_bench.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <condition_variable>
#include <cstring>
#include <mutex>
#include <numeric>
#include <random>
#include <span>
#include <stdexcept>
#include <thread>

#include "base/types.hpp"

namespace kvmem::bench {

namespace {

constexpr std::size_t huge_page_bytes = std::size_t{2} << 20;

std::uint64_t word_at(std::size_t at) { return at * 0x9E3779B97F4A7C15U; }

DiskOptions options_of(const std::string& folder, std::size_t block_bytes, std::uint32_t blocks,
                       unsigned depth) {
  DiskOptions options;
  options.path = folder + "/tier";
  options.block_bytes = block_bytes;
  options.capacity_bytes = blocks * (round_up(block_bytes, disk_page_bytes) + 2 * disk_page_bytes);
  options.key_bytes = sizeof(std::uint32_t);
  options.workers = static_cast<int>(depth);
  options.keep = false;
  return options;
}

// Calls that have not ended, as many as the tier's queue takes.
class Unfinished {
 public:
  void begin() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return count_ < most; });
    ++count_;
  }
  void end(bool well) {
    const std::lock_guard lock(mutex_);
    --count_;
    all_well_ = all_well_ && well;
    if (count_ == 0 || count_ == most / 2) changed_.notify_one();
  }
  [[nodiscard]] bool wait() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return count_ == 0; });
    return all_well_;
  }

 private:
  static constexpr std::size_t most = 64;  // DiskOptions::max_queued
  std::mutex mutex_;
  std::condition_variable changed_;
  std::size_t count_ = 0;
  bool all_well_ = true;
};

}  // namespace

HugeBuffer::HugeBuffer(std::size_t bytes) : mapped_bytes_(bytes + huge_page_bytes) {
  void* const mapped =
      mmap(nullptr, mapped_bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapped == MAP_FAILED) throw std::runtime_error("no memory for the buffers");
  mapped_ = static_cast<std::byte*>(mapped);
  const auto at = reinterpret_cast<std::uintptr_t>(mapped_);
  data_ = mapped_ + (round_up(at, huge_page_bytes) - at);
  madvise(data_, bytes, MADV_HUGEPAGE);
}

HugeBuffer::~HugeBuffer() { munmap(mapped_, mapped_bytes_); }

DiskBench::DiskBench(const std::string& folder, std::size_t block_bytes, std::uint32_t blocks,
                     unsigned depth)
    : block_bytes_(block_bytes),
      blocks_(blocks),
      depth_(depth),
      buffers_(bytes()),
      tier_(std::make_unique<DiskSlots>(options_of(folder, block_bytes, blocks, depth))),
      generations_(blocks) {
  fill();
  raw_ = open((folder + "/tier/slots-0000.kv").c_str(), O_RDWR | O_CLOEXEC);
  if (raw_ < 0) throw std::runtime_error("the slots are not in one file");
  // Where direct calls are refused, the tier is buffered too.
  if (direct()) static_cast<void>(fcntl(raw_, F_SETFL, fcntl(raw_, F_GETFL) | O_DIRECT));
}

DiskBench::~DiskBench() { close(raw_); }

std::vector<std::uint32_t> DiskBench::next_order() {
  std::vector<std::uint32_t> order(blocks_);
  std::iota(order.begin(), order.end(), 0U);
  std::shuffle(order.begin(), order.end(), std::mt19937(++runs_));
  return order;
}

template <class Submit>
void DiskBench::run_tier(Submit submit) {
  Unfinished calls;
  for (const std::uint32_t block : next_order()) {
    calls.begin();
    std::array<std::byte, sizeof block> key{};
    std::memcpy(key.data(), &block, sizeof block);
    const DiskRecord record{.key = key, .group = 0, .payload_bytes = block_bytes_};
    const DiskSubmit answer = submit(block, record, [this, block, &calls](const DiskResult& ended) {
      generations_[block] = ended.generation;
      calls.end(ended.outcome == DiskOutcome::ok);
    });
    if (answer != DiskSubmit::accepted) calls.end(false);
  }
  if (!calls.wait()) throw std::runtime_error("a call of the tier failed");
}

void DiskBench::tier_write() {
  run_tier([this](std::uint32_t block, const DiskRecord& record, DiskDone done) {
    return tier_->try_write(block, record, buffer(block), std::move(done));
  });
}

void DiskBench::tier_read() {
  run_tier([this](std::uint32_t block, const DiskRecord& record, DiskDone done) {
    return tier_->try_read(block, record, generations_[block], buffer(block), std::move(done));
  });
}

template <class Move>
void DiskBench::run_raw(Move move) {
  const std::vector<std::uint32_t> order = next_order();
  std::atomic<std::size_t> next{0};
  std::atomic<bool> well{true};
  std::vector<std::thread> threads;
  for (unsigned i = 0; i < depth_; ++i) {
    threads.emplace_back([&] {
      for (std::size_t at = 0; (at = next.fetch_add(1)) < order.size();)
        if (!move(order[at])) well = false;
    });
  }
  for (std::thread& thread : threads) thread.join();
  if (!well) throw std::runtime_error("a call of the loop failed");
}

void DiskBench::raw_write() {
  run_raw([this](std::uint32_t block) {
    return pwrite(raw_, buffer(block), block_bytes_, payload_at(block)) ==
           static_cast<ssize_t>(block_bytes_);
  });
}

void DiskBench::raw_read() {
  run_raw([this](std::uint32_t block) {
    return pread(raw_, buffer(block), block_bytes_, payload_at(block)) ==
           static_cast<ssize_t>(block_bytes_);
  });
}

void DiskBench::raw_write_with_headers() {
  HeaderBlock header;  // only read
  run_raw([&](std::uint32_t block) {
    const iovec page{&header, sizeof header};
    const std::array<iovec, 3> parts{page, {buffer(block), block_bytes_}, page};
    const off_t at = payload_at(block) - static_cast<off_t>(sizeof header);
    return pwritev(raw_, parts.data(), 3, at) ==
           static_cast<ssize_t>(block_bytes_ + 2 * sizeof header);
  });
}

void DiskBench::fill() {
  for (std::size_t at = 0; at < bytes(); at += sizeof(std::uint64_t)) {
    const std::uint64_t word = word_at(at);
    std::memcpy(buffers() + at, &word, sizeof word);
  }
}

void DiskBench::clear() { std::memset(buffers(), 0, bytes()); }

bool DiskBench::holds() const {
  for (std::size_t at = 0; at < bytes(); at += sizeof(std::uint64_t)) {
    std::uint64_t word = 0;
    std::memcpy(&word, buffers() + at, sizeof word);
    if (word != word_at(at)) return false;
  }
  return true;
}

}  // namespace kvmem::bench
