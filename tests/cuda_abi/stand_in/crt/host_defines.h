/* NVIDIA's runtime wheels have all headers of the runtime but this one. What its macros mean to a
 * host compiler, so that those headers can be read; where the real one is found, it comes first.
 */
#pragma once

#define CUDARTAPI
#define CUDARTAPI_CDECL
#define __CUDA_INTERNAL_SKIP_CPP_HEADERS__
#define __host__
#define __device__
#define __global__
#define __shared__
#define __constant__
#define __managed__
#define __forceinline__ inline
#define __align__(n) __attribute__((aligned(n)))
#define __builtin_align__(n) __align__(n)
#define __location__(a)
#define __device_builtin__
#define __device_builtin_texture_type__
#define __device_builtin_surface_type__
#define __cudart_builtin__
#define __specialization_static
#define __no_return__ __attribute__((noreturn))
