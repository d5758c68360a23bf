// File systems of a test's own, mounted in a child process that nobody else sees them from.
#pragma once

#include <fcntl.h>
#include <linux/loop.h>
#include <sched.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <optional>
#include <string>
#include <utility>

#include <gtest/gtest.h>

namespace kvmem::test {

// Whether this process can mount from now on: in a name space of its own, of users too where it has
// no rights in the one it is in.
[[nodiscard]] inline bool may_mount() {
  const uid_t user = geteuid();
  const gid_t group = getegid();
  if (unshare(CLONE_NEWNS) != 0) {
    if (unshare(CLONE_NEWUSER | CLONE_NEWNS) != 0) return false;
    std::ofstream("/proc/self/setgroups") << "deny";
    std::ofstream("/proc/self/uid_map") << "0 " << user << " 1";
    std::ofstream("/proc/self/gid_map") << "0 " << group << " 1";
  }
  return mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) == 0;
}

// Whether `body` passed in a forked child that may mount; nothing where it may not, or where
// `prepare` says no. What was mounted goes with the child.
[[nodiscard]] inline std::optional<bool> passes_in_child(const std::function<bool()>& prepare,
                                                         const std::function<void()>& body) {
  constexpr int cannot = 77;
  const pid_t child = fork();
  if (child == 0) {
    int answer = cannot;
    if (may_mount() && prepare()) {
      body();
      answer = testing::Test::HasFailure() ? 1 : 0;
    }
    std::fflush(nullptr);
    std::_Exit(answer);
  }
  int status = -1;
  if (child < 0 || waitpid(child, &status, 0) != child || !WIFEXITED(status)) return false;
  if (WEXITSTATUS(status) == cannot) return std::nullopt;
  return WEXITSTATUS(status) == 0;
}

// An image of 32 MiB with ext4, and each time that it is mounted a device of its own.
class ImageFiles {
 public:
  ImageFiles(std::string image, std::string path)
      : image_(std::move(image)), path_(std::move(path)) {}

  [[nodiscard]] bool make() const {
    const std::string command = "PATH=$PATH:/sbin:/usr/sbin mkfs.ext4 -q -O ^has_journal ";
    return std::system((command + image_ + " 32M >/dev/null 2>&1").c_str()) == 0;
  }
  [[nodiscard]] bool mount() {
    const int control = open("/dev/loop-control", O_RDWR | O_CLOEXEC);
    name_ = "loop" + std::to_string(control < 0 ? -1 : ioctl(control, LOOP_CTL_GET_FREE));
    close(control);
    const std::string device = "/dev/" + name_;
    const int loop = open(device.c_str(), O_RDWR | O_CLOEXEC);
    loop_config config{};
    config.fd = static_cast<unsigned>(open(image_.c_str(), O_RDWR | O_CLOEXEC));
    config.info.lo_flags = LO_FLAGS_AUTOCLEAR;
    const bool mounted =
        ioctl(loop, LOOP_CONFIGURE, &config) == 0 &&
        ::mount(device.c_str(), path_.c_str(), "ext4", 0, "errors=remount-ro") == 0;
    close(static_cast<int>(config.fd));
    close(loop);
    return mounted;
  }
  [[nodiscard]] bool unmount() const { return umount2(path_.c_str(), MNT_DETACH) == 0; }
  // What the kernel does when it finds the file system damaged. This one is not: it was synced.
  [[nodiscard]] bool turn_read_only() const {
    const int folder = open(path_.c_str(), O_RDONLY | O_CLOEXEC);
    const bool synced = syncfs(folder) == 0;
    close(folder);
    if (!synced) return false;
    std::ofstream trigger("/sys/fs/ext4/" + name_ + "/trigger_fs_error");
    return static_cast<bool>(trigger << "a test" << std::flush);
  }

 private:
  const std::string image_, path_;
  std::string name_;
};

}  // namespace kvmem::test
