#include "device/cuda/cuda_copies.hpp"

#include <algorithm>

#include "base/error.hpp"

namespace kvmem::cuda {

namespace {

// Static, because CUDA does not say how long it reads them.
MemcpyAttributes in_stream_order{access_order_stream, {}, {}, 0};
MemcpyAttributes at_any_time{access_order_any, {}, {}, 0};
std::size_t first_copy = 0;  // that the one attribute holds for, and for all behind it

constexpr int first_driver_with_batches = 12080;

int driver_version(const Functions& call) {
  int version = 0;
  return call.driver_get_version(&version) == success ? version : 0;
}

int batch_arguments(const Functions& call) {
  if (call.memcpy_batch_12 != nullptr) return 9;
  return call.memcpy_batch_13 != nullptr ? 8 : 0;
}

}  // namespace

bool is_named(const std::string& release, const std::vector<std::string>& drivers) {
  return std::ranges::any_of(drivers, [&](const std::string& driver) {
    return !driver.empty() && release.starts_with(driver) &&
           (release.size() == driver.size() || release[driver.size()] == '.');
  });
}

Copies::Copies(const Cudart& runtime, const DeviceFacts& facts, const Options& options)
    : arguments_(batch_arguments(runtime.call)), release_(driver_release()), path_(Path::batch) {
  if (!options.batch)
    path_ = Path::switched_off;
  else if (arguments_ == 0)
    path_ = Path::runtime_without;
  else if (!facts.can_use_host_pointer.value_or(false))
    path_ = Path::host_pointers_differ;
  else if (driver_version(runtime.call) < first_driver_with_batches)
    path_ = Path::driver_too_old;
  else if (is_named(release_, options.no_batch_drivers))
    path_ = Path::driver_named;
}

Error Copies::submit(const Functions& call, const CopyDescriptors& batch, Direction direction,
                     SourceAccess access, StreamHandle stream, std::size_t& failed) noexcept {
  failed = no_copy;
  // The legacy default stream takes no batches.
  if (path_.load() == Path::batch && !is_legacy(stream)) {
    const Error error = batched(call, batch, access, stream_of(stream), failed);
    if (error != call_requires_newer_driver && error != not_supported) return error;
    // It has taken nothing, nor will it ever.
    path_ = error == not_supported ? Path::driver_does_not_know : Path::driver_too_old;
    static_cast<void>(call.get_last_error());
  }
  return one_by_one(call, batch, direction, stream_of(stream), failed);
}

Error Copies::batched(const Functions& call, const CopyDescriptors& batch, SourceAccess access,
                      Stream stream, std::size_t& failed) noexcept {
  MemcpyAttributes* const attributes =
      access == SourceAccess::any ? &at_any_time : &in_stream_order;
  if (call.memcpy_batch_13 != nullptr) {
    return call.memcpy_batch_13(reinterpret_cast<void* const*>(batch.targets),
                                reinterpret_cast<const void* const*>(batch.sources), batch.sizes,
                                batch.count, attributes, &first_copy, 1, stream);
  }
  // CUDA 12 does not say const, and means it.
  return call.memcpy_batch_12(reinterpret_cast<void**>(const_cast<std::byte**>(batch.targets)),
                              reinterpret_cast<void**>(const_cast<std::byte**>(batch.sources)),
                              const_cast<std::size_t*>(batch.sizes), batch.count, attributes,
                              &first_copy, 1, &failed, stream);
}

Error Copies::one_by_one(const Functions& call, const CopyDescriptors& batch, Direction direction,
                         Stream stream, std::size_t& failed) noexcept {
  const MemcpyKind kind = direction == Direction::to_host ? device_to_host : host_to_device;
  for (std::size_t i = 0; i < batch.count; ++i) {
    const Error error =
        call.memcpy_async(batch.targets[i], batch.sources[i], batch.sizes[i], kind, stream);
    if (error == success) continue;
    failed = i;
    return error;
  }
  return success;
}

std::string Copies::path() const {
  switch (path_.load()) {
    case Path::batch:
      return text("batch, ", arguments_, " arguments");
    case Path::switched_off:
      return "one by one: batches are switched off";
    case Path::runtime_without:
      return "one by one: the runtime has no batched copy that is known";
    case Path::host_pointers_differ:
      return "one by one: the device cannot use host pointers of registered memory (attribute 91)";
    case Path::driver_named:
      return text("one by one: driver ", release_, " is named in no_batch_drivers");
    case Path::driver_too_old:
      return "one by one: the driver is too old for batches, before CUDA 12.8 (error 36)";
    case Path::driver_does_not_know:
      return "one by one: the driver does not support batches (error 801)";
  }
  return {};
}

}  // namespace kvmem::cuda
