#include "tier/volume.hpp"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <limits>
#include <random>
#include <string_view>
#include <utility>

#include "base/check.hpp"
#include "base/crc32c.hpp"
#include "base/error.hpp"

namespace kvmem::detail {

namespace {

constexpr std::array<char, 8> superblock_magic = {'K', 'V', 'M', 'T', 'I', 'E', 'R', '\n'};
constexpr std::size_t sum_offset = disk_page_bytes - sizeof(std::uint32_t);

struct Superblock {  // as it lies on disk
  std::array<char, 8> magic = superblock_magic;
  std::uint32_t version = disk_format_version;
  std::uint32_t reserved = 0;
  std::uint64_t tier = 0;
  std::uint64_t block_bytes = 0;
  std::uint64_t slot_bytes = 0;
  std::uint64_t slots_per_file = 0;
};

std::string slot_file(std::size_t number) {
  std::array<char, 40> name{};
  std::snprintf(name.data(), name.size(), "slots-%04zu.kv", number);
  return name.data();
}

std::optional<std::size_t> number_of_slot_file(const std::string& name) {
  std::size_t number = 0;
  if (std::sscanf(name.c_str(), "slots-%zu.kv", &number) != 1) return std::nullopt;
  if (slot_file(number) != name) return std::nullopt;
  return number;
}

bool is_ours(const std::string& name) {
  return name == "lock" || name == "superblock" || name == "superblock.new" ||
         name == "manifests" || name == "lost+found" || number_of_slot_file(name).has_value();
}

// What the caller can mend by another path or other rights is his fault.
[[noreturn]] void refuse(const std::string& what, const std::string& path, int error) {
  const std::string message = text("disk tier: ", what, " ", path, ": ", std::strerror(error));
  switch (error) {
    case ENOTDIR:
    case EEXIST:
    case EISDIR:
    case EACCES:
    case EPERM:
    case EROFS:
    case ELOOP:
    case ENAMETOOLONG:
      throw InvalidArgument(message);
    default:
      throw Error(message);
  }
}

[[noreturn]] void no_space(const std::string& path, std::uint64_t wanted, std::uint64_t free) {
  Shortage shortage;
  shortage.bound = text("bytes in the file system of ", path);
  shortage.wanted = wanted;
  shortage.free = shortage.largest = free;
  throw CapacityError("the disk tier does not fit", shortage);
}

std::uint64_t draw() {
  std::random_device device;
  return (std::uint64_t{device()} << 32 | device()) | 1;  // never 0
}

}  // namespace

DiskGeometry DiskGeometry::of(const DiskOptions& options) {
  KVMEM_EXPECTS(!options.path.empty(), "disk tier: path is empty");
  KVMEM_EXPECTS(options.block_bytes > 0 && options.block_bytes <= std::size_t{1} << 40,
                "disk tier: block_bytes is ", options.block_bytes, "; it must be 1 to 2^40");
  KVMEM_EXPECTS(options.key_bytes > 0 && options.key_bytes <= disk_key_bytes_max,
                "disk tier: key_bytes is ", options.key_bytes, "; it must be 1 to ",
                disk_key_bytes_max);
  KVMEM_EXPECTS(options.workers >= 0 && options.workers <= 256, "disk tier: workers is ",
                options.workers, "; it must be 0 to 256");
  KVMEM_EXPECTS(options.max_queued > 0, "disk tier: max_queued is 0");
  DiskGeometry made;
  made.block_bytes = options.block_bytes;
  made.slot_bytes = 2 * disk_page_bytes + round_up(options.block_bytes, disk_page_bytes);
  made.slots_per_file = std::max<std::uint64_t>(options.file_bytes / made.slot_bytes, 1);
  const std::uint64_t slots = options.capacity_bytes / made.slot_bytes;
  KVMEM_EXPECTS(slots < std::numeric_limits<SlotIndex>::max(), "disk tier: ", slots,
                " slots; at most 2^32 - 2");
  made.slots = static_cast<std::uint32_t>(slots);
  if (slots == 0) {
    Shortage shortage;
    shortage.bound = "bytes of a slot in capacity_bytes";
    shortage.wanted = made.slot_bytes;
    shortage.free = shortage.largest = options.capacity_bytes;
    throw CapacityError("the disk tier has no room for one slot", shortage);
  }
  return made;
}

Volume::Volume(const DiskOptions& options, const DiskGeometry& geometry)
    : geometry_(geometry),
      folder_(options.path),
      system_(options.files ? options.files : kernel_files()),
      mount_point_(system_->mount_point(folder_)) {}

std::shared_ptr<Volume> Volume::open(const DiskOptions& options, const DiskGeometry& geometry,
                                     const Volume* former) {
  const std::shared_ptr<Volume> made(new Volume(options, geometry));
  // Below a mount that is gone lies another file system, which is not ours to fill.
  if (former != nullptr && made->mount_point_.size() < former->mount_point_.size())
    throw Error(text("disk tier: nothing is mounted at ", former->mount_point_, " any more"));
  const std::vector<std::string> names = made->enter_folder();
  made->take_lock(former);
  std::string why = made->read_superblock(names);
  if (why.empty() && !options.keep && former == nullptr) why = "asked for";
  if (why.empty() && former != nullptr && made->tier_ != former->tier_)
    why = "another tier was made there";
  if (!why.empty()) made->tier_ = draw();
  made->why_empty_ = why;
  made->open_slot_files();
  made->make_room(names, former);
  made->remove_surplus(names);
  made->direct_ = true;
  if (!options.direct) {
    made->go_buffered("not asked for");
  } else {
    for (const auto& file : made->files_) {
      if (const int error = file->set_direct(true))
        made->go_buffered(text("the file system refuses it: ", std::strerror(error)));
    }
  }
  return made;
}

std::string Volume::path(const char* name) const { return folder_ + "/" + name; }

std::vector<std::string> Volume::enter_folder() {
  if (const int error = system_->make_folder(folder_)) refuse("cannot make", folder_, error);
  FileSystem::Folder folder = system_->look(folder_);
  if (folder.error == ENOTDIR) throw InvalidArgument(text("disk tier: ", folder_, " is a file"));
  if (folder.error != 0) refuse("cannot look into", folder_, folder.error);
  KVMEM_EXPECTS(folder.ours, "disk tier: ", folder_, " belongs to another user");
  bool made_by_us = false;
  for (const std::string& name : folder.names) made_by_us |= name == "superblock";
  for (const std::string& name : folder.names) {
    KVMEM_EXPECTS(made_by_us || is_ours(name), "disk tier: ", folder_, " holds ", name,
                  " and no superblock of a tier; name a folder of its own");
  }
  return std::move(folder.names);
}

void Volume::take_lock(const Volume* former) {
  if (former != nullptr && former->lock_->in_place() == 0) {
    lock_ = former->lock_;
    return;
  }
  FileSystem::Opened opened = system_->open(path("lock"));
  if (!opened.file) refuse("cannot open", path("lock"), opened.error);
  std::array<char, 32> holder{};
  iovec part{holder.data(), holder.size() - 1};
  if (const int error = opened.file->lock()) {
    if (error != EWOULDBLOCK) refuse("cannot lock", path("lock"), error);
    if (opened.file->read({&part, 1}, 0) <= 0) std::strcpy(holder.data(), "of unknown id");
    throw InvalidArgument(text("disk tier: ", folder_, " is in use by process ", holder.data()));
  }
  const std::string id = std::to_string(getpid());
  std::copy(id.begin(), id.end(), holder.begin());
  part.iov_len = id.size();
  // The id is there for people; that it cannot be written stops nobody.
  if (opened.file->resize(0) == 0) static_cast<void>(opened.file->write({&part, 1}, 0));
  if (const int error = opened.file->in_place()) refuse("cannot keep", path("lock"), error);
  lock_ = std::move(opened.file);
}

std::string Volume::read_superblock(const std::vector<std::string>& names) {
  if (std::find(names.begin(), names.end(), "superblock") == names.end()) return "it is new";
  const FileSystem::Opened opened = system_->open(path("superblock"));
  if (!opened.file) refuse("cannot open", path("superblock"), opened.error);
  HeaderBlock block;
  const iovec part{block.bytes.data(), block.bytes.size()};
  const std::int64_t done = opened.file->read({&part, 1}, 0);
  if (done < 0) refuse("cannot read", path("superblock"), static_cast<int>(-done));
  Superblock found;
  std::memcpy(&found, block.bytes.data(), sizeof found);
  if (done != static_cast<std::int64_t>(block.bytes.size()) || found.magic != superblock_magic)
    return "its superblock is damaged";
  if (found.version != disk_format_version) {
    return text("its format has version ", found.version, ", this is version ",
                disk_format_version);
  }
  std::uint32_t sum = 0;
  std::memcpy(&sum, block.bytes.data() + sum_offset, sizeof sum);
  if (sum != crc32c(0, block.bytes.data(), sum_offset)) return "its superblock is damaged";
  if (found.block_bytes != geometry_.block_bytes || found.slot_bytes != geometry_.slot_bytes ||
      found.slots_per_file != geometry_.slots_per_file) {
    return text("it has blocks of ", found.block_bytes, " bytes and ", found.slots_per_file,
                " slots a file, now ", geometry_.block_bytes, " and ", geometry_.slots_per_file);
  }
  tier_ = found.tier;
  return {};
}

int Volume::write_superblock() {
  Superblock made;
  made.tier = tier_;
  made.block_bytes = geometry_.block_bytes;
  made.slot_bytes = geometry_.slot_bytes;
  made.slots_per_file = geometry_.slots_per_file;
  HeaderBlock block;
  std::memcpy(block.bytes.data(), &made, sizeof made);
  const std::uint32_t sum = crc32c(0, block.bytes.data(), sum_offset);
  std::memcpy(block.bytes.data() + sum_offset, &sum, sizeof sum);

  const std::string fresh = path("superblock.new");
  const FileSystem::Opened opened = system_->open(fresh);
  if (!opened.file) return opened.error;
  const iovec part{block.bytes.data(), block.bytes.size()};
  const std::int64_t done = opened.file->write({&part, 1}, 0);
  int error = done < 0 ? static_cast<int>(-done) : 0;
  if (done >= 0 && done != static_cast<std::int64_t>(block.bytes.size())) error = ENOSPC;
  if (error == 0) error = opened.file->sync();
  if (error == 0) error = system_->rename(fresh, path("superblock"));
  if (error == 0) error = system_->sync_folder(folder_);
  return error;
}

void Volume::open_slot_files() {
  for (std::size_t number = 0; number < geometry_.files(); ++number) {
    const std::string name = path(slot_file(number).c_str());
    FileSystem::Opened opened = system_->open(name);
    if (!opened.file) refuse("cannot open", name, opened.error);
    files_.push_back(std::move(opened.file));
  }
}

// Reserves the space and makes the superblock. All of it or nothing: files that were grown shrink
// again.
void Volume::make_room(const std::vector<std::string>& names, const Volume* former) {
  const bool anew = !why_empty_.empty();
  const std::vector<SlotFile> before = look_at_slot_files(names);
  std::uint64_t wanted = anew ? disk_page_bytes : 0;
  for (std::size_t i = 0; i < files_.size(); ++i)
    wanted += geometry_.bytes_of_file(i) - std::min(geometry_.bytes_of_file(i), before[i].bytes);
  std::uint64_t free = system_->free_bytes(folder_);
  if (wanted > free && former != nullptr) {
    for (const auto& file : former->files_)  // what reads from one is a miss from then on
      if (file->is_unlinked()) static_cast<void>(file->resize(0));
    free = system_->free_bytes(folder_);
  }
  const char* failed = "cannot reserve space in";
  int error = wanted > free ? ENOSPC : grow_slot_files(before);
  if (error == 0 && anew) {
    failed = "cannot write the superblock in";
    error = write_superblock();
  }
  if (error == 0) return;
  undo(before);
  if (error == ENOSPC || error == EDQUOT || error == EFBIG) no_space(folder_, wanted, free);
  refuse(failed, folder_, error);
}

std::vector<Volume::SlotFile> Volume::look_at_slot_files(const std::vector<std::string>& names) {
  std::vector<SlotFile> found;
  for (std::size_t i = 0; i < files_.size(); ++i) {
    const std::string name = slot_file(i);
    const std::int64_t bytes = files_[i]->bytes();
    if (bytes < 0) refuse("cannot look at", path(name.c_str()), static_cast<int>(-bytes));
    const bool is_new = bytes == 0 && std::find(names.begin(), names.end(), name) == names.end();
    found.push_back({static_cast<std::uint64_t>(bytes), is_new});
  }
  return found;
}

int Volume::grow_slot_files(const std::vector<SlotFile>& before) {
  int error = 0;
  for (std::size_t i = 0; i < files_.size() && error == 0; ++i) {
    const std::uint64_t bytes = geometry_.bytes_of_file(i);
    error = files_[i]->reserve(bytes);
    if (error == 0 && before[i].bytes > bytes) error = files_[i]->resize(bytes);
  }
  return error;
}

// As far as it can be: a file system that refuses this, too, is in worse trouble than we can say.
void Volume::undo(const std::vector<SlotFile>& before) {
  static_cast<void>(system_->remove(path("superblock.new")));
  for (std::size_t i = 0; i < files_.size(); ++i) {
    const auto was = static_cast<std::int64_t>(before[i].bytes);
    if (before[i].is_new) {
      static_cast<void>(system_->remove(path(slot_file(i).c_str())));
    } else if (files_[i]->bytes() > was) {
      static_cast<void>(files_[i]->resize(before[i].bytes));
    }
  }
}

void Volume::remove_surplus(const std::vector<std::string>& names) {
  for (const std::string& name : names) {
    const std::optional<std::size_t> number = number_of_slot_file(name);
    if (number && *number >= files_.size()) static_cast<void>(system_->remove(path(name.c_str())));
  }
}

void Volume::go_buffered(const std::string& why) {
  const std::lock_guard lock(mutex_);
  if (!direct_) return;
  for (const auto& file : files_) static_cast<void>(file->set_direct(false));
  why_not_direct_ = why;
  direct_ = false;
}

std::string Volume::why_not_direct() const {
  const std::lock_guard lock(mutex_);
  return why_not_direct_;
}

}  // namespace kvmem::detail
