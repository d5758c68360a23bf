#include "copy_bench.hpp"

#include <pthread.h>
#include <sched.h>
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <new>
#include <random>
#include <span>
#include <stdexcept>
#include <thread>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "base/crc32c.hpp"
#include "device/host_copy.hpp"

namespace kvmem::bench {

namespace {

constexpr std::size_t huge_page_bytes = std::size_t{2} << 20;
constexpr Nanoseconds second = 1'000'000'000;

// The calling thread may run on these cores only. Where the machine has too few, anywhere.
// To some of the cores that the caller may run on: the first is number 0.
void pin_to(unsigned first, unsigned end) {
  cpu_set_t allowed, cores;
  CPU_ZERO(&cores);
  if (pthread_getaffinity_np(pthread_self(), sizeof allowed, &allowed) != 0) return;
  unsigned number = 0;
  for (std::size_t core = 0; core < CPU_SETSIZE; ++core) {
    if (!CPU_ISSET(core, &allowed)) continue;
    if (number >= first && number < end) CPU_SET(core, &cores);
    ++number;
  }
  pthread_setaffinity_np(pthread_self(), sizeof cores, &cores);
}

// As in many a library: four lines at a time in order, and a fence behind each segment.
#if defined(__x86_64__)
__attribute__((target("avx512f"))) void stream_avx512(std::byte* target, const std::byte* source,
                                                      std::size_t bytes) {
  for (std::size_t at = 0; at < bytes; at += 256) {
    const __m512i a = _mm512_loadu_si512(source + at), b = _mm512_loadu_si512(source + at + 64);
    const __m512i c = _mm512_loadu_si512(source + at + 128);
    const __m512i d = _mm512_loadu_si512(source + at + 192);
    _mm512_stream_si512(reinterpret_cast<__m512i*>(target + at), a);
    _mm512_stream_si512(reinterpret_cast<__m512i*>(target + at + 64), b);
    _mm512_stream_si512(reinterpret_cast<__m512i*>(target + at + 128), c);
    _mm512_stream_si512(reinterpret_cast<__m512i*>(target + at + 192), d);
  }
}

void stream_sse2(std::byte* target, const std::byte* source, std::size_t bytes) {
  for (std::size_t at = 0; at < bytes; at += 64) {
    const auto* from = reinterpret_cast<const __m128i*>(source + at);
    auto* to = reinterpret_cast<__m128i*>(target + at);
    const __m128i a = _mm_loadu_si128(from), b = _mm_loadu_si128(from + 1);
    const __m128i c = _mm_loadu_si128(from + 2), d = _mm_loadu_si128(from + 3);
    _mm_stream_si128(to, a);
    _mm_stream_si128(to + 1, b);
    _mm_stream_si128(to + 2, c);
    _mm_stream_si128(to + 3, d);
  }
}

void copy_nt(std::byte* target, const std::byte* source, std::size_t bytes) {
  static const auto stream = __builtin_cpu_supports("avx512f") ? stream_avx512 : stream_sse2;
  stream(target, source, bytes);
  _mm_sfence();
}
#else
void copy_nt(std::byte* target, const std::byte* source, std::size_t bytes) {
  std::memcpy(target, source, bytes);
}
#endif

}  // namespace

ScatteredCopy::Arena::Arena(std::size_t size)
    : base(nullptr), bytes(round_up(size, huge_page_bytes)) {
  // One huge page more, so that the first one can begin at its boundary.
  void* const mapped = mmap(nullptr, bytes + huge_page_bytes, PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapped == MAP_FAILED) throw std::bad_alloc();
  auto* const begin = static_cast<std::byte*>(mapped);
  const std::size_t before =
      huge_page_bytes - reinterpret_cast<std::uintptr_t>(begin) % huge_page_bytes;
  base = begin + before;
  munmap(begin, before);
  if (before < huge_page_bytes) munmap(base + bytes, huge_page_bytes - before);
  madvise(base, bytes, MADV_HUGEPAGE);
}

ScatteredCopy::Arena::~Arena() { munmap(base, bytes); }

ScatteredCopy::ScatteredCopy(std::size_t segment_bytes, std::size_t bytes, unsigned threads,
                             unsigned seed)
    : segment_bytes_(segment_bytes), threads_(threads), from_(bytes), to_(bytes) {
  if (segment_bytes == 0 || segment_bytes % 256 != 0) {
    throw std::invalid_argument("segment_bytes must be a multiple of 256");
  }
  if (threads == 0 || bytes / segment_bytes < threads) {
    throw std::invalid_argument("threads must be at least 1 and at most one a segment");
  }
  std::minstd_rand random(seed);
  for (std::size_t at = 0; at < from_.bytes; at += 4) {
    const auto word = static_cast<std::uint32_t>(random());
    std::memcpy(from_.base + at, &word, sizeof word);
  }
  clear_targets();
  const std::size_t count = bytes / segment_bytes;
  for (std::size_t i = 0; i < count; ++i) {
    sources_.push_back(from_.base + i * segment_bytes);
    targets_.push_back(to_.base + i * segment_bytes);
  }
  std::ranges::shuffle(sources_, random);
  std::ranges::shuffle(targets_, random);
  sizes_.assign(count, segment_bytes);
}

ScatteredCopy::~ScatteredCopy() {
  if (device_ == nullptr) return;
  device_->destroy_event(end_);
  device_->destroy_stream(stream_);
}

std::uint32_t ScatteredCopy::on_each_share(
    const std::function<std::uint32_t(const Share&)>& copy) const {
  std::atomic<std::uint32_t> crcs{0};
  std::vector<std::jthread> threads;
  for (unsigned i = 0; i < threads_; ++i) {
    threads.emplace_back([&, i] {
      pin_to(i, i + 1);
      const std::size_t begin = targets_.size() * i / threads_;
      const std::size_t end = targets_.size() * (i + 1) / threads_;
      crcs ^= copy({targets_.data() + begin, sources_.data() + begin, end - begin});
      store_fence();
    });
  }
  threads.clear();  // joins
  return crcs;
}

void ScatteredCopy::copy_with_memcpy() {
  on_each_share([this](const Share& share) {
    for (std::size_t i = 0; i < share.count; ++i) {
      std::memcpy(share.targets[i], share.sources[i], segment_bytes_);
    }
    return 0;
  });
}

void ScatteredCopy::copy_with_nt() {
  on_each_share([this](const Share& share) {
    for (std::size_t i = 0; i < share.count; ++i) {
      copy_nt(share.targets[i], share.sources[i], segment_bytes_);
    }
    return 0;
  });
}

void ScatteredCopy::copy_with_kvmem() {
  on_each_share([this](const Share& share) {
    for (std::size_t i = 0; i < share.count; ++i) {
      const std::byte* const next = i + 1 < share.count ? share.sources[i + 1] : nullptr;
      copy_bytes(share.targets[i], share.sources[i], segment_bytes_, next);
    }
    return 0;
  });
}

std::uint32_t ScatteredCopy::copy_with_crc() {
  return on_each_share([this](const Share& share) {
    std::uint32_t crcs = 0;
    for (std::size_t i = 0; i < share.count; ++i) {
      const std::byte* const next = i + 1 < share.count ? share.sources[i + 1] : nullptr;
      crcs ^= copy_bytes_crc32c(share.targets[i], share.sources[i], segment_bytes_, 0, next);
    }
    return crcs;
  });
}

std::uint32_t ScatteredCopy::memcpy_then_crc() {
  return on_each_share([this](const Share& share) {
    std::uint32_t crcs = 0;
    for (std::size_t i = 0; i < share.count; ++i) {
      std::memcpy(share.targets[i], share.sources[i], segment_bytes_);
      crcs ^= crc32c(0, share.targets[i], segment_bytes_);
    }
    return crcs;
  });
}

std::uint32_t ScatteredCopy::crc_only() {
  return on_each_share([this](const Share& share) {
    std::uint32_t crcs = 0;
    for (std::size_t i = 0; i < share.count; ++i) {
      crcs ^= crc32c(0, share.sources[i], segment_bytes_);
    }
    return crcs;
  });
}

// ---- through the device ----

void ScatteredCopy::copy_with_device() {
  std::jthread([this] {
    if (device_ == nullptr) std::jthread([this] { start_device(); }).join();
    pin_to(0, 1);
    submit_and_help();
  }).join();
}

// Workers inherit the cores of the thread that starts them; the first core is the helper's.
void ScatteredCopy::start_device() {
  HostDeviceOptions options;
  options.workers = threads_ - 1;
  options.no_workers = threads_ == 1;
  if (threads_ > 1) pin_to(1, threads_);
  device_ = make_host_device(options);
  stream_ = device_->create_stream();
  end_ = device_->create_event(false);
}

// One batch: between two of a stream, a helper that finds no piece left sleeps until the last ends.
void ScatteredCopy::submit_and_help() const {
  device_->copy({targets_.data(), sources_.data(), sizes_.data(), targets_.size()},
                Direction::to_host, SourceAccess::stream_order, stream_);
  device_->record(end_, stream_);
  for (;;) {
    const std::uint64_t seen = device_->progress().value();
    if (device_->query(end_) == EventState::done) return;
    device_->sleep(seen, second, true);
  }
}

// ---- is it right? ----

void ScatteredCopy::clear_targets() { std::memset(to_.base, 0, to_.bytes); }

bool ScatteredCopy::all_copied() const {
  for (std::size_t i = 0; i < targets_.size(); ++i) {
    if (std::memcmp(targets_[i], sources_[i], segment_bytes_) != 0) return false;
  }
  return true;
}

}  // namespace kvmem::bench
