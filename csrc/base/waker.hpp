// How an awaiting task learns that its ticket was served or its transfer ended, without a thread of
// ours in Python.
//
// A WakeList belongs to one event loop: it owns one eventfd that the loop watches. fire() may come
// from any thread and under any lock of ours; the loop then drains the tokens that fired.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "base/process.hpp"

namespace kvmem {

class WakeList {
 public:
  WakeList();  // throws Error when the kernel gives no eventfd
  ~WakeList();
  WakeList(const WakeList&) = delete;
  WakeList& operator=(const WakeList&) = delete;

  [[nodiscard]] int descriptor() const noexcept { return descriptor_; }
  [[nodiscard]] std::vector<std::uint64_t> drain();

 private:
  friend class Waker;
  void reserve();          // room for one more token, so that fire() never allocates
  void forget() noexcept;  // that waker will not fire: its room is another's
  void fire(std::uint64_t token) noexcept;  // one write to a non-blocking descriptor

  ProcessMark mark_;
  std::mutex mutex_;
  std::size_t wakers_ = 0;  // alive or fired and not yet drained; fired_ has room for all of them
  std::vector<std::uint64_t> fired_;
  int descriptor_;
};

class Waker {
 public:
  Waker() = default;
  Waker(std::shared_ptr<WakeList> list, std::uint64_t token)
      : list_(std::move(list)), token_(token) {
    if (list_) list_->reserve();
  }
  Waker(Waker&&) noexcept = default;
  Waker& operator=(Waker&& other) noexcept {
    std::swap(list_, other.list_);
    std::swap(token_, other.token_);
    return *this;
  }
  ~Waker() {
    if (list_) list_->forget();
  }

  [[nodiscard]] bool is(const std::shared_ptr<WakeList>& list, std::uint64_t token) const noexcept {
    return list_ == list && token_ == token;
  }

  void fire() noexcept {  // at most once
    if (const auto list = std::exchange(list_, nullptr)) list->fire(token_);
  }

 private:
  std::shared_ptr<WakeList> list_;
  std::uint64_t token_ = 0;
};

}  // namespace kvmem
