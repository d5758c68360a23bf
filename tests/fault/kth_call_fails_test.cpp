// The k-th device call of each kind fails, and of any kind, alone and with the one behind it, for
// every k of the scenario.
#include <algorithm>
#include <random>
#include <string>

#include "fault/scenario.hpp"

namespace kvmem::test {
namespace {

struct Fault {
  CallKind kind;
  Failure how;
  std::size_t times;
  ScenarioOptions scenario;
};

std::string cuda_name(const std::optional<OverFake>& over) {
  return over ? text("OnCuda", over->major, over->batch ? "" : "OneByOne") : "";
}

std::string name_of(const Fault& fault) {  // in the order of the enumerations
  constexpr const char* kinds[] = {"Allocate",    "Pin",       "CreateStream", "StreamId",
                                   "CreateEvent", "Record",    "Wait",         "Query",
                                   "Recorded",    "EventTime", "Copy",         "AnyCall"};
  constexpr const char* ways[] = {"Refused", "InFlight", "NoMemory", "Lost"};
  constexpr const char* memories[] = {"", "Pinned", "Staged"};
  return text(kinds[static_cast<std::size_t>(fault.kind)],
              ways[static_cast<std::size_t>(fault.how)],
              memories[static_cast<std::size_t>(fault.scenario.memory)],
              fault.scenario.timeline ? "Timed" : "", fault.times > 1 ? "Twice" : "",
              cuda_name(fault.scenario.over_fake));
}
void PrintTo(const Fault& fault, std::ostream* out) { *out << name_of(fault); }

// False: the scenario makes fewer calls than that.
bool kth_call_fails(const Fault& fault, std::size_t k) {
  const auto device = scenario_device(fault.scenario);
  device->fail(fault.kind, k, fault.how, fault.times);
  std::weak_ptr<Manager> manager;
  try {
    Scenario scenario(device, fault.scenario);
    manager = scenario.weak_manager();
    scenario.run();
    if (!::testing::Test::HasFailure()) scenario.finish();
    if (device->injected() == 0) scenario.expect_that_it_did_much();
  } catch (const Error&) {  // a manager that cannot be made leaves nothing behind
    EXPECT_GE(device->injected(), 1U);
  } catch (const std::bad_alloc&) {
    EXPECT_GE(device->injected(), 1U);
  }
  EXPECT_TRUE(manager.expired()) << "the manager leaked";
  // A lost CUDA device is not called any more, so it leaks.
  if (!fault.scenario.over_fake || !device->lost()) {
    EXPECT_EQ(device->live_events(), 0);
    EXPECT_EQ(device->live_streams(), 0);
  }
  // What a lost device may still touch stays pinned.
  EXPECT_TRUE(device->lost() || device->pinned().empty());
  return device->injected() > 0;
}

class KthCallFails : public ::testing::TestWithParam<Fault> {};

TEST_P(KthCallFails, ForEveryK) {
  const CallKind kind = GetParam().kind;
  const bool many = kind == CallKind::any || kind == CallKind::query;
  // The checker takes its time: of the thousands every seventh, there, and fewer if sanitized.
  constexpr std::size_t stride_over_fake = sanitized ? 53 : 7;
  const bool checked = GetParam().scenario.over_fake.has_value();
  const std::size_t stride = !many ? stride_of_few : checked ? stride_over_fake : stride_of_many;
  std::size_t k = 1;
  for (; kth_call_fails(GetParam(), k); k += stride) {
    ASSERT_FALSE(HasFailure()) << "where call " << k << " fails";
  }
  std::printf("             %zu calls, every %zu\n", k - 1, stride);
  const bool few = kind == CallKind::pin || kind == CallKind::recorded;
  const bool some = kind == CallKind::create_stream || kind == CallKind::event_time;
  EXPECT_GE(k - 1, few ? 1U : some ? 10U : 30U) << "the scenario is too small";
}

std::vector<Fault> all_faults() {
  const ScenarioOptions timed{.timeline = true};
  const ScenarioOptions staged{.memory = HostMemory::staged, .timeline = true};
  const ScenarioOptions pinned{.memory = HostMemory::pinned};
  using enum DeviceCall;
  std::vector<Fault> faults;
  for (const CallKind kind : {create_stream, stream_id, create_event, record, wait, query, recorded,
                              event_time, copy, any}) {
    const bool happens = kind == record || kind == wait || kind == copy;
    if (kind == any) {  // one is all the others
      faults.push_back({kind, Failure::refused, 2, timed});
      faults.push_back({kind, Failure::in_flight, 2, staged});
      continue;
    }
    faults.push_back({kind, Failure::refused, 1, timed});
    faults.push_back({kind, Failure::refused, 1, staged});
    faults.push_back({kind, Failure::refused, 2, staged});
    if (happens) {
      faults.push_back({kind, Failure::in_flight, 1, timed});
      faults.push_back({kind, Failure::in_flight, 1, staged});
      faults.push_back({kind, Failure::in_flight, 2, staged});
    }
    faults.push_back({kind, Failure::lost, 1, staged});
    if (kind == query) continue;  // it throws nothing, and there are many
    faults.push_back({kind, Failure::no_memory, 1, timed});
    faults.push_back({kind, Failure::lost, 1, timed});
  }
  // Through the CUDA device, which needs pinned memory.
  std::vector<OverFake> overs{{.major = 13}};
  if (!sanitized) overs.insert(overs.end(), {{.major = 12}, {.major = 13, .batch = false}});
  for (const OverFake& over : overs) {
    const ScenarioOptions direct{.memory = HostMemory::pinned, .timeline = true, .over_fake = over};
    const ScenarioOptions through{.memory = HostMemory::staged, .over_fake = over};
    for (const CallKind kind :
         {create_stream, stream_id, create_event, record, wait, query, event_time, copy}) {
      faults.push_back({kind, Failure::refused, 1, direct});
      if (kind == record || kind == wait || kind == copy)
        faults.push_back({kind, Failure::in_flight, 1, through});
      if (kind != query) faults.push_back({kind, Failure::lost, 1, direct});
    }
    faults.push_back({any, Failure::refused, 2, direct});
    faults.push_back({pin, Failure::refused, 1, direct});
  }
  faults.push_back({pin, Failure::refused, 1, pinned});
  faults.push_back({pin, Failure::refused, 1, staged});
  faults.push_back({pin, Failure::refused, 2, staged});
  return faults;
}

INSTANTIATE_TEST_SUITE_P(Calls, KthCallFails, ::testing::ValuesIn(all_faults()),
                         [](const auto& fault) { return name_of(fault.param); });

// Many calls fail, each with some probability in its place.
TEST(ManyCallsFail, OfAllKinds) {
  for (unsigned seed = 0; seed < 60; ++seed) {
    SCOPED_TRACE(seed);
    std::mt19937 random(seed);
    const ScenarioOptions options{
        .memory = seed % 3 == 0 ? HostMemory::staged : HostMemory::ordinary,
        .timeline = seed % 2 == 0};
    const auto device = scenario_device(options);
    std::weak_ptr<Manager> manager;
    {
      Scenario scenario(device, options);
      manager = scenario.weak_manager();
      for (const CallKind kind :
           {CallKind::copy, CallKind::record, CallKind::wait, CallKind::create_event,
            CallKind::create_stream, CallKind::stream_id, CallKind::query}) {
        for (int i = 0; i < 10; ++i) {
          constexpr Failure how[] = {Failure::refused, Failure::in_flight, Failure::no_memory};
          device->fail(kind, 1 + random() % 150, how[random() % 3]);
        }
      }
      scenario.run();
      if (HasFailure()) return;
      EXPECT_GT(device->injected(), 5U);
      scenario.finish();
      if (HasFailure()) return;
    }
    ASSERT_TRUE(manager.expired());
    ASSERT_EQ(device->live_events(), 0);
    ASSERT_EQ(device->live_streams(), 0);
    ASSERT_TRUE(device->pinned().empty());
  }
}

}  // namespace
}  // namespace kvmem::test
