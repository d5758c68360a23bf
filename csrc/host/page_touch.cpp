#include "host/page_touch.hpp"

#include <fcntl.h>
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <condition_variable>
#include <cstring>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#include "base/error.hpp"

namespace kvmem {

namespace {

#ifdef MADV_POPULATE_WRITE
constexpr int populate_write = MADV_POPULATE_WRITE;
#else
constexpr int populate_write = 23;  // Linux 5.14; older headers do not have it
#endif

// Calls again what a signal interrupted or the kernel asks to be tried again. Returns 0 or the
// reason.
template <class Call>
int until_settled(Call call) {
  for (;;) {
    const int why = call();
    if (why != EINTR && why != EAGAIN) return why;
  }
}

int reserve(int memfd, std::size_t offset, std::size_t bytes) {
  return until_settled([&] {
    return fallocate(memfd, 0, static_cast<off_t>(offset), static_cast<off_t>(bytes)) == 0 ? 0
                                                                                           : errno;
  });
}

// Populating answers with an error where a store would end in SIGBUS.
int touch(std::byte* base, std::size_t bytes, std::size_t page_bytes) {
  const int why =
      until_settled([&] { return madvise(base, bytes, populate_write) == 0 ? 0 : errno; });
  if (why != EINVAL) return why;
  // An older kernel. Nobody else knows the pages yet, so that a zero may be written over a zero.
  for (std::size_t at = 0; at < bytes; at += page_bytes) {
    *static_cast<volatile std::byte*>(base + at) = std::byte{0};
  }
  return 0;
}

// Chunks are claimed by number; the calling thread sleeps until the sum of what is done moves.
class Toucher {
 public:
  explicit Toucher(const TouchJob& job)
      : job_(job), chunk_bytes_(std::max(touch_chunk_bytes, job.page_bytes)) {}
  Toucher(const Toucher&) = delete;
  Toucher& operator=(const Toucher&) = delete;

  ~Toucher() {
    stop_ = true;
    for (std::thread& thread : threads_) thread.join();
  }

  void run(const TouchProgress& progress) {
    start();
    for (std::size_t reported = 0; reported < job_.bytes;) {
      reported = wait_for_more_than(reported);
      if (progress && !progress(reported, job_.bytes)) {
        throw Cancelled(
            text("mapping was cancelled after ", reported, " of ", job_.bytes, " bytes"));
      }
    }
  }

 private:
  void start() {
    const std::size_t chunks = (job_.bytes + chunk_bytes_ - 1) / chunk_bytes_;
    const unsigned cores = std::clamp(std::thread::hardware_concurrency(), 1U, 8U);
    const std::size_t wanted =
        std::min<std::size_t>(chunks, job_.threads > 0 ? job_.threads : cores);
    threads_.reserve(wanted);
    try {
      while (threads_.size() < wanted) threads_.emplace_back([this] { work(); });
    } catch (const std::system_error& error) {  // fewer threads are slower, none is a failure
      if (threads_.empty())
        throw Error(text("cannot start a thread to touch memory: ", error.what()));
    }
  }

  void work() {
    while (!stop_) {
      const std::size_t at = next_.fetch_add(chunk_bytes_);
      if (at >= job_.bytes) return;
      const std::size_t bytes = std::min(chunk_bytes_, job_.bytes - at);
      int why = job_.memfd >= 0 ? reserve(job_.memfd, at, bytes) : 0;
      const bool reserved = why == 0;
      if (reserved) why = touch(job_.base + at, bytes, job_.page_bytes);
      const std::lock_guard lock(mutex_);
      if (why == 0) {
        done_bytes_ += bytes;
      } else {
        stop_ = true;
        if (failure_ == 0)
          failed_call_ = reserved ? "touching memory" : "reserving space in a memfd";
        failure_ = why;
      }
      moved_.notify_one();
    }
  }

  // One chunk at most, so that progress is called for each.
  std::size_t wait_for_more_than(std::size_t reported) {
    std::unique_lock lock(mutex_);
    moved_.wait(lock, [&] { return done_bytes_ > reported || failure_ != 0; });
    if (failure_ == 0) return std::min(reported + chunk_bytes_, done_bytes_);
    Shortage shortage;
    shortage.bound = text(failed_call_, " (", std::strerror(failure_), ")");
    shortage.wanted = job_.bytes;
    shortage.free = shortage.largest = done_bytes_;
    throw CapacityError("the kernel has no page to give", shortage);
  }

  const TouchJob job_;
  const std::size_t chunk_bytes_;
  std::atomic<std::size_t> next_{0};
  std::atomic<bool> stop_{false};
  std::mutex mutex_;
  std::condition_variable moved_;
  std::size_t done_bytes_ = 0;
  int failure_ = 0;
  const char* failed_call_ = "";
  std::vector<std::thread> threads_;
};

}  // namespace

void touch_pages(const TouchJob& job, const TouchProgress& progress) { Toucher(job).run(progress); }

}  // namespace kvmem
