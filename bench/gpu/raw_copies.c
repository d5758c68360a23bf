// What one would write by hand: cudaMemcpyAsync, one call a segment. In C, because a loop in Python
// would be slower than the call.
#include <stddef.h>

typedef int MemcpyAsync(void* target, const void* source, size_t bytes, int kind, void* stream);

struct Copy {
  void* target;
  const void* source;
  size_t bytes;
  void* stream;
  int kind;
};

// The first code that is not 0.
int kvmem_raw_copies(MemcpyAsync* call, const struct Copy* copies, size_t count) {
  for (size_t i = 0; i < count; ++i) {
    const struct Copy* copy = &copies[i];
    const int code = call(copy->target, copy->source, copy->bytes, copy->kind, copy->stream);
    if (code != 0) return code;
  }
  return 0;
}
