// A small disk tier and blocks whose bytes follow from their key and generation.
#pragma once

#include <atomic>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "support/wait_for.hpp"
#include "tier/disk_slots.hpp"
#include "tier/memory_files.hpp"

namespace kvmem::test {

inline constexpr std::size_t key_bytes = 16;

[[nodiscard]] inline DiskKey key_of(std::uint64_t number) {
  std::array<std::byte, key_bytes> bytes{};
  std::memcpy(bytes.data(), &number, sizeof number);
  return disk_key(bytes);
}

[[nodiscard]] inline DiskRecord record_of(const DiskKey& key, std::size_t payload_bytes,
                                          std::uint32_t group = 0) {
  return {
      .key = std::span(key.bytes).first(key.size), .group = group, .payload_bytes = payload_bytes};
}

class Buffer {  // page-aligned
 public:
  explicit Buffer(std::size_t bytes) : pages_((bytes + disk_page_bytes - 1) / disk_page_bytes) {}
  [[nodiscard]] std::byte* data() { return pages_.front().bytes.data(); }

  // 8 bytes at a time, from a seed: a multiple of 8 bytes.
  void fill(std::uint64_t key, std::uint64_t generation, std::size_t bytes) {
    for (std::size_t i = 0; i < bytes; i += 8) {
      const std::uint64_t word = word_of(key, generation, i);
      std::memcpy(data() + i, &word, 8);
    }
  }
  [[nodiscard]] bool holds(std::uint64_t key, std::uint64_t generation, std::size_t bytes) {
    for (std::size_t i = 0; i < bytes; i += 8) {
      std::uint64_t word = 0;
      std::memcpy(&word, data() + i, 8);
      if (word != word_of(key, generation, i)) return false;
    }
    return true;
  }

 private:
  static std::uint64_t word_of(std::uint64_t key, std::uint64_t generation, std::size_t at) {
    std::uint64_t x = key * 0x9E3779B97F4A7C15U + generation * 0xBF58476D1CE4E5B9U + at;
    x = (x ^ (x >> 29)) * 0x94D049BB133111EBU;
    return x ^ (x >> 32);
  }
  std::vector<HeaderBlock> pages_;
};

// Completions that a test waits for.
class Ended {
 public:
  [[nodiscard]] DiskDone done() {
    return [state = state_](const DiskResult& result) {
      const std::lock_guard lock(state->mutex);
      state->results.push_back(result);
    };
  }
  [[nodiscard]] std::size_t count() const {
    const std::lock_guard lock(state_->mutex);
    return state_->results.size();
  }
  [[nodiscard]] std::vector<DiskResult> wait_for(std::size_t count) const {
    EXPECT_TRUE(comes_true([&] { return this->count() >= count; }));
    const std::lock_guard lock(state_->mutex);
    return state_->results;
  }

 private:
  struct State {
    std::mutex mutex;
    std::vector<DiskResult> results;
  };
  std::shared_ptr<State> state_ = std::make_shared<State>();
};

[[nodiscard]] inline DiskResult write(DiskSlots& tier, SlotIndex slot, const DiskRecord& record,
                                      const std::byte* source) {
  Ended ended;
  const DiskSubmit answer = tier.try_write(slot, record, source, ended.done());
  EXPECT_EQ(answer, DiskSubmit::accepted);
  return answer == DiskSubmit::accepted ? ended.wait_for(1).at(0)
                                        : DiskResult{DiskOutcome::closed, 0, 0};
}

[[nodiscard]] inline DiskResult read(DiskSlots& tier, SlotIndex slot, const DiskRecord& record,
                                     std::uint64_t generation, std::byte* target) {
  Ended ended;
  const DiskSubmit answer = tier.try_read(slot, record, generation, target, ended.done());
  EXPECT_EQ(answer, DiskSubmit::accepted);
  return answer == DiskSubmit::accepted ? ended.wait_for(1).at(0)
                                        : DiskResult{DiskOutcome::closed, 0, 0};
}

[[nodiscard]] inline std::uint64_t ended(const DiskCounts& counts, DiskOutcome outcome) {
  return counts.ended[static_cast<std::size_t>(outcome)];
}

// Over memory unless a path is given.
struct World {
  static constexpr std::size_t payload = 8192;
  static constexpr std::size_t slot_bytes = payload + 2 * disk_page_bytes;
  std::shared_ptr<MemoryFiles> files = std::make_shared<MemoryFiles>();
  DiskOptions options{.path = "/tier",
                      .block_bytes = payload,
                      .capacity_bytes = 20 * slot_bytes,
                      .workers = 1,
                      .probe_after = std::chrono::nanoseconds(0),
                      .file_bytes = 7 * slot_bytes,
                      .files = files};
  std::optional<DiskSlots> tier;
  Buffer buffer{payload};

  DiskSlots& open() {
    tier.reset();
    return tier.emplace(options);
  }
  // Writes key `slot` there; the bytes are those of generation 0, whatever it will be.
  DiskResult put(SlotIndex slot) {
    buffer.fill(slot, 0, payload);
    return write(*tier, slot, record_of(key_of(slot), payload), buffer.data());
  }
  DiskResult get(SlotIndex slot, std::uint64_t generation) {
    buffer.fill(99, 99, payload);
    const DiskResult result =
        read(*tier, slot, record_of(key_of(slot), payload), generation, buffer.data());
    EXPECT_TRUE(result.outcome != DiskOutcome::ok || buffer.holds(slot, 0, payload));
    return result;
  }
  [[nodiscard]] std::vector<std::byte>& file_of(SlotIndex slot) {
    return files->contents("/tier/slots-000" + std::to_string(slot / 7) + ".kv");
  }
  [[nodiscard]] static std::size_t offset_of(SlotIndex slot) { return slot % 7 * slot_bytes; }
};

class Folder {  // a real one, removed at the end
 public:
  Folder() {
    std::string name = (std::filesystem::temp_directory_path() / "kvmem-tier-XXXXXX").string();
    path_ = mkdtemp(name.data());
  }
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;
  ~Folder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  [[nodiscard]] std::string path() const { return path_; }
  [[nodiscard]] std::string tier() const { return path_ + "/tier"; }

 private:
  std::string path_;
};

}  // namespace kvmem::test
