// Bodies that run in a forked child, and system calls that a child can have refused.
#pragma once

#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <functional>

namespace kvmem::test {

// Whether `body` returned true in a forked child. The child says on its standard error what went
// wrong there, and leaves without running any destructor.
[[nodiscard]] inline bool true_in_child(const std::function<bool()>& body) {
  const pid_t child = fork();
  if (child == 0) {
    bool answer = false;
    try {
      answer = body();
    } catch (const std::exception& error) {
      std::fprintf(stderr, "the child threw: %s\n", error.what());
    }
    std::_Exit(answer ? 0 : 1);
  }
  int status = -1;
  return child > 0 && waitpid(child, &status, 0) == child && WIFEXITED(status) &&
         WEXITSTATUS(status) == 0;
}

// From now on this process gets `error` from the system call, if the argument has the value. Never
// undone.
inline bool refuse_call(unsigned call, unsigned argument, unsigned value, unsigned error) {
  const auto number = static_cast<unsigned>(offsetof(seccomp_data, nr));
  const auto low_half = static_cast<unsigned>(offsetof(seccomp_data, args)) + argument * 8;
  sock_filter program[] = {
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, number),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, call, 0, 3),
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, low_half),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, value, 0, 1),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | error),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
  };
  const sock_fprog filter{.len = sizeof program / sizeof program[0], .filter = program};
  return prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 &&
         prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter) == 0;
}

}  // namespace kvmem::test
