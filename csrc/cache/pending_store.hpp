// A store before it is accepted. Blocking and awaiting are two ways to sleep on it.
#pragma once

#include <memory>
#include <optional>

#include "cache/cache.hpp"

namespace kvmem {

class PendingStore {  // one thread at a time
 public:
  // As of Cache::try_store(). The bytes of the keys must outlive it.
  PendingStore(std::shared_ptr<Cache> cache, Cache::Request request, Cache::Blocks blocks);
  PendingStore(const PendingStore&) = delete;
  PendingStore& operator=(const PendingStore&) = delete;
  ~PendingStore() { leave(); }

  // `list` and `token`: who is told when it is worth asking again. Throws what try_store() throws.
  [[nodiscard]] bool accepted(const std::shared_ptr<WakeList>& list = nullptr,
                              std::uint64_t token = 0);
  [[nodiscard]] std::shared_ptr<CacheTransfer> take() noexcept { return std::move(transfer_); }
  void leave() noexcept;  // gives up its place

 private:
  [[nodiscard]] bool ask(bool has_turn);

  const std::shared_ptr<Cache> cache_;
  const Cache::Request request_;
  const Cache::Blocks blocks_;
  std::optional<Cache::Admitted> admitted_;  // asked once: each time counts
  std::shared_ptr<Ticket> place_;
  std::shared_ptr<CacheTransfer> transfer_;
};

}  // namespace kvmem
