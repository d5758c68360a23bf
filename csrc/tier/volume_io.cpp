#include <array>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <thread>

#include "base/error.hpp"
#include "tier/volume.hpp"

namespace kvmem::detail {

namespace {

bool is_shortage(int error) {
  return error == EAGAIN || error == ENOMEM || error == ENOBUFS || error == EMFILE ||
         error == ENFILE;
}

// Whole pages only, so that what is left stays fit for direct I/O.
std::span<iovec> behind(std::span<iovec> parts, std::size_t bytes) {
  while (!parts.empty() && bytes >= parts.front().iov_len) {
    bytes -= parts.front().iov_len;
    parts = parts.subspan(1);
  }
  if (bytes > 0) {
    parts.front().iov_base = static_cast<std::byte*>(parts.front().iov_base) + bytes;
    parts.front().iov_len -= bytes;
  }
  return parts;
}

}  // namespace

DiskOutcome outcome_of(int error) noexcept {
  if (error == 0) return DiskOutcome::ok;
  if (error == file_ends_early) return DiskOutcome::truncated;
  return is_shortage(error) ? DiskOutcome::shortage : DiskOutcome::io_error;
}

int Volume::move(bool writing, SlotIndex slot, std::uint64_t page, std::span<iovec> parts) {
  DiskFile& file = *files_[slot / geometry_.slots_per_file];
  std::uint64_t at =
      slot % geometry_.slots_per_file * geometry_.slot_bytes + page * disk_page_bytes;
  constexpr int most_tries = 6;
  int tries = 0;
  while (!parts.empty()) {
    const bool was_direct = direct_;
    const std::int64_t done = writing ? file.write(parts, at) : file.read(parts, at);
    if (done < 0) {
      const int error = static_cast<int>(-done);
      if (error == EINTR) continue;
      if (error == EINVAL && was_direct) {
        go_buffered("the file system refused a direct call");
        continue;
      }
      if (error == ENODATA) return EIO;  // the kernel's word for it, of some devices
      if (!is_shortage(error) || ++tries == most_tries) return error;
      std::this_thread::sleep_for(std::chrono::milliseconds(1 << tries));
      continue;
    }
    const std::size_t pages = static_cast<std::size_t>(done) / disk_page_bytes * disk_page_bytes;
    if (pages == 0 && !writing) return file_ends_early;
    if (pages == 0 && ++tries == most_tries) return EIO;
    at += pages;
    parts = behind(parts, pages);
  }
  return 0;
}

int Volume::read(SlotIndex slot, HeaderBlock& header, std::byte* target,
                 std::uint64_t target_bytes) {
  std::array<iovec, 2> parts{{{header.bytes.data(), header.bytes.size()}, {target, target_bytes}}};
  return move(false, slot, 0, parts);
}

int Volume::write(SlotIndex slot, const HeaderBlock& header, const std::byte* source,
                  std::uint64_t source_bytes) {
  // An iovec has no way to say that its bytes are only read.
  const iovec page{const_cast<std::byte*>(header.bytes.data()), header.bytes.size()};
  std::array<iovec, 3> parts{page, {const_cast<std::byte*>(source), source_bytes}, page};
  return move(true, slot, 0, std::span(parts).first(source_bytes > 0 ? 3 : 1));
}

int Volume::read_pages(SlotIndex slot, std::uint64_t page, std::size_t count, HeaderBlock* target) {
  iovec part{target, count * disk_page_bytes};
  return move(false, slot, page, {&part, 1});
}

int Volume::in_place(SlotIndex slot) {
  if (const int error = lock_->in_place()) return error;
  return files_[slot / geometry_.slots_per_file]->in_place();
}

int Volume::sync(SlotIndex slot) { return files_[slot / geometry_.slots_per_file]->sync(); }

int Volume::sync_all() {
  int first_error = 0;
  for (const auto& file : files_) {
    const int error = file->sync();
    if (first_error == 0) first_error = error;
  }
  return first_error;
}

}  // namespace kvmem::detail
