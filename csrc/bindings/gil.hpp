// Letting go of the GIL and taking it back, also while the interpreter ends.
//
// A daemon thread that wants the GIL back then never gets it. Until Python 3.13 the interpreter
// ends such a thread by unwinding its stack, which stops the whole process when it meets a
// destructor. Here the thread stays where it is, as later versions do, and the process takes it
// along.
#pragma once

#include <memory>
#include <optional>
#include <utility>

#include <pybind11/pybind11.h>

namespace kvmem::bindings {

class Unlocked {  // without the GIL for as long as it lives
 public:
  Unlocked() : state_(PyEval_SaveThread()) {}
  Unlocked(const Unlocked&) = delete;
  Unlocked& operator=(const Unlocked&) = delete;
  ~Unlocked();

 private:
  PyThreadState* state_;
};

// Where the calls of a device may wait for a driver. Elsewhere the GIL is kept: handing it over
// costs more than such a call.
class UnlockedIf {
 public:
  explicit UnlockedIf(bool wanted) {
    if (wanted) unlocked_.emplace();
  }

 private:
  std::optional<Unlocked> unlocked_;
};

class Locked {  // with the GIL, from inside an Unlocked
 public:
  Locked();
  Locked(const Locked&) = delete;
  Locked& operator=(const Locked&) = delete;
  ~Locked() { PyGILState_Release(state_); }

 private:
  PyGILState_STATE state_;
};

// Whether there is a GIL, and the calling thread has it.
[[nodiscard]] bool has_gil() noexcept;

// Whether the end of a T may wait for a driver or for a thread.
template <class T>
[[nodiscard]] bool may_wait_at_its_end(const T&) noexcept {
  return true;
}

// A shared_ptr as Python's objects have it: what may wait at its end ends without the GIL. For one
// that is not the last it costs one look. (Where the last but one, of a thread of ours, goes at the
// same moment, the end may come with the GIL after all.)
template <class T>
class Shared {
 public:
  using element_type = T;  // as pybind11 asks for it, of what holds an object

  Shared() = default;
  Shared(std::shared_ptr<T> own) noexcept : own_(std::move(own)) {}  // NOLINT: it is one
  explicit Shared(T* own) : own_(own) {}
  Shared(const Shared&) = default;
  Shared(Shared&&) noexcept = default;
  Shared& operator=(Shared other) noexcept {
    own_.swap(other.own_);
    return *this;
  }
  ~Shared() {
    if (own_.use_count() != 1 || !may_wait_at_its_end(*own_) || !has_gil()) return;
    const Unlocked unlocked;
    own_.reset();
  }

  [[nodiscard]] T* get() const noexcept { return own_.get(); }
  T& operator*() const noexcept { return *own_; }
  T* operator->() const noexcept { return own_.get(); }
  operator const std::shared_ptr<T>&() const noexcept { return own_; }  // NOLINT: likewise

 private:
  std::shared_ptr<T> own_;
};

// The calling thread runs the end of the interpreter. No other thread returns to Python from now
// on: what it waited for was cut short, and nobody should hear of that.
void note_python_exits() noexcept;

}  // namespace kvmem::bindings

PYBIND11_DECLARE_HOLDER_TYPE(T, kvmem::bindings::Shared<T>)
