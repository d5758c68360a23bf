// What is reserved and loaded, and the hit in between.
#include "base/check.hpp"
#include "cache/cache.hpp"
#include "cache/plan_guard.hpp"

namespace kvmem {

CacheHit Cache::reserve(KeyPointers keys, std::size_t key_bytes, const std::string& owner,
                        Pending pending, std::optional<double> expires_seconds) {
  const auto pass = enter();
  CacheHit hit;
  const Reservation reserved = index_->reserve(keys, key_bytes, owner, pending, expires_seconds);
  hit.plan_ = reserved.id;
  hit.length_ = reserved.length;
  hit.pending_ = reserved.pending;
  if (reserved.id == 0) return hit;
  hit.cache_ = shared_from_this();
  hit.owner_ = owner;
  for (const std::byte* const key : keys.first(reserved.length))
    hit.keys_.insert(hit.keys_.end(), key, key + key_bytes);
  return hit;
}

std::shared_ptr<CacheTransfer> Cache::load(CacheHit& hit, const Blocks& blocks, After after,
                                           Priority priority) {
  const auto pass = enter();
  if (hit.released_) throw AlreadyReleased("the hit was released or loaded");
  KVMEM_EXPECTS(hit.cache_ == nullptr || hit.cache_.get() == this, "the hit is of another cache");
  KVMEM_EXPECTS(blocks.size() == groups_.size(), "there are blocks of ", blocks.size(),
                " groups, and the cache has ", groups_.size());
  for (std::size_t g = 0; g < groups_.size(); ++g) {
    KVMEM_EXPECTS(blocks[g].size() == hit.length(), "there are ", blocks[g].size(),
                  " device blocks of group '", options_.groups[g].name, "' for a hit of ",
                  hit.length(), " keys");
  }
  auto job = new_job(CacheKind::load, hit.owner_, after, priority);
  if (hit.plan_ == 0) {
    job->ended = TransferState::done;
    return std::make_shared<CacheTransfer>(std::move(job));
  }
  Place place(*this);
  if (!place.had()) throw no_place();
  job->plan = hit.plan_;
  job->key_bytes = hit.keys_.size() / hit.length_;
  job->keys = hit.keys_;
  job->blocks = blocks;
  job->length = hit.length_;
  claim_targets(*job, hit.length_);
  job->waits_for_keys = true;
  auto transfer = std::make_shared<CacheTransfer>(job);
  static_cast<void>(begin_load(*job));  // throws where it expired
  PlanGuard guard(*index_, job->waits_for_keys ? 0 : job->plan);
  start(job, place);
  guard.keep();
  hit.released_ = true;
  hit.cache_ = nullptr;
  return transfer;
}

// What a hit of that length needs is this load's from now on. A shorter one may need what a longer
// one does not, which may be in use by then.
void Cache::claim_targets(CacheJob& job, std::size_t length) {
  for (std::size_t g = 0; g < groups_.size(); ++g) {
    if (job.claims[g] && needs_[g].need.kind == NeedKind::all) continue;
    const KeyRange range = needed(needs_[g].need, length);
    const auto first = job.blocks[g].begin();
    const std::vector<BlockId> targets(first + static_cast<std::ptrdiff_t>(range.first),
                                       first + static_cast<std::ptrdiff_t>(range.last));
    job.claims[g].reset();
    if (!targets.empty())
      job.claims[g] = groups_[g].manager->claim(TransferKind::restore, targets, job.after);
  }
}

CacheHit& CacheHit::operator=(CacheHit&& other) noexcept {
  if (this == &other) return *this;
  let_go();
  cache_ = std::exchange(other.cache_, nullptr);
  plan_ = std::exchange(other.plan_, 0);
  length_ = std::exchange(other.length_, 0);
  pending_ = other.pending_;
  released_ = other.released_;
  owner_ = std::move(other.owner_);
  keys_ = std::move(other.keys_);
  return *this;
}

void CacheHit::let_go() noexcept {
  const auto cache = std::exchange(cache_, nullptr);
  if (!cache) return;
  try {
    cache->index_->release(plan_);
    cache->tell_stores();
  } catch (...) {  // it expired, its owner was dropped, or this is a forked child
  }
}

std::size_t CacheHit::keep(std::size_t length) {
  if (released_) throw AlreadyReleased("the hit was released or loaded");
  if (!cache_ || length >= length_) return length_;
  const std::size_t key_bytes = keys_.size() / length_;
  length_ = cache_->index_->keep(plan_, length);
  keys_.resize(length_ * key_bytes);
  cache_->tell_stores();
  if (length_ > 0) return length_;
  plan_ = 0;  // it has ended
  cache_ = nullptr;
  return 0;
}

void CacheHit::release() {
  if (std::exchange(released_, true)) throw AlreadyReleased("the hit was released or loaded");
  let_go();
}

std::size_t CacheHit::blocks(bool on_disk) const {
  if (!cache_) return 0;
  std::vector<std::size_t> all;
  try {
    all = cache_->index_->blocks(plan_);
  } catch (const InvalidArgument&) {  // it expired, or its owner was dropped
    return 0;
  }
  std::size_t count = 0;
  for (std::size_t g = 0; g < all.size(); ++g) count += cache_->is_disk(g) == on_disk ? all[g] : 0;
  return count;
}

}  // namespace kvmem
