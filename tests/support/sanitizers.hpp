// What the tests must know of the sanitizer that they run under.
#pragma once

namespace kvmem::test {

#ifdef __SANITIZE_THREAD__
inline constexpr bool thread_sanitized = true;  // an address space of about one terabyte is left
#else
inline constexpr bool thread_sanitized = false;
#endif

#ifdef __SANITIZE_ADDRESS__
inline constexpr bool sanitized = true;
#else
inline constexpr bool sanitized = thread_sanitized;
#endif

}  // namespace kvmem::test
