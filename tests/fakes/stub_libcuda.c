/* A libcuda.so.1 that has no device: what NVIDIA's own runtime is given in tests of a set-up that
 * is broken. It initialises as KVMEM_STUB_INIT says (0: success) and supports the CUDA version that
 * KVMEM_STUB_VERSION names (13050 is 13.5). Everything else it does not have.
 */
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#define NOT_FOUND 500 /* CUDA_ERROR_NOT_FOUND */

static int setting(const char* name, int otherwise) {
  const char* const value = getenv(name);
  return value != NULL ? atoi(value) : otherwise;
}

int cuInit(unsigned flags) {
  (void)flags;
  return setting("KVMEM_STUB_INIT", 0);
}

int cuDriverGetVersion(int* version) {
  *version = setting("KVMEM_STUB_VERSION", 13050);
  return 0;
}

int cuDeviceGetCount(int* count) {
  *count = 0;
  return 0;
}

int cuGetExportTable(const void** table, const void* id) {
  (void)table;
  (void)id;
  return NOT_FOUND;
}

int cuGetProcAddress_v2(const char* symbol, void** function, int version, unsigned long long flags,
                        int* status);

int cuGetProcAddress(const char* symbol, void** function, int version, unsigned long long flags) {
  return cuGetProcAddress_v2(symbol, function, version, flags, NULL);
}

int cuGetProcAddress_v2(const char* symbol, void** function, int version, unsigned long long flags,
                        int* status) {
  static const struct {
    const char* name;
    void* function;
  } known[] = {{"cuInit", (void*)cuInit},
               {"cuDriverGetVersion", (void*)cuDriverGetVersion},
               {"cuDeviceGetCount", (void*)cuDeviceGetCount},
               {"cuGetExportTable", (void*)cuGetExportTable},
               {"cuGetProcAddress", (void*)cuGetProcAddress_v2}};
  (void)version;
  (void)flags;
  *function = NULL;
  for (size_t i = 0; i < sizeof known / sizeof *known; ++i) {
    if (strcmp(symbol, known[i].name) == 0) *function = known[i].function;
  }
  if (status != NULL) *status = *function != NULL ? 0 : 1; /* found, or not */
  return *function != NULL ? 0 : NOT_FOUND;
}
