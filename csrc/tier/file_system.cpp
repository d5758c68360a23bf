#include "tier/file_system.hpp"

#include <dirent.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <filesystem>
#include <system_error>
#include <utility>

namespace kvmem {

namespace {

int why(int answer) { return answer == 0 ? 0 : errno; }

class KernelFile final : public DiskFile {
 public:
  KernelFile(int descriptor, std::string path) : descriptor_(descriptor), path_(std::move(path)) {}
  KernelFile(const KernelFile&) = delete;
  KernelFile& operator=(const KernelFile&) = delete;
  ~KernelFile() override { ::close(descriptor_); }

  std::int64_t read(std::span<const iovec> parts, std::uint64_t at) override {
    const ssize_t done =
        preadv(descriptor_, parts.data(), static_cast<int>(parts.size()), static_cast<off_t>(at));
    return done >= 0 ? done : -errno;
  }
  std::int64_t write(std::span<const iovec> parts, std::uint64_t at) override {
    const ssize_t done =
        pwritev(descriptor_, parts.data(), static_cast<int>(parts.size()), static_cast<off_t>(at));
    return done >= 0 ? done : -errno;
  }
  int sync() override { return why(fdatasync(descriptor_)); }

  int reserve(std::uint64_t bytes) override {
    const auto size = static_cast<off_t>(bytes);
    const int error = why(fallocate(descriptor_, 0, 0, size));
    // Where the file system has no such call, the library writes zeros.
    return error == EOPNOTSUPP ? posix_fallocate(descriptor_, 0, size) : error;
  }
  int resize(std::uint64_t bytes) override {
    return why(ftruncate(descriptor_, static_cast<off_t>(bytes)));
  }
  std::uint64_t bytes() override {
    struct stat facts{};
    return fstat(descriptor_, &facts) == 0 ? static_cast<std::uint64_t>(facts.st_size) : 0;
  }
  int set_direct(bool direct) override {
    const int flags = fcntl(descriptor_, F_GETFL);
    if (flags < 0) return errno;
    return why(fcntl(descriptor_, F_SETFL, direct ? flags | O_DIRECT : flags & ~O_DIRECT));
  }
  int in_place() override {
    struct stat here{}, there{};
    if (fstat(descriptor_, &here) != 0 || stat(path_.c_str(), &there) != 0) return errno;
    return here.st_ino == there.st_ino && here.st_dev == there.st_dev ? 0 : ENOENT;
  }
  int lock() override { return why(flock(descriptor_, LOCK_EX | LOCK_NB)); }

 private:
  const int descriptor_;
  const std::string path_;
};

class Kernel final : public FileSystem {
 public:
  Opened open(const std::string& path) override {
    const int descriptor = ::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
    if (descriptor < 0) return {nullptr, errno};
    return {std::make_unique<KernelFile>(descriptor, path), 0};
  }

  Folder look(const std::string& path) override {
    Folder folder;
    struct stat facts{};
    DIR* const stream = stat(path.c_str(), &facts) == 0 ? opendir(path.c_str()) : nullptr;
    if (stream == nullptr) {
      folder.error = errno;
      return folder;
    }
    folder.ours = facts.st_uid == geteuid();
    while (const dirent* entry = readdir(stream)) {
      const std::string name = entry->d_name;
      if (name != "." && name != "..") folder.names.push_back(name);
    }
    closedir(stream);
    return folder;
  }

  int make_folder(const std::string& path) override {
    for (std::size_t end = path.find('/', 1); end != std::string::npos;
         end = path.find('/', end + 1)) {
      if (mkdir(path.substr(0, end).c_str(), 0700) != 0 && errno != EEXIST && errno != EROFS)
        return errno;
    }
    return mkdir(path.c_str(), 0700) == 0 || errno == EEXIST ? 0 : errno;
  }

  int rename(const std::string& from, const std::string& to) override {
    return why(std::rename(from.c_str(), to.c_str()));
  }
  int remove(const std::string& path) override { return why(unlink(path.c_str())); }

  int sync_folder(const std::string& path) override {
    const int descriptor = ::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (descriptor < 0) return errno;
    const int error = why(fsync(descriptor));
    ::close(descriptor);
    return error;
  }

  std::uint64_t free_bytes(const std::string& path) override {
    struct statvfs facts{};
    if (statvfs(path.c_str(), &facts) != 0) return 0;
    return static_cast<std::uint64_t>(facts.f_bavail) * facts.f_frsize;
  }

  std::string mount_point(const std::string& path) override {
    constexpr std::uint64_t mount_root = 0x2000;  // STATX_ATTR_MOUNT_ROOT, since Linux 5.8
    std::error_code ignored;
    std::filesystem::path place =
        std::filesystem::weakly_canonical(std::filesystem::absolute(path, ignored), ignored);
    for (; place.has_relative_path(); place = place.parent_path()) {
      struct statx facts{};
      if (statx(AT_FDCWD, place.c_str(), 0, 0, &facts) == 0 &&
          (facts.stx_attributes & mount_root) != 0)
        break;
    }
    return place.empty() ? "/" : place.string();
  }
};

}  // namespace

std::shared_ptr<FileSystem> kernel_files() { return std::make_shared<Kernel>(); }

}  // namespace kvmem
