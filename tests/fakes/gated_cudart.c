/* In front of a CUDA runtime that this library is linked with: calls that a driver may hold up wait
 * here until another thread opens the gate. For tests that nobody holds the GIL across one.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stddef.h>
#include <time.h>

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static int closed, waiting, given_up;

/* From now on calls wait, for at most 20 seconds. */
void kvmem_gate_close(void) {
  pthread_mutex_lock(&mutex);
  closed = 1;
  pthread_mutex_unlock(&mutex);
}

void kvmem_gate_open(void) {
  pthread_mutex_lock(&mutex);
  closed = 0;
  pthread_cond_broadcast(&changed);
  pthread_mutex_unlock(&mutex);
}

int kvmem_gate_waiting(void) { /* now */
  pthread_mutex_lock(&mutex);
  const int now = waiting;
  pthread_mutex_unlock(&mutex);
  return now;
}

int kvmem_gate_given_up(void) { return given_up; } /* for whom nobody came */

static void pass(void) {
  struct timespec until;
  clock_gettime(CLOCK_REALTIME, &until);
  until.tv_sec += 20;
  pthread_mutex_lock(&mutex);
  ++waiting;
  while (closed && pthread_cond_timedwait(&changed, &mutex, &until) == 0) {
  }
  if (closed) ++given_up;
  --waiting;
  pthread_mutex_unlock(&mutex);
}

#define GATED(name, parameters, arguments)    \
  int name parameters {                       \
    int(*next) parameters;                    \
    *(void**)&next = dlsym(RTLD_NEXT, #name); \
    pass();                                   \
    return next arguments;                    \
  }

GATED(cudaMalloc, (void** base, size_t bytes), (base, bytes))
GATED(cudaFree, (void* base), (base))
GATED(cudaStreamCreateWithFlags, (void** stream, unsigned flags), (stream, flags))
GATED(cudaStreamDestroy, (void* stream), (stream))
GATED(cudaStreamWaitEvent, (void* stream, void* event, unsigned flags), (stream, event, flags))
GATED(cudaEventRecord, (void* event, void* stream), (event, stream))
GATED(cudaEventQuery, (void* event), (event))
