// The words for what a transfer is and how it stands.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <variant>

#include "base/types.hpp"

namespace kvmem {

enum class TransferKind : std::uint8_t { offload, restore };

//   queued     -> in_flight   first slice submitted
//   queued     -> cancelled   cancelled before any slice was submitted
//   queued     -> failed      a block differs from its checksum (Corrupt): nothing was submitted
//   in_flight  -> done | failed | cancelled   the guard of everything submitted was observed
// The last three are terminal: entered exactly once, never left.
enum class TransferState : std::uint8_t { queued, in_flight, done, failed, cancelled };

[[nodiscard]] constexpr bool is_terminal(TransferState state) noexcept {
  return state >= TransferState::done;
}

enum class CancelOutcome : std::uint8_t {
  not_submitted,  // ended cancelled, now
  draining,       // ends cancelled, or failed, when what was submitted has been observed to end
  already_done,
};

using Tag = std::variant<std::int64_t, std::string>;  // the caller's own name for a transfer

// How a tagged transfer ended, as plain values that hold no block.
struct Report {
  std::uint64_t id = 0;
  Tag tag;
  TransferKind kind = TransferKind::offload;
  TransferState state = TransferState::done;
  std::string error;  // empty when done
};

}  // namespace kvmem
