// Waits of a stream for an event of another device. CUDA has them; but each device here has a model
// of its own, which knows nothing of the others. So the stream waits for a gate of its own model,
// which is opened once the event was reached. That must be seen: by whoever asks for an event or
// a stream.
#include "fakes/state.hpp"

namespace kvmem::fake {

void State::bridge(ModelDevice& from, EventHandle event, ModelDevice& to, StreamHandle stream) {
  if (from.query(event) != EventState::pending) return;
  // The event may be recorded again: what it was recorded for now is what is waited for.
  const StreamHandle helper = from.create_stream();
  from.wait(helper, event);
  const EventHandle reached = from.create_event(false);
  from.record(reached, helper);
  from.destroy_stream(helper);  // what it holds still ends
  const EventHandle gate = to.create_event(false);
  to.record_unsignalled(gate);
  {
    const Lock held = lock();
    bridges.push_back({&from, reached, &to, gate});
  }
  to.wait(stream, gate);
}

void State::look_at_bridges() {
  std::vector<Bridge> mine;
  {
    const Lock held = lock();
    if (bridges.empty()) return;
    mine.swap(bridges);
  }
  std::erase_if(mine, [](const Bridge& bridge) {
    if (bridge.from->query(bridge.reached) == EventState::pending) return false;
    bridge.to->signal(bridge.gate);
    bridge.to->destroy_event(bridge.gate);
    bridge.from->destroy_event(bridge.reached);
    return true;
  });
  const Lock held = lock();
  bridges.insert(bridges.end(), mine.begin(), mine.end());
}

}  // namespace kvmem::fake
