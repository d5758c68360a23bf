// The copies of a virtual device, from the call that queues them to their end: when they end on the
// modelled links, and which of their bytes have moved. Not thread-safe: the device's lock guards
// it.
#pragma once

#include <array>
#include <map>
#include <optional>
#include <random>
#include <vector>

#include "device/model.hpp"
#include "device/virtual_device.hpp"

namespace kvmem {

class VirtualCopies {
 public:
  explicit VirtualCopies(const VirtualOptions& options)
      : options_(options), random_(options.seed) {}

  // A copy is queued; returns its number.
  [[nodiscard]] std::uint64_t add(const CopyDescriptors& batch, Direction direction,
                                  SourceAccess access);
  void remove(std::uint64_t number) noexcept { copies_.erase(number); }  // it was not queued
  // Its stream got there. Held ones get there too, but no link ever serves them.
  void start(ModelCopy* copy, Nanoseconds now);
  // Links that are free now take what waits for them.
  void serve(Nanoseconds now);
  // When something happens next that serve() or take_ended() must look at.
  [[nodiscard]] std::optional<Nanoseconds> next_time(Nanoseconds now) const;
  // One whose end is not after `now`, with all its bytes moved and forgotten here; null: none.
  [[nodiscard]] ModelCopy* take_ended(Nanoseconds now);

  void hold(std::uint64_t count) noexcept { holds_left_ = count; }
  void release() noexcept;

  [[nodiscard]] std::size_t pending() const noexcept { return copies_.size(); }
  [[nodiscard]] std::size_t held() const noexcept;

 private:
  struct Copy {
    CopyDescriptors batch;
    Direction direction = Direction::to_host;
    bool held = false;
    ModelCopy* running = nullptr;       // once its stream got there
    std::uint64_t turn = 0;             // which of all it was that a link served
    std::optional<Nanoseconds> end;     // once a link served it
    std::uint64_t split = 0;            // decides which bytes move when
    std::vector<std::byte> read_early;  // of a source that may be read at any time
  };
  struct Link {
    Nanoseconds free_at = 0;
    std::vector<std::uint64_t> waiting;
  };

  [[nodiscard]] Link& link_of(Direction direction) noexcept {
    return links_[options_.shared_link ? 0 : static_cast<std::size_t>(direction)];
  }
  void read_early(Copy& copy) const;
  void move_first_part(Copy& copy) const noexcept;
  void move_rest(const Copy& copy) const noexcept;

  const VirtualOptions options_;
  std::mt19937_64 random_;
  std::map<std::uint64_t, Copy> copies_;  // by number, so that walking them is deterministic
  std::array<Link, 2> links_;
  std::uint64_t last_number_ = 0, last_turn_ = 0;
  std::uint64_t holds_left_ = 0;
};

}  // namespace kvmem
