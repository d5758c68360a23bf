// What the disk tier asks of a file system, as one seam: the kernel's calls by default, memory that
// loses, reorders and refuses in tests.
//
// Calls answer as the kernel does, with an error number; they throw for want of memory only, and
// try nothing twice but what a signal interrupted. Any thread; several may read and write one file
// at once.
#pragma once

#include <sys/uio.h>

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace kvmem {

class DiskFile {
 public:
  virtual ~DiskFile() = default;
  // Bytes done, perhaps fewer than asked for, or the negative error number. 0 of a read: the end.
  [[nodiscard]] virtual std::int64_t read(std::span<const iovec> parts, std::uint64_t at) = 0;
  [[nodiscard]] virtual std::int64_t write(std::span<const iovec> parts, std::uint64_t at) = 0;
  // The rest: 0 or the error number.
  [[nodiscard]] virtual int sync() = 0;  // what was written survives a power cut
  [[nodiscard]] virtual int reserve(std::uint64_t bytes) = 0;  // that much space is the file's
  [[nodiscard]] virtual int resize(std::uint64_t bytes) = 0;
  [[nodiscard]] virtual std::int64_t bytes() = 0;  // or the negative error number
  // Its space goes with it: nobody finds it any more, under no name. A file moved away has one.
  [[nodiscard]] virtual bool is_unlinked() = 0;
  [[nodiscard]] virtual int set_direct(bool direct) = 0;  // EINVAL where it is not to be had
  [[nodiscard]] virtual int in_place() = 0;  // ENOENT: its path names nothing, or another file
  [[nodiscard]] virtual int lock() = 0;      // EWOULDBLOCK: somebody has it. Goes with the file
};

class FileSystem {
 public:
  virtual ~FileSystem() = default;

  struct Opened {
    std::unique_ptr<DiskFile> file;  // null: error says why
    int error = 0;
  };
  struct Folder {
    int error = 0;  // ENOENT, ENOTDIR for something else of that name
    bool ours = true;
    std::vector<std::string> names;
  };

  // For reading and writing; made with mode 0600 if missing. Follows no link at its end.
  [[nodiscard]] virtual Opened open(const std::string& path) = 0;
  [[nodiscard]] virtual Folder look(const std::string& path) = 0;
  [[nodiscard]] virtual int make_folder(const std::string& path) = 0;  // 0700, and those above it
  [[nodiscard]] virtual int rename(const std::string& from, const std::string& to) = 0;
  [[nodiscard]] virtual int remove(const std::string& path) = 0;
  [[nodiscard]] virtual int sync_folder(const std::string& path) = 0;
  [[nodiscard]] virtual std::uint64_t free_bytes(const std::string& path) = 0;
  // Where the file system that has the path, or would have it, is mounted; "/" if that is not
  // known.
  [[nodiscard]] virtual std::string mount_point(const std::string& path) = 0;
};

[[nodiscard]] std::shared_ptr<FileSystem> kernel_files();

}  // namespace kvmem
