/* A CUDA runtime without a GPU: NVIDIA's C ABI in front of kvmem's stream/event model, with a
 * checker for what hardware would corrupt silently or refuse. Built twice, as libcudart.so.12 says
 * 12.9 and as libcudart.so.13 says 13.0; the two differ in what the real ones differ in.
 *
 * These are the controls, for tests in C++ (link or dlsym) and in Python (ctypes). The fake is one
 * for the process: tests that use it do not run side by side in one process. Devices are made by
 * the first call that needs them, from the settings at that time. Any thread.
 *
 * Each device stands on a ModelDevice: one that a test attached, whose clock and faults the test
 * controls; else a virtual device of the fake's own, which runs freely, in real time. A stream that
 * waits for an event of another device goes on only when the fake is asked for an event or a stream
 * once that is reached.
 *
 * Environment, read when the library is loaded: KVMEM_FAKE_DEVICES (1), KVMEM_FAKE_DRIVER (the
 * runtime's own version; 0: no driver), KVMEM_FAKE_COUNT_ERROR (what cudaGetDeviceCount answers),
 * KVMEM_FAKE_STRICT=1 (a violation ends the process with status 97; also for calls after exit).
 */
#pragma once

#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

/* ---- set-up ---- */

/* As after loading: no attached models, no faults, no violations, everything enabled. What was made
 * before must be gone, and is forgotten. */
void kvmem_fake_reset(void);
void kvmem_fake_set_device_count(int count);
/* 0: no driver: then counting devices gives 35. Before 12080: without batches (36), and without the
 * device of a stream. */
void kvmem_fake_set_driver_version(int version);
void kvmem_fake_set_count_error(int error); /* 0: none */
void kvmem_fake_set_attribute(int device, int attribute, int value);
void kvmem_fake_set_pci_bus_id(int device, const char* id);
/* A kvmem::ModelDevice that outlives its use; before the device's first call. Its memory must be
 * pinned for copies or the fake checks that by itself. */
void kvmem_fake_attach(int device, void* model_device);
/* The kvmem::ModelDevice of a device: attached, or the fake's own. */
void* kvmem_fake_model(int device);
/* Memory that a test made by itself and that stands for device memory; and such as is host memory,
 * may be copied though it is not registered (the caller staged it knowingly). */
void kvmem_fake_declare_device_memory(int device, const void* base, size_t bytes);
void kvmem_fake_declare_staged(const void* base, size_t bytes);
void kvmem_fake_forget_memory(const void* base);

/* ---- faults ---- */

/* The nth call from now on (counted from 1) of that function ("cudaEventQuery"; "*": of any), and
 * the `times` - 1 behind it, answer `error`. With `happens` the call has its effect all the same.
 * A sticky error stays: every call behind it answers it. */
void kvmem_fake_fail(const char* function, int nth, int times, int error, int happens);
/* The model was lost by its test, not by a call: from now on every call answers 700. */
void kvmem_fake_lose(int device);
void kvmem_fake_forget_faults(void);
unsigned long long kvmem_fake_calls(const char* function); /* so far; "*": of all */
unsigned long long kvmem_fake_faults(void);                /* planned ones that have come */

/* ---- the checker ---- */

/* The rules by name; each is on after a reset but "other_device", which needs kvmem_fake_allow:
 *   unregistered_host     an asynchronous copy from or to host memory that is not registered
 *   straddles             a copy across two registrations
 *   read_only             a copy into memory registered as read-only
 *   freed_in_flight       host or device memory freed or unregistered under a copy
 *   unmapped_registered   host memory unmapped while it is registered. Copies, cudaHostRegister and
 *                         kvmem_fake_leave look at one registration each, in turn; what is mapped
 *                         anew by then is not seen
 *   foreign_record        an event recorded on a stream of another device
 *   re_record             an event recorded again that was polled and not seen done
 *   wait_unrecorded       a wait on an event never recorded
 *   early_source          a source that may be read at any time, and is still being written
 *   descriptors_changed   the arrays of a batch changed or freed before the batch has ended: seen
 *                         when an event behind it is, else by a look at one batch each 64 calls
 *   legacy_batch          a batch on the legacy default stream
 *   too_many_descriptors  a batch of more than kvmem_fake_set_most_descriptors
 *   last_error            an error of ours left pending, or the caller's cleared or replaced
 *   current_device        the current device, or the capture mode, changed by a call
 *   foreign_context       a context made on a device for which nobody asked: one that is not
 *                         allowed, or device 0, which a thread has that was never told, and that
 *                         then shows by its next call of a device that it means another
 *   other_device          a call on a device that is not allowed
 *   unsafe_capture        an unsafe call, not in relaxed mode, while a stream captures; also a look
 *                         at an event of a capture that is going on
 *   blocking_stream       a stream made that the legacy default stream waits for
 *   after_exit            a call after the exit of the process has begun
 *   unknown_handle        a stream or event that does not exist, or no longer
 */
void kvmem_fake_enable(const char* rule, int enabled);
void kvmem_fake_set_most_descriptors(size_t most);
/* From then on only these devices may be called on (a bit each). */
void kvmem_fake_allow(unsigned long long devices);
/* Around a call of kvmem's on this thread: the second checks last_error and current_device against
 * the first. They nest. */
void kvmem_fake_enter(void);
void kvmem_fake_leave(void);
/* How many violations there are, and the text of one, "rule: what"; null beyond. They stay until
 * forgotten. */
size_t kvmem_fake_violations(void);
const char* kvmem_fake_violation(size_t i);
void kvmem_fake_forget_violations(void);

/* ---- captures ---- */

/* The fake also has cudaStreamBeginCapture and cudaStreamEndCapture, for global and relaxed mode.
 * Whether the last capture of a stream was invalidated: */
int kvmem_fake_capture_invalidated(void* stream);

/* ---- what there is, for leak checks ---- */

size_t kvmem_fake_live_streams(int device);
size_t kvmem_fake_live_events(int device);
size_t kvmem_fake_registered_bytes(void);
size_t kvmem_fake_allocated_bytes(int device);
int kvmem_fake_has_context(int device);

#ifdef __cplusplus
}
#endif
