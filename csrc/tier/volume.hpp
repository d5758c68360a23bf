// The folder of a disk tier, opened: its lock, its superblock, its slot files. Reads and writes
// slots and says what the system said.
//
// A superblock names the geometry and a number drawn when the tier was made. Each slot header
// carries that number, so a new superblock makes every older slot foreign at once and nothing has
// to be wiped. Files get their size before the superblock changes and are never wiped: a crash
// anywhere in between leaves the old tier or the new one.
//
// Any thread. Only open() throws.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "tier/disk_slots.hpp"

namespace kvmem::detail {

// What the kernel has no number for. It may say ENODATA itself, of a sector that cannot be read.
inline constexpr int file_ends_early = -1;

// Of 0, the system's error number or file_ends_early: ok, truncated, shortage, io_error.
[[nodiscard]] DiskOutcome outcome_of(int error) noexcept;

struct DiskGeometry {
  std::uint64_t block_bytes = 0;  // of payload, at most
  std::uint64_t slot_bytes = 0;   // payload and two headers, whole pages
  std::uint64_t slots_per_file = 0;
  std::uint32_t slots = 0;

  [[nodiscard]] static DiskGeometry of(const DiskOptions& options);  // throws as DiskSlots does
  [[nodiscard]] std::size_t files() const noexcept {
    return (slots + slots_per_file - 1) / slots_per_file;
  }
  [[nodiscard]] std::uint64_t bytes_of_file(std::size_t file) const noexcept {
    return std::min<std::uint64_t>(slots_per_file, slots - file * slots_per_file) * slot_bytes;
  }
};

class Volume {
 public:
  // `former`: the same folder's, whose lock is taken over while it is in place. Then a tier of
  // another number, which somebody made there meanwhile, is begun anew: its slots may be taken for
  // those of before. Where space is short, slot files of the former that were deleted give up
  // theirs.
  [[nodiscard]] static std::shared_ptr<Volume> open(const DiskOptions& options,
                                                    const DiskGeometry& geometry,
                                                    const Volume* former = nullptr);

  // 0, the system's error number, or file_ends_early. What a signal cut short goes on, a shortage
  // is tried again for some milliseconds, and where direct I/O is refused it is buffered from then
  // on.
  [[nodiscard]] int read(SlotIndex slot, HeaderBlock& header, std::byte* target,
                         std::uint64_t target_bytes);
  // The header, the payload and the header again. No payload: only the header in front.
  [[nodiscard]] int write(SlotIndex slot, const HeaderBlock& header, const std::byte* source,
                          std::uint64_t source_bytes);
  // From a page of a slot on; others of the same file lie behind it.
  [[nodiscard]] int read_pages(SlotIndex slot, std::uint64_t page, std::size_t count,
                               HeaderBlock* target);

  [[nodiscard]] int in_place(SlotIndex slot);
  [[nodiscard]] int sync(SlotIndex slot);
  [[nodiscard]] int sync_all();

  [[nodiscard]] std::uint64_t tier() const noexcept { return tier_; }
  [[nodiscard]] const DiskGeometry& geometry() const noexcept { return geometry_; }
  [[nodiscard]] const std::string& why_empty() const noexcept { return why_empty_; }
  [[nodiscard]] bool direct() const noexcept { return direct_; }
  [[nodiscard]] std::string why_not_direct() const;

 private:
  struct SlotFile {  // as it was found
    std::uint64_t bytes = 0;
    bool is_new = false;  // it was not there
  };

  Volume(const DiskOptions& options, const DiskGeometry& geometry);
  [[nodiscard]] std::string path(const char* name) const;
  [[nodiscard]] std::vector<std::string> enter_folder();
  void take_lock(const Volume* former);
  // Why the tier must begin empty; nothing if it need not.
  [[nodiscard]] std::string read_superblock(const std::vector<std::string>& names);
  [[nodiscard]] int write_superblock();
  void open_slot_files();
  void make_room(const std::vector<std::string>& names, const Volume* former);
  [[nodiscard]] std::vector<SlotFile> look_at_slot_files(const std::vector<std::string>& names);
  [[nodiscard]] int grow_slot_files(const std::vector<SlotFile>& before);
  void undo(const std::vector<SlotFile>& before);
  void remove_surplus(const std::vector<std::string>& names);
  void go_buffered(const std::string& why);
  [[nodiscard]] int move(bool writing, SlotIndex slot, std::uint64_t page, std::span<iovec> parts);

  const DiskGeometry geometry_;
  const std::string folder_;
  const std::shared_ptr<FileSystem> system_;
  const std::string mount_point_;
  std::uint64_t tier_ = 0;
  std::string why_empty_;
  std::shared_ptr<DiskFile> lock_;
  std::vector<std::unique_ptr<DiskFile>> files_;
  std::atomic<bool> direct_{false};
  mutable std::mutex mutex_;  // over what follows
  std::string why_not_direct_;
};

}  // namespace kvmem::detail
