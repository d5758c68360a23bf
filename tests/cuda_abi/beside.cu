// kvmem's declarations and NVIDIA's in one program, in either order: no conflict, and the handles
// are of the same type. Compiled by tests/python/test_cuda_abi.py where nvcc is found.
#ifdef KVMEM_FIRST
#include "device/cuda/cuda_device.hpp"
#endif
#include <cuda_runtime.h>
#include <cuda_runtime_api.h>

#include "device/cuda/cuda_device.hpp"

__global__ void fill(int* target, int value) { target[threadIdx.x] = value; }

int main() {
  cudaStream_t stream = nullptr;
  if (cudaStreamCreateWithFlags(&stream, kvmem::cuda::stream_non_blocking) != kvmem::cuda::success)
    return 1;
  kvmem::cuda::Stream ours = stream;
  kvmem::cuda::EventRecord* const record =
      reinterpret_cast<kvmem::cuda::EventRecord*>(&cudaEventRecord);
  cudaEvent_t event = nullptr;
  cudaEventCreateWithFlags(&event, kvmem::cuda::event_disable_timing);
  fill<<<1, 1, 0, ours>>>(nullptr, 0);
  return record(event, ours) == kvmem::cuda::success ? 0 : 1;
}
