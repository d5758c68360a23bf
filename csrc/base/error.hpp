// What can go wrong, as types. The Python exceptions have the same names.
//
// A full pool or queue is not here: try_ calls answer it with an empty optional. Shortage errors
// are for callers who asked to wait, or who asked for more than can ever be given.
#pragma once

#include <cstdint>
#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace kvmem {

// One message out of values: text("block ", id, " is out of range").
template <class... Parts>
std::string text(const Parts&... parts) {
  std::ostringstream out;
  (out << ... << parts);
  return out.str();
}

struct Error : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct InvalidArgument : Error {
  using Error::Error;
};
struct AlreadyReleased : Error {
  using Error::Error;
};
struct Closed : Error {
  using Error::Error;
};
struct Forked : Error {
  using Error::Error;
};
struct NotDone : Error {
  using Error::Error;
};
struct Cancelled : Error {
  using Error::Error;
};
struct CopyFailed : Error {
  using Error::Error;
};
struct DeviceLost : Error {
  using Error::Error;
};
struct DeviceUnavailable : Error {
  using Error::Error;
};

// The block is in use by an unfinished transfer that the caller did not name in `after`.
struct Busy : Error {
  Busy(std::string message, std::int64_t which_block, std::uint64_t which_transfer)
      : Error(std::move(message)), block(which_block), transfer(which_transfer) {}
  std::int64_t block;
  std::uint64_t transfer;
};

// The bytes of a stored block are not those that were summed. `block` is its position in the call.
struct Corrupt : Error {
  Corrupt(std::size_t position, std::uint32_t in_slot, std::uint32_t kept, std::uint32_t now)
      : Error(text("block ", position, " (slot ", in_slot, ") is corrupt: its checksum was ", kept,
                   " and is ", now)),
        block(position),
        slot(in_slot),
        expected(kept),
        found(now) {}
  std::size_t block;
  std::uint32_t slot;
  std::uint32_t expected, found;
};

// Stored state does not fit the layout; `fields` lists what differs.
struct Incompatible : Error {
  Incompatible(std::string message, std::vector<std::string> differing)
      : Error(std::move(message)), fields(std::move(differing)) {}
  std::vector<std::string> fields;
};

// The numbers behind a refusal at a bound, all in the unit of that bound (slots, bytes, reports).
struct Shortage {
  std::string bound;
  std::uint64_t wanted = 0;
  std::uint64_t free = 0;
  std::uint64_t largest = 0;  // the largest request that could ever be served
  std::uint64_t held = 0;
  std::uint64_t quarantined = 0;
};

struct AtBound : Error {
  AtBound(const std::string& what, Shortage numbers);
  Shortage shortage;
};
struct TimedOut : AtBound {
  using AtBound::AtBound;
};
struct PoolExhausted : AtBound {
  using AtBound::AtBound;
};
struct CapacityError : AtBound {
  using AtBound::AtBound;
};  // can never be served

}  // namespace kvmem
