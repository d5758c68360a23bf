// Letting go of the GIL and taking it back, also while the interpreter ends.
//
// A daemon thread that wants the GIL back then never gets it. Until Python 3.13 the interpreter
// ends such a thread by unwinding its stack, which stops the whole process when it meets a
// destructor. Here the thread stays where it is, as later versions do, and the process takes it
// along.
#pragma once

#include <optional>

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

// The calling thread runs the end of the interpreter. No other thread returns to Python from now
// on: what it waited for was cut short, and nobody should hear of that.
void note_python_exits() noexcept;

}  // namespace kvmem::bindings
