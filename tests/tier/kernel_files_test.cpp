// What the kernel may answer that no test can bring about: calls that a signal interrupts, and
// folders that cannot be read. And what a tier must not take over from the program around it.
#include <fcntl.h>
#include <pthread.h>
#include <sys/file.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <csignal>
#include <thread>

#include <gtest/gtest.h>

#include "base/error.hpp"
#include "support/child_process.hpp"
#include "tier/disk_world.hpp"

namespace {

std::atomic<int> interruptions{0};  // of the calls below, still to come

long call_or_interrupt(long number, long a, long b = 0, long c = 0, long d = 0) {
  if (interruptions > 0) {
    --interruptions;
    errno = EINTR;
    return -1;
  }
  return syscall(number, a, b, c, d);
}

}  // namespace

// In place of the library's, for this program.
extern "C" {
int fdatasync(int file) { return static_cast<int>(call_or_interrupt(SYS_fdatasync, file)); }
int fsync(int file) { return static_cast<int>(call_or_interrupt(SYS_fsync, file)); }
int ftruncate(int file, off_t bytes) noexcept {
  return static_cast<int>(call_or_interrupt(SYS_ftruncate, file, bytes));
}
int flock(int file, int how) noexcept {
  return static_cast<int>(call_or_interrupt(SYS_flock, file, how));
}
int fallocate(int file, int how, off_t at, off_t bytes) {
  return static_cast<int>(call_or_interrupt(SYS_fallocate, file, how, at, bytes));
}
}

namespace kvmem::test {
namespace {

TEST(KernelFiles, WhatASignalInterruptsGoesOn) {
  const Folder folder;
  const std::shared_ptr<FileSystem> files = kernel_files();
  const FileSystem::Opened opened = files->open(folder.path() + "/file");
  ASSERT_NE(opened.file, nullptr);
  const auto passes = [](const auto& call) {
    interruptions = 3;
    const int error = call();
    return std::pair(error, interruptions.exchange(0));
  };
  const std::pair done(0, 0);
  EXPECT_EQ(passes([&] { return opened.file->lock(); }), done);
  EXPECT_EQ(passes([&] { return opened.file->reserve(10000); }), done);
  EXPECT_EQ(passes([&] { return opened.file->resize(5000); }), done);
  EXPECT_EQ(passes([&] { return opened.file->sync(); }), done);
  EXPECT_EQ(passes([&] { return files->sync_folder(folder.path()); }), done);
  EXPECT_EQ(opened.file->bytes(), 5000);
}

TEST(KernelFiles, AFileIsUnlinkedWhenNoNameIsLeft) {
  const Folder folder;
  const std::shared_ptr<FileSystem> files = kernel_files();
  const FileSystem::Opened opened = files->open(folder.path() + "/file");
  ASSERT_NE(opened.file, nullptr);
  ASSERT_EQ(files->rename(folder.path() + "/file", folder.path() + "/moved"), 0);
  EXPECT_EQ(opened.file->in_place(), ENOENT);
  EXPECT_FALSE(opened.file->is_unlinked());
  ASSERT_EQ(files->remove(folder.path() + "/moved"), 0);
  EXPECT_TRUE(opened.file->is_unlinked());
}

// Taken for an empty one it would make a good tier a new one.
TEST(KernelFiles, AFolderThatCannotBeReadIsNoEmptyOne) {
  const Folder folder;
  World world;
  world.options.path = folder.tier();
  world.options.files = nullptr;
  world.options.workers = 0;
  world.open();
  for (SlotIndex slot = 0; slot < 5; ++slot) ASSERT_EQ(world.put(slot).outcome, DiskOutcome::ok);
  world.tier.reset();
  EXPECT_TRUE(true_in_child([&] {
    constexpr unsigned bytes_of_buffer = 32768;  // the library's, of readdir()
    if (!refuse_call(SYS_getdents64, 2, bytes_of_buffer, EIO)) return false;
    if (kernel_files()->look(folder.tier()).error != EIO) return false;
    try {
      world.open();
    } catch (const Error& error) {
      return std::string(error.what()).find("cannot look into") != std::string::npos;
    }
    return false;
  }));
  EXPECT_EQ(world.open().take_found().size(), 5);
}

TEST(TierInAProgram, ARelativePathDoesNotFollowItsWorkingFolder) {
  const Folder folder;
  std::filesystem::create_directory(folder.path() + "/elsewhere");
  EXPECT_TRUE(true_in_child([&] {
    World world;
    world.options.path = "tier";
    world.options.files = nullptr;
    world.options.workers = 0;
    world.options.file_bytes = 20 * World::slot_bytes;  // one piece, which needs no thread
    if (chdir(folder.path().c_str()) != 0) return false;
    world.open();
    if (chdir((folder.path() + "/elsewhere").c_str()) != 0) return false;
    if (world.put(1).outcome != DiskOutcome::ok) return false;
    std::filesystem::remove_all(folder.tier());
    if (world.put(1).outcome != DiskOutcome::io_error) return false;
    return world.put(1).outcome == DiskOutcome::ok;
  }));
  EXPECT_TRUE(std::filesystem::exists(folder.tier() + "/superblock"));
  EXPECT_FALSE(std::filesystem::exists(folder.path() + "/elsewhere/tier"));
}

bool blocks_signals() {
  sigset_t blocked;
  return pthread_sigmask(SIG_BLOCK, nullptr, &blocked) == 0 && sigismember(&blocked, SIGINT) == 1 &&
         sigismember(&blocked, SIGUSR1) == 1 && sigismember(&blocked, SIGALRM) == 1;
}

TEST(TierInAProgram, ItsThreadsRunNoSignalHandlers) {
  World world;
  world.options.workers = 3;
  const std::thread::id opener = std::this_thread::get_id();
  std::atomic<int> others{0}, open_to_signals{0};
  world.files->set_plan([&](const MemoryFiles::Call& call) -> std::optional<std::int64_t> {
    if (std::string(call.what) != "read" || !call.path.ends_with(".kv")) return std::nullopt;
    if (std::this_thread::get_id() == opener) {  // leaves some of the scan to others
      EXPECT_TRUE(comes_true([&] { return others > 0; }));
      EXPECT_FALSE(blocks_signals());
    } else {
      open_to_signals += !blocks_signals();
      ++others;
    }
    return std::nullopt;
  });
  world.options.progress = [&](std::size_t, std::size_t) { return !blocks_signals(); };
  DiskSlots& tier = world.open();
  EXPECT_GT(others, 0);
  EXPECT_EQ(open_to_signals, 0);
  EXPECT_FALSE(blocks_signals());

  std::atomic<int> blocked{0};
  Ended ended;
  for (SlotIndex slot = 0; slot < 9; ++slot) {
    const DiskKey key = key_of(slot);
    ASSERT_EQ(tier.try_write(slot, record_of(key, World::payload), world.buffer.data(),
                             [&, told = ended.done()](const DiskResult& result) {
                               blocked += blocks_signals();
                               told(result);
                             }),
              DiskSubmit::accepted);
  }
  static_cast<void>(ended.wait_for(9));
  EXPECT_EQ(blocked, 9);
}

}  // namespace
}  // namespace kvmem::test
