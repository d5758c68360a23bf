// A file system in memory that refuses, cuts short, stalls, and loses what was not made durable.
#pragma once

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "tier/file_system.hpp"

namespace kvmem::test {

class MemoryFiles final : public FileSystem, public std::enable_shared_from_this<MemoryFiles> {
 public:
  static constexpr std::size_t page = 4096;

  struct Call {
    const char* what;  // read, write, sync, reserve, direct, bytes, open, look, make_folder
    const std::string& path;
    std::uint64_t at = 0;
    std::uint64_t bytes = 0;
  };
  // Asked before each call, under no lock: nothing, an error (negative), or, of a read or write, at
  // how many bytes it ends.
  using Plan = std::function<std::optional<std::int64_t>(const Call&)>;
  void set_plan(Plan plan) {
    const std::lock_guard lock(mutex_);
    plan_ = std::move(plan);
  }
  std::uint64_t space_bytes = std::uint64_t{1} << 30;  // of the whole, before anything is opened

  [[nodiscard]] std::vector<std::byte>& contents(const std::string& path) {
    return files_.at(path)->bytes;
  }
  [[nodiscard]] bool has(const std::string& path) const { return files_.contains(path); }
  void vanish(const std::string& path) {  // a file, or a folder with all that is in it
    const std::lock_guard lock(mutex_);
    std::erase_if(files_, [&](const auto& f) {
      const bool goes = f.first.starts_with(path);
      if (goes) unlinked_.push_back(f.second);
      return goes;
    });
    std::erase(folders_, path);
  }

  // --- power cuts: each page written is a step; what was synced before is safe
  // --------------------
  [[nodiscard]] std::size_t steps() const { return journal_.size(); }
  // As a restart finds it when the power fails behind so many steps: of the pages that were not
  // safe by then, each is there or not, in any order. One in `of` is lost.
  [[nodiscard]] std::shared_ptr<MemoryFiles> after_power_cut(std::size_t steps, unsigned seed,
                                                             unsigned of) const {
    std::mt19937 random(seed);
    auto after = std::make_shared<MemoryFiles>();
    after->folders_ = folders_;
    std::map<const Inode*, std::shared_ptr<Inode>> copies;
    for (const auto& [path, inode] : files_) {
      after->files_[path] = copies[inode.get()] = std::make_shared<Inode>();
      copies[inode.get()]->bytes.resize(inode->bytes.size());
    }
    std::map<const Inode*, std::size_t> safe;
    for (std::size_t i = 0; i < steps; ++i)
      if (journal_[i].bytes.empty()) safe[journal_[i].inode] = i;
    std::vector<std::size_t> unsafe;
    for (std::size_t i = 0; i < steps; ++i) {
      const auto found = safe.find(journal_[i].inode);
      if (found != safe.end() && i <= found->second) {
        apply(journal_[i], copies);
      } else if (random() % of != 0) {
        unsafe.push_back(i);
      }
    }
    // By a few places, or as far as it goes.
    const std::size_t most_places = seed % 2 == 0 ? 6 : steps + 1;
    std::vector<std::pair<std::size_t, std::size_t>> order;
    for (const std::size_t i : unsafe) order.emplace_back(i + random() % most_places, i);
    std::sort(order.begin(), order.end());
    for (const auto& [place, i] : order) apply(journal_[i], copies);
    return after;
  }

  // --- FileSystem
  // ---------------------------------------------------------------------------------
  Opened open(const std::string& path) override {
    if (const auto answer = ask({"open", path})) return {nullptr, static_cast<int>(-*answer)};
    const std::lock_guard lock(mutex_);
    if (!has_folder(path.substr(0, path.rfind('/')))) return {nullptr, ENOENT};
    std::shared_ptr<Inode>& inode = files_[path];
    if (!inode) inode = std::make_shared<Inode>();
    return {std::make_unique<File>(shared_from_this(), inode, path), 0};
  }
  Folder look(const std::string& path) override {
    Folder folder;
    if (const auto answer = ask({"look", path})) folder.error = static_cast<int>(-*answer);
    const std::lock_guard lock(mutex_);
    if (!has_folder(path)) folder.error = ENOENT;
    for (const auto& [name, inode] : files_)
      if (name.starts_with(path + "/")) folder.names.push_back(name.substr(path.size() + 1));
    return folder;
  }
  int make_folder(const std::string& path) override {
    if (const auto answer = ask({"make_folder", path})) return static_cast<int>(-*answer);
    const std::lock_guard lock(mutex_);
    if (!has_folder(path)) folders_.push_back(path);
    return 0;
  }
  int rename(const std::string& from, const std::string& to) override {
    const std::lock_guard lock(mutex_);
    files_[to] = files_.at(from);
    files_.erase(from);
    return 0;
  }
  int remove(const std::string& path) override {
    const std::lock_guard lock(mutex_);
    return files_.erase(path) == 1 ? 0 : ENOENT;
  }
  int sync_folder(const std::string&) override { return 0; }
  std::string mount_point(const std::string&) override { return "/"; }
  std::uint64_t free_bytes(const std::string&) override {
    const std::lock_guard lock(mutex_);
    std::uint64_t used = 0;
    for (const auto& [path, inode] : files_) used += inode->bytes.size();
    for (const std::weak_ptr<Inode>& one : unlinked_) {
      const std::shared_ptr<Inode> open = one.lock();
      if (open) used += open->bytes.size();
    }
    return space_bytes - std::min(space_bytes, used);
  }

 private:
  struct Inode {
    std::vector<std::byte> bytes;
    const void* locked_by = nullptr;
  };
  struct Step {
    const Inode* inode;
    std::uint64_t at;
    std::vector<std::byte> bytes;  // none: a sync
  };

  class File final : public DiskFile {
   public:
    File(std::shared_ptr<MemoryFiles> system, std::shared_ptr<Inode> inode, std::string path)
        : system_(std::move(system)), inode_(std::move(inode)), path_(std::move(path)) {}
    File(const File&) = delete;
    File& operator=(const File&) = delete;
    ~File() override {
      const std::lock_guard lock(system_->mutex_);
      if (inode_->locked_by == this) inode_->locked_by = nullptr;
    }
    std::int64_t read(std::span<const iovec> parts, std::uint64_t at) override {
      return each_part("read", parts, at, [&](std::byte* part, std::uint64_t here, std::size_t n) {
        const std::size_t there =
            here < inode_->bytes.size() ? std::min(n, inode_->bytes.size() - here) : 0;
        std::copy_n(inode_->bytes.begin() + static_cast<std::ptrdiff_t>(here), there, part);
        return there;
      });
    }
    std::int64_t write(std::span<const iovec> parts, std::uint64_t at) override {
      return each_part("write", parts, at, [&](std::byte* part, std::uint64_t here, std::size_t n) {
        if (inode_->bytes.size() < here + n) inode_->bytes.resize(here + n);
        std::copy_n(part, n, inode_->bytes.begin() + static_cast<std::ptrdiff_t>(here));
        for (std::size_t i = 0; i < n; i += page)
          system_->journal_.push_back(
              {inode_.get(), here + i, {part + i, part + std::min(n, i + page)}});
        return n;
      });
    }
    int sync() override {
      if (const auto answer = system_->ask({"sync", path_})) return static_cast<int>(-*answer);
      const std::lock_guard lock(system_->mutex_);
      system_->journal_.push_back({inode_.get(), 0, {}});
      return 0;
    }
    int reserve(std::uint64_t bytes) override {
      if (const auto answer = system_->ask({"reserve", path_})) return static_cast<int>(-*answer);
      const std::lock_guard lock(system_->mutex_);
      if (inode_->bytes.size() < bytes) inode_->bytes.resize(bytes);
      return 0;
    }
    int resize(std::uint64_t bytes) override {
      const std::lock_guard lock(system_->mutex_);
      inode_->bytes.resize(bytes);
      return 0;
    }
    std::int64_t bytes() override {
      if (const auto answer = system_->ask({"bytes", path_})) return *answer;
      const std::lock_guard lock(system_->mutex_);
      return static_cast<std::int64_t>(inode_->bytes.size());
    }
    bool is_unlinked() override {
      const std::lock_guard lock(system_->mutex_);
      return std::ranges::none_of(system_->files_,
                                  [&](const auto& f) { return f.second == inode_; });
    }
    int set_direct(bool direct) override {
      if (!direct) return 0;
      const auto answer = system_->ask({"direct", path_});
      return answer ? static_cast<int>(-*answer) : 0;
    }
    int in_place() override {
      const std::lock_guard lock(system_->mutex_);
      const auto found = system_->files_.find(path_);
      return found != system_->files_.end() && found->second == inode_ ? 0 : ENOENT;
    }
    int lock() override {
      const std::lock_guard lock(system_->mutex_);
      if (inode_->locked_by != nullptr) return EWOULDBLOCK;
      inode_->locked_by = this;
      return 0;
    }

   private:
    template <class Move>
    std::int64_t each_part(const char* what, std::span<const iovec> parts, std::uint64_t at,
                           const Move& move) {
      std::uint64_t most = 0;
      for (const iovec& part : parts) most += part.iov_len;
      if (const auto answer = system_->ask({what, path_, at, most})) {
        if (*answer < 0) return *answer;
        most = static_cast<std::uint64_t>(*answer);
      }
      const std::lock_guard lock(system_->mutex_);
      std::uint64_t done = 0;
      for (const iovec& part : parts) {
        const std::size_t n = std::min<std::size_t>(part.iov_len, most - done);
        const std::size_t moved = move(static_cast<std::byte*>(part.iov_base), at + done, n);
        done += moved;
        if (moved < part.iov_len) break;
      }
      return static_cast<std::int64_t>(done);
    }

    const std::shared_ptr<MemoryFiles> system_;
    const std::shared_ptr<Inode> inode_;
    const std::string path_;
  };

  static void apply(const Step& step, std::map<const Inode*, std::shared_ptr<Inode>>& copies) {
    const auto found = copies.find(step.inode);
    if (found == copies.end() || step.bytes.empty()) return;
    std::vector<std::byte>& bytes = found->second->bytes;
    if (bytes.size() < step.at + step.bytes.size()) bytes.resize(step.at + step.bytes.size());
    std::copy(step.bytes.begin(), step.bytes.end(),
              bytes.begin() + static_cast<std::ptrdiff_t>(step.at));
  }

  [[nodiscard]] std::optional<std::int64_t> ask(const Call& call) {
    Plan plan;
    {
      const std::lock_guard lock(mutex_);
      plan = plan_;
    }
    return plan ? plan(call) : std::nullopt;
  }
  [[nodiscard]] bool has_folder(const std::string& path) const {
    return std::find(folders_.begin(), folders_.end(), path) != folders_.end();
  }

  mutable std::mutex mutex_;
  Plan plan_;
  std::map<std::string, std::shared_ptr<Inode>> files_;
  std::vector<std::weak_ptr<Inode>> unlinked_;  // they have their space while they are open
  std::vector<std::string> folders_;
  std::vector<Step> journal_;
};

}  // namespace kvmem::test
