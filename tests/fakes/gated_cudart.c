/* In front of a CUDA runtime that this library is linked with: calls that a driver may hold up wait
 * at a gate, behind what they do, until another thread opens it. For tests that nobody holds the
 * GIL across one.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stddef.h>
#include <string.h>
#include <time.h>

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static const char* closed; /* to whom; null: it is open */
static char name_of_closed[64];
static int waiting;

/* From now on calls of that function ("cudaEventQuery"; "*": of any below) wait, for at most 20
 * seconds. */
void kvmem_gate_close(const char* function) {
  pthread_mutex_lock(&mutex);
  strncpy(name_of_closed, function, sizeof name_of_closed - 1);
  closed = name_of_closed;
  pthread_mutex_unlock(&mutex);
}

void kvmem_gate_open(void) {
  pthread_mutex_lock(&mutex);
  closed = NULL;
  pthread_cond_broadcast(&changed);
  pthread_mutex_unlock(&mutex);
}

int kvmem_gate_waiting(void) { /* now */
  pthread_mutex_lock(&mutex);
  const int now = waiting;
  pthread_mutex_unlock(&mutex);
  return now;
}

static int is_closed_to(const char* function) {
  return closed != NULL && (strcmp(closed, "*") == 0 || strcmp(closed, function) == 0);
}

static void pass(const char* function) {
  struct timespec until;
  clock_gettime(CLOCK_REALTIME, &until);
  until.tv_sec += 20;
  pthread_mutex_lock(&mutex);
  ++waiting;
  while (is_closed_to(function) && pthread_cond_timedwait(&changed, &mutex, &until) == 0) {
  }
  --waiting;
  pthread_mutex_unlock(&mutex);
}

#define GATED(name, parameters, arguments)    \
  int name parameters {                       \
    int(*next) parameters;                    \
    *(void**)&next = dlsym(RTLD_NEXT, #name); \
    const int result = next arguments;        \
    pass(#name);                              \
    return result;                            \
  }

GATED(cudaMalloc, (void** base, size_t bytes), (base, bytes))
GATED(cudaFree, (void* base), (base))
GATED(cudaStreamCreateWithFlags, (void** stream, unsigned flags), (stream, flags))
GATED(cudaStreamDestroy, (void* stream), (stream))
GATED(cudaStreamWaitEvent, (void* stream, void* event, unsigned flags), (stream, event, flags))
GATED(cudaEventRecord, (void* event, void* stream), (event, stream))
GATED(cudaEventQuery, (void* event), (event))
GATED(cudaEventDestroy, (void* event), (event))
GATED(cudaHostRegister, (void* base, size_t bytes, unsigned flags), (base, bytes, flags))
GATED(cudaGetDeviceCount, (int* count), (count))
GATED(cudaDeviceGetAttribute, (int* value, int attribute, int device), (value, attribute, device))
GATED(cudaMemGetInfo, (size_t* free, size_t* total), (free, total))
