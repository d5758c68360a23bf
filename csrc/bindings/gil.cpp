#include "bindings/gil.hpp"

#include <cxxabi.h>
#include <unistd.h>

#include <atomic>
#include <thread>

#include "base/process.hpp"

namespace kvmem::bindings {

namespace {

std::atomic<std::thread::id> exiting_thread{};  // none before the end

[[noreturn]] void stay() noexcept {
  for (;;) pause();
}

}  // namespace

Unlocked::~Unlocked() {
  const std::thread::id exiting = exiting_thread;
  if (exiting != std::thread::id() && exiting != std::this_thread::get_id()) stay();
  try {
    PyEval_RestoreThread(state_);
  } catch (const abi::__forced_unwind&) {  // the end of this thread; not to go on from here
    stay();
  }
}

Locked::Locked() {
  try {
    state_ = PyGILState_Ensure();
  } catch (const abi::__forced_unwind&) {
    stay();
  }
}

bool has_gil() noexcept { return Py_IsInitialized() != 0 && PyGILState_Check() != 0; }

void note_python_exits() noexcept {
  exiting_thread = std::this_thread::get_id();
  set_process_exiting();
}

}  // namespace kvmem::bindings
