// Batches whose arrays somebody else owns, and single copies whose arrays are the fake's own.
//
// CUDA does not say how long it reads the arrays of a batch, so they must be as they were until an
// event behind the batch was seen done. Not thread-safe: the state's lock guards it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <list>
#include <map>
#include <memory>
#include <vector>

#include "device/model_device.hpp"
#include "fakes/checker.hpp"

namespace kvmem::fake {

// Of each stream, how many of its batches come before a point of the program.
using Before = std::map<std::uint64_t, std::uint64_t>;

class Flights {
 public:
  explicit Flights(Checker& checker) : checker_(checker) {}

  // A batch is the `number`th of its stream.
  void add(std::uint64_t stream, std::uint64_t number, const CopyDescriptors& batch,
           const ModelDevice& model);
  // All before that point has been seen to have ended.
  void observe(const Before& before);
  // Called by every call. Now and then looks at one of them, another each time: a change may so be
  // seen before the model stumbles over it.
  void look_at_one();
  // What has no batch in flight says nothing any more.
  void prune(Before& before) const;

  struct Single {
    std::byte* target;
    const std::byte* source;
    std::size_t bytes;
    const ModelDevice* model;
    bool queued = false;

    [[nodiscard]] CopyDescriptors copy() const { return {&target, &source, &bytes, 1}; }
  };
  // Lives until its copy has ended, which may be from when it is `queued`.
  [[nodiscard]] Single& add_single(std::byte* target, const std::byte* source, std::size_t bytes,
                                   const ModelDevice& model);

  // Without a look. Arrays of the fake's own, which a model may still read, live on for long.
  void forget();
  void forget(const ModelDevice& model);  // which is lost: nothing of it will be seen to end

 private:
  struct Flight {
    std::uint64_t stream, number;
    CopyDescriptors batch;
    const ModelDevice* model;
    std::vector<std::byte*> targets;  // as they were
    std::vector<const std::byte*> sources;
    std::vector<std::size_t> sizes;
    bool has_ended = false;  // as a look found, which is nothing that the program knows

    [[nodiscard]] bool may_be_in_flight() const;
  };
  enum class Arrays : std::uint8_t { intact, changed, gone };
  [[nodiscard]] Arrays look_at(const Flight& flight);
  void report(const Flight& flight, Arrays arrays) const noexcept;
  std::list<Flight>::iterator remove(std::list<Flight>::iterator flight);

  Checker& checker_;
  std::list<Flight> flights_;
  std::map<std::uint64_t, std::size_t> in_flight_;  // batches by stream
  std::list<Single> singles_, left_;
  std::vector<std::byte> scratch_;
  std::size_t collect_at_ = 64;
  std::uint64_t calls_ = 0;
};

}  // namespace kvmem::fake
