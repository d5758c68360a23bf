#include "fakes/flights.hpp"

#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <utility>

namespace kvmem::fake {

namespace {

constexpr std::size_t most_left = 4096;  // single copies that outlive their time

}  // namespace

bool Flights::Flight::may_be_in_flight() const {
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    if (model->may_touch(targets[i], sizes[i]) || model->may_touch(sources[i], sizes[i]))
      return true;
  }
  return false;
}

void Flights::add(std::uint64_t stream, std::uint64_t number, const CopyDescriptors& batch,
                  const ModelDevice& model) {
  std::size_t& of_stream = in_flight_[stream];
  flights_.push_back({stream,
                      number,
                      batch,
                      &model,
                      {batch.targets, batch.targets + batch.count},
                      {batch.sources, batch.sources + batch.count},
                      {batch.sizes, batch.sizes + batch.count}});
  ++of_stream;
}

void Flights::observe(const Before& before) {
  if (before.empty()) return;
  for (auto flight = flights_.begin(); flight != flights_.end();) {
    const auto found = before.find(flight->stream);
    if (found == before.end() || found->second < flight->number) {
      ++flight;
      continue;
    }
    report(*flight, look_at(*flight));
    flight = remove(flight);
  }
}

void Flights::look_at_one() {
  constexpr std::uint64_t looks_each = 64;  // calls: a look is a system call
  if (flights_.empty() || ++calls_ % looks_each != 0) return;
  const auto flight = flights_.begin();
  flights_.splice(flights_.end(), flights_, flight);
  if (flight->has_ended) return;
  const Arrays arrays = look_at(*flight);
  if (arrays == Arrays::intact) return;
  // A test may know by other means that the batch has ended, and ask no event behind it.
  flight->has_ended = arrays == Arrays::changed && !flight->may_be_in_flight();
  if (flight->has_ended) return;
  report(*flight, arrays);
  remove(flight);
}

void Flights::prune(Before& before) const {
  std::erase_if(before, [&](const auto& entry) { return !in_flight_.contains(entry.first); });
}

Flights::Single& Flights::add_single(std::byte* target, const std::byte* source, std::size_t bytes,
                                     const ModelDevice& model) {
  if (singles_.size() >= collect_at_) {
    std::erase_if(singles_, [](const Single& single) {
      return single.queued && !single.model->may_touch(single.target, single.bytes) &&
             !single.model->may_touch(single.source, single.bytes);
    });
    collect_at_ = std::max<std::size_t>(64, 2 * singles_.size());
  }
  singles_.push_back({target, source, bytes, &model});
  return singles_.back();
}

void Flights::forget() {
  flights_.clear();
  in_flight_.clear();
  left_.splice(left_.end(), singles_);
  while (left_.size() > most_left) left_.pop_front();
}

void Flights::forget(const ModelDevice& model) {
  for (auto flight = flights_.begin(); flight != flights_.end();) {
    flight = flight->model == &model ? remove(flight) : std::next(flight);
  }
}

// By way of the kernel, which does not stumble over memory that is gone.
Flights::Arrays Flights::look_at(const Flight& flight) {
  const std::size_t pointers = flight.sizes.size() * sizeof(void*);
  const std::size_t sizes = flight.sizes.size() * sizeof(std::size_t);
  const auto at = [](const void* base) { return const_cast<void*>(base); };
  scratch_.resize(2 * pointers + sizes);
  const iovec there[] = {{at(flight.batch.targets), pointers},
                         {at(flight.batch.sources), pointers},
                         {at(flight.batch.sizes), sizes}};
  const iovec here{scratch_.data(), scratch_.size()};
  const ssize_t length = process_vm_readv(getpid(), &here, 1, there, std::size(there), 0);
  if (length < 0 && errno != EFAULT) std::abort();  // a kernel without this call
  if (length != static_cast<ssize_t>(scratch_.size())) return Arrays::gone;
  const std::byte* const now = scratch_.data();
  const bool same = std::memcmp(now, flight.targets.data(), pointers) == 0 &&
                    std::memcmp(now + pointers, flight.sources.data(), pointers) == 0 &&
                    std::memcmp(now + 2 * pointers, flight.sizes.data(), sizes) == 0;
  return same ? Arrays::intact : Arrays::changed;
}

void Flights::report(const Flight& flight, Arrays arrays) const noexcept {
  if (arrays == Arrays::intact) return;
  checker_.report(Rule::descriptors_changed, "the arrays of a batch of ", flight.sizes.size(),
                  " copies ", arrays == Arrays::gone ? "are gone" : "were changed",
                  " before it was seen to have ended");
}

std::list<Flights::Flight>::iterator Flights::remove(std::list<Flight>::iterator flight) {
  const auto of_stream = in_flight_.find(flight->stream);
  if (--of_stream->second == 0) in_flight_.erase(of_stream);
  return flights_.erase(flight);
}

}  // namespace kvmem::fake
