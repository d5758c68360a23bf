// The frame around every call: what is planned, what cannot be, and what the model's errors mean.
#include <new>

#include "fakes/state.hpp"

namespace kvmem::fake {

namespace {

// Of a call that got no further than its first look.
Error refusal(State& state, Call call, int device) {
  const Needs needs = facts_of(call).needs;
  if (needs == Needs::nothing) return cuda::success;
  if (const Error error = state.unusable(); error != cuda::success) return error;
  if (needs != Needs::device) return cuda::success;
  const auto found = state.devices.find(device);
  if (found != state.devices.end() && found->second.lost_by != cuda::success)
    return found->second.lost_by;
  const auto& allowed = state.settings.allowed;
  if (allowed && (*allowed >> device & 1) == 0)
    state.checker.report(Rule::other_device, facts_of(call).name, " on device ", device);
  return cuda::success;
}

// The handles of these were looked up before the model was asked: it does not like something else.
bool takes_values(Call call) {
  return call == Call::cudaMalloc || call == Call::cudaHostAlloc ||
         call == Call::cudaHostRegister || call == Call::cudaMemcpyAsync ||
         call == Call::cudaMemcpyBatchAsync;
}

Error attempt(State& state, Call call, const Work& work) noexcept {
  try {
    return work.run(work.it);
  } catch (const DeviceLost&) {
    return cuda::illegal_address;
  } catch (const CapacityError&) {
    return cuda::memory_allocation;
  } catch (const InvalidArgument& error) {
    if (takes_values(call)) return cuda::invalid_value;
    state.checker.report(Rule::unknown_handle, facts_of(call).name, ": ", error.what());
    return cuda::invalid_resource_handle;
  } catch (const Forked&) {
    return cuda::initialization_error;
  } catch (const std::bad_alloc&) {
    return cuda::memory_allocation;
  } catch (...) {  // CopyFailed, and what a test's own device throws
    return cuda::invalid_value;
  }
}

}  // namespace

void lose(State& state, int device, Error error) {
  const State::Lock held = state.lock();
  FakeDevice& it = state.devices[device];
  if (it.lost_by == cuda::success) it.lost_by = error;
  if (it.model != nullptr) state.flights.forget(*it.model);
}

Error run_call(Call call, int device, const Work& work, bool* reached) noexcept {
  State& state = State::get();
  if (state.exiting) {
    state.checker.report(Rule::after_exit, facts_of(call).name);
    return cuda::cudart_unloading;
  }
  if (state.forked) return cuda::initialization_error;
  std::optional<Faults::Verdict> planned;
  Error error = cuda::success;
  try {
    const State::Lock held = state.lock();
    planned = state.faults.next(call);
    if (facts_of(call).needs == Needs::device) state.flights.look_at_one();
    error = refusal(state, call, device);
    if (error == cuda::success && (!planned || planned->happens)) state.make_context(call, device);
  } catch (...) {
    error = cuda::memory_allocation;
  }
  if (error == cuda::success && (!planned || planned->happens)) {
    if (reached != nullptr) *reached = true;
    error = attempt(state, call, work);
  }
  if (planned) error = planned->error;
  if (error == cuda::success) return error;
  if (is_sticky(error)) lose(state, device, error);
  if (call != Call::cuDevicePrimaryCtxGetState) this_thread().last_error = error;
  return error;
}

}  // namespace kvmem::fake
