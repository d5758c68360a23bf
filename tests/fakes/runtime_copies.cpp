// The face of the runtime: copies, one by one and in batches.
#include <algorithm>

#include "fakes/copy_checks.hpp"
#include "fakes/state.hpp"

using namespace kvmem::fake;
namespace cuda = kvmem::cuda;

using kvmem::CopyDescriptors;
using kvmem::SourceAccess;

namespace {

constexpr std::size_t no_copy = static_cast<std::size_t>(-1);
constexpr int access_order_during_call = 2;
constexpr Error invalid_direction = 21;

// Whether every copy has an attribute, and of what kind. Copies whose source is read during the
// call are read early by the model, which then reads once more.
bool attributes_hold(const cuda::MemcpyAttributes* attributes, const std::size_t* first,
                     std::size_t count, std::size_t copies, SourceAccess& access) {
  if (attributes == nullptr || first == nullptr || count == 0 || count > copies) return false;
  access = SourceAccess::stream_order;
  for (std::size_t i = 0; i < count; ++i) {
    const int order = attributes[i].source_access_order;
    if (order < cuda::access_order_stream || order > cuda::access_order_any) return false;
    if (first[i] >= copies || (i == 0 ? first[0] != 0 : first[i] <= first[i - 1])) return false;
    if (order >= access_order_during_call) access = SourceAccess::any;
  }
  return true;
}

// With the lock: what a batch must be before anything is copied.
Error check_batch(State& state, Stream stream, const CopyDescriptors& batch, std::size_t& failed) {
  if (is_legacy(stream)) {
    state.checker.report(Rule::legacy_batch, "a batch of ", batch.count,
                         " copies on the legacy default stream");
    return cuda::invalid_value;
  }
  if (batch.count == 0 || !batch.targets || !batch.sources || !batch.sizes)
    return cuda::invalid_value;
  if (batch.count > state.settings.most_descriptors) {
    state.checker.report(Rule::too_many_descriptors, "a batch of ", batch.count,
                         " copies, at most ", state.settings.most_descriptors);
  }
  for (std::size_t i = 0; i < batch.count; ++i) {
    if (batch.targets[i] != nullptr && batch.sources[i] != nullptr && batch.sizes[i] > 0) continue;
    failed = i;
    return cuda::invalid_value;
  }
  return cuda::success;
}

struct Batch {
  CopyDescriptors copies;
  cuda::MemcpyAttributes* attributes;
  std::size_t* first;
  std::size_t attribute_count;
};

Error submit(const Batch& batch, Stream stream, std::size_t& failed) {
  constexpr Call call = Call::cudaMemcpyBatchAsync;
  State& state = State::get();
  const StreamHandle which = state.resolve(stream);
  kvmem::ModelDevice* model = nullptr;
  kvmem::Direction direction{};
  SourceAccess access{};
  int device = 0;
  {
    const State::Lock held = state.lock();
    if (state.settings.driver < first_driver_of_12_8) return cuda::call_requires_newer_driver;
    StreamEntry* const entry = state.find_stream(call, which);
    if (entry == nullptr) return cuda::invalid_resource_handle;
    if (const Error error = check_batch(state, stream, batch.copies, failed);
        error != cuda::success)
      return error;
    if (!attributes_hold(batch.attributes, batch.first, batch.attribute_count, batch.copies.count,
                         access))
      return cuda::invalid_value;
    bool drops = false;
    const Error error = state.refuse_captured(*entry, drops);
    if (error != cuda::success || drops) return error;
    device = entry->device;
    model = &state.model(device);
    state.look_at_registrations();
    CopyChecks checks(state, call, *model);
    if (const Error bad = checks.look_at(batch.copies, access, failed); bad != cuda::success)
      return bad;
    direction = checks.direction();
    state.flights.add(entry->number, entry->batches + 1, batch.copies, *model);
    ++entry->batches;
  }
  model->copy(batch.copies, direction, access, which);
  state.wake(device);
  return cuda::success;
}

// A caller that was told that the submission failed cannot know that nothing of it is in flight.
void keep_in_mind(const CopyDescriptors& copies, Stream stream) noexcept {
  State& state = State::get();
  try {
    const StreamHandle which = state.resolve(stream);
    const State::Lock held = state.lock();
    const auto found = state.streams.find(which);
    if (found == state.streams.end() || copies.count == 0) return;
    StreamEntry& entry = found->second;
    state.flights.add(entry.number, entry.batches + 1, copies, state.model(entry.device));
    ++entry.batches;
  } catch (...) {  // no memory to keep it in
  }
}

Error batch_copies(const Batch& batch, Stream stream, std::size_t* failed) {
  std::size_t which_failed = no_copy;
  bool reached = false;
  const Error error = run(
      Call::cudaMemcpyBatchAsync, State::get().device_of(stream),
      [&] { return submit(batch, stream, which_failed); }, &reached);
  if (error != cuda::success && failed != nullptr) *failed = which_failed;
  const bool taken_nothing = error == cuda::call_requires_newer_driver ||
                             error == cuda::not_supported || error == cuda::insufficient_driver ||
                             is_sticky(error);
  if (error != cuda::success && !reached && !taken_nothing) keep_in_mind(batch.copies, stream);
  return error;
}

}  // namespace

#if KVMEM_FAKE_CUDART < 13000
KVMEM_FAKE_EXPORT Error cudaMemcpyBatchAsync(void** targets, void** sources, std::size_t* sizes,
                                             std::size_t count, cuda::MemcpyAttributes* attributes,
                                             std::size_t* first, std::size_t attribute_count,
                                             std::size_t* failed, Stream stream) {
#else
KVMEM_FAKE_EXPORT Error cudaMemcpyBatchAsync(void* const* targets, const void* const* sources,
                                             const std::size_t* sizes, std::size_t count,
                                             cuda::MemcpyAttributes* attributes, std::size_t* first,
                                             std::size_t attribute_count, Stream stream) {
  std::size_t* const failed = nullptr;
#endif
  const CopyDescriptors copies{reinterpret_cast<std::byte* const*>(targets),
                               reinterpret_cast<const std::byte* const*>(sources), sizes, count};
  return batch_copies({copies, attributes, first, attribute_count}, stream, failed);
}

KVMEM_FAKE_EXPORT Error cudaMemcpyAsync(void* target, const void* source, std::size_t bytes,
                                        cuda::MemcpyKind kind, Stream stream) {
  constexpr Call call = Call::cudaMemcpyAsync;
  return run(call, State::get().device_of(stream), [&] {
    State& state = State::get();
    const StreamHandle which = state.resolve(stream);
    Flights::Single* single = nullptr;
    kvmem::ModelDevice* model = nullptr;
    kvmem::Direction direction{};
    int device = 0;
    {
      const State::Lock held = state.lock();
      const StreamEntry* const entry = state.find_stream(call, which);
      if (entry == nullptr) return cuda::invalid_resource_handle;
      if (kind < 0 || kind > cuda::by_address) return invalid_direction;
      if (bytes == 0) return cuda::success;
      if (target == nullptr || source == nullptr) return cuda::invalid_value;
      bool drops = false;
      const Error error = state.refuse_captured(*entry, drops);
      if (error != cuda::success || drops) return error;
      device = entry->device;
      model = &state.model(device);
      single = &state.flights.add_single(static_cast<std::byte*>(target),
                                         static_cast<const std::byte*>(source), bytes, *model);
      state.look_at_registrations();
      CopyChecks checks(state, call, *model);
      std::size_t failed = 0;
      const Error bad = checks.look_at(single->copy(), SourceAccess::stream_order, failed);
      if (bad != cuda::success) {
        single->queued = true;
        return bad;
      }
      direction = checks.direction(kind);
    }
    // From then on it lives for as long as the copy may touch what it names.
    const auto queued = [&] {
      const State::Lock held = state.lock();
      single->queued = true;
    };
    try {
      model->copy(single->copy(), direction, SourceAccess::stream_order, which);
    } catch (...) {
      queued();
      throw;
    }
    queued();
    state.wake(device);
    return cuda::success;
  });
}
