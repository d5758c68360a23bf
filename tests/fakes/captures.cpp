// What a capture that is going on does to the calls of everybody.
#include <algorithm>

#include "fakes/state.hpp"

namespace kvmem::fake {

namespace {

constexpr Error capture_invalidated = 901;

// Does it forbid this thread the calls that could harm it?
bool forbids(const Capture& capture, const Thread& thread) {
  if (thread.mode == cuda::capture_relaxed) return false;
  const bool own = capture.thread == std::this_thread::get_id();
  if (own && capture.mode != cuda::capture_relaxed) return true;
  return thread.mode == cuda::capture_global && capture.mode == cuda::capture_global;
}

}  // namespace

Error State::refuse_unsafe(Call call) {
  bool refused = false;
  for (const auto& capture : captures) {
    if (!forbids(*capture, this_thread())) continue;
    capture->invalidated = true;
    refused = true;
  }
  if (!refused) return cuda::success;
  checker.report(Rule::unsafe_capture, facts_of(call).name, " while a stream captures");
  return cuda::stream_capture_unsupported;
}

// CUDA does not say what becomes of the capture: here it is what becomes of it by any unsafe call,
// and in relaxed mode it lives on.
void State::note_look_at_captured(Call call, Capture& capture) {
  const bool goes_on =
      std::ranges::any_of(captures, [&](const auto& other) { return other.get() == &capture; });
  if (!goes_on || this_thread().mode == cuda::capture_relaxed) return;
  capture.invalidated = true;
  checker.report(Rule::unsafe_capture, facts_of(call).name, " of an event of a capture");
}

Error State::refuse_captured(const StreamEntry& stream, bool& captured) {
  captured = stream.capture != nullptr;
  if (captured) return stream.capture->invalidated ? capture_invalidated : cuda::success;
  const bool is_the_legacy_one = stream.is_default &&
                                 devices[stream.device].default_streams[0] != 0 &&
                                 &streams.at(devices[stream.device].default_streams[0]) == &stream;
  if (!is_the_legacy_one || !legacy_conflict(stream.device)) return cuda::success;
  for (auto& [handle, other] : streams) {
    if (other.blocking && other.capture) other.capture->invalidated = true;
  }
  return cuda::stream_capture_implicit;
}

bool State::legacy_conflict(int device) const {
  return !captures.empty() && std::ranges::any_of(streams, [&](const auto& entry) {
    const StreamEntry& stream = entry.second;
    return stream.device == device && stream.blocking && stream.capture != nullptr;
  });
}

}  // namespace kvmem::fake
