// Two checks: the caller's fault throws and is always on; our own fault stops the process, in
// checked builds.
#pragma once

#include <cstdio>
#include <cstdlib>

#include "base/error.hpp"

// The message parts are only put together when the condition fails.
#define KVMEM_EXPECTS(condition, ...)                                             \
  do {                                                                            \
    if (!(condition)) throw ::kvmem::InvalidArgument(::kvmem::text(__VA_ARGS__)); \
  } while (false)

#if KVMEM_CHECKED
#define KVMEM_INVARIANT(condition)                                                       \
  do {                                                                                   \
    if (!(condition)) {                                                                  \
      std::fprintf(stderr, "kvmem invariant broken: %s (%s:%d)\n", #condition, __FILE__, \
                   __LINE__);                                                            \
      std::abort();                                                                      \
    }                                                                                    \
  } while (false)
#else
#define KVMEM_INVARIANT(condition) static_cast<void>(sizeof((condition) ? 1 : 0))
#endif
