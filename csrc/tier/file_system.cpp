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

#include "base/signals.hpp"

namespace kvmem {

namespace {

int why(int answer) { return answer == 0 ? 0 : errno; }

// Again for as long as signals interrupt it. Not of close(): the descriptor is gone even so.
template <class Call>
auto uninterrupted(const Call& call) {
  auto answer = call();
  while (answer < 0 && errno == EINTR) answer = call();
  return answer;
}

class KernelFile final : public DiskFile {
 public:
  explicit KernelFile(std::string path) : path_(std::move(path)) {}
  KernelFile(const KernelFile&) = delete;
  KernelFile& operator=(const KernelFile&) = delete;
  ~KernelFile() override {
    if (descriptor_ >= 0) ::close(descriptor_);
  }
  [[nodiscard]] int open() {
    constexpr int flags = O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW;
    descriptor_ = uninterrupted([&] { return ::open(path_.c_str(), flags, 0600); });
    return descriptor_ >= 0 ? 0 : errno;
  }

  std::int64_t read(std::span<const iovec> parts, std::uint64_t at) override {
    const ssize_t done = uninterrupted([&] {
      return preadv(descriptor_, parts.data(), static_cast<int>(parts.size()),
                    static_cast<off_t>(at));
    });
    return done >= 0 ? done : -errno;
  }
  std::int64_t write(std::span<const iovec> parts, std::uint64_t at) override {
    const ssize_t done = uninterrupted([&] {
      return pwritev(descriptor_, parts.data(), static_cast<int>(parts.size()),
                     static_cast<off_t>(at));
    });
    return done >= 0 ? done : -errno;
  }
  int sync() override {
    return why(uninterrupted([&] { return fdatasync(descriptor_); }));
  }

  int reserve(std::uint64_t bytes) override {
    // tmpfs takes back what it has when a signal comes: with a timer it would never end.
    const SignalsBlocked blocked;
    const auto size = static_cast<off_t>(bytes);
    int error = why(uninterrupted([&] { return fallocate(descriptor_, 0, 0, size); }));
    if (error != EOPNOTSUPP) return error;
    // Where the file system has no such call, the library writes zeros.
    do error = posix_fallocate(descriptor_, 0, size);
    while (error == EINTR);
    return error;
  }
  int resize(std::uint64_t bytes) override {
    const auto size = static_cast<off_t>(bytes);
    return why(uninterrupted([&] { return ftruncate(descriptor_, size); }));
  }
  std::int64_t bytes() override {
    struct stat facts{};
    return fstat(descriptor_, &facts) == 0 ? std::int64_t{facts.st_size} : -errno;
  }
  bool is_unlinked() override {
    struct stat facts{};
    return fstat(descriptor_, &facts) == 0 && facts.st_nlink == 0;
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
  int lock() override {
    return why(uninterrupted([&] { return flock(descriptor_, LOCK_EX | LOCK_NB); }));
  }

 private:
  int descriptor_ = -1;
  const std::string path_;
};

class Kernel final : public FileSystem {
 public:
  Opened open(const std::string& path) override {
    auto file = std::make_unique<KernelFile>(path);
    if (const int error = file->open()) return {nullptr, error};
    return {std::move(file), 0};
  }

  Folder look(const std::string& path) override {
    Folder folder;
    struct stat facts{};
    struct Close {
      void operator()(DIR* stream) const { closedir(stream); }
    };
    const bool is_there = stat(path.c_str(), &facts) == 0;
    const std::unique_ptr<DIR, Close> stream(is_there ? opendir(path.c_str()) : nullptr);
    if (stream == nullptr) {
      folder.error = errno;
      return folder;
    }
    folder.ours = facts.st_uid == geteuid();
    for (;;) {
      errno = 0;  // nothing else tells an error from the end
      const dirent* const entry = readdir(stream.get());
      if (entry == nullptr) break;
      const std::string name = entry->d_name;
      if (name != "." && name != "..") folder.names.push_back(name);
    }
    folder.error = errno;
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
    constexpr int flags = O_RDONLY | O_DIRECTORY | O_CLOEXEC;
    const int descriptor = uninterrupted([&] { return ::open(path.c_str(), flags); });
    if (descriptor < 0) return errno;
    const int error = why(uninterrupted([&] { return fsync(descriptor); }));
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
