// The structures of DLPack: its C ABI, in names of ours. The legacy one is for good as version 0.8
// had it; the versioned one is that of every version 1.x.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvmem::bindings::dlpack {

struct Device {
  std::int32_t type, id;
};
inline constexpr Device cpu{1, 0}, cuda_host{3, 0};  // cuda_host: pinned by CUDA

struct Element {
  std::uint8_t code, bits;
  std::uint16_t lanes;  // of `bits` each
};
inline constexpr Element uint8{1, 8, 1};
inline constexpr std::uint8_t opaque_handle = 3;  // a code

struct Tensor {
  void* data;
  Device device;
  std::int32_t axes;
  Element element;
  std::int64_t* shape;
  std::int64_t* strides;  // in elements; null before version 1.2: dense
  std::uint64_t byte_offset;
};

// Who has one calls its deleter once, on any thread. A capsule has the first name until it is
// consumed, and its consumer gives it the second.
struct Legacy {
  static constexpr const char* fresh = "dltensor";
  static constexpr const char* used = "used_dltensor";
  Tensor tensor;
  void* context;
  void (*deleter)(Legacy*);  // may be null
};

struct Versioned {
  static constexpr const char* fresh = "dltensor_versioned";
  static constexpr const char* used = "used_dltensor_versioned";
  std::uint32_t major_version, minor_version;  // of another major: only the deleter may be used
  void* context;
  void (*deleter)(Versioned*);
  std::uint64_t flags;
  Tensor tensor;
};
inline constexpr std::uint64_t read_only = 1, is_copied = 2;  // flags

static_assert(sizeof(Tensor) == 48 && sizeof(Legacy) == 64 && sizeof(Versioned) == 80);
static_assert(offsetof(Legacy, context) == 48 && offsetof(Legacy, deleter) == 56);
static_assert(offsetof(Versioned, context) == 8 && offsetof(Versioned, deleter) == 16);
static_assert(offsetof(Versioned, flags) == 24 && offsetof(Versioned, tensor) == 32);

}  // namespace kvmem::bindings::dlpack
