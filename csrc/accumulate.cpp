// Sums of sparse messages, decoded or as they travel. The result is built tile by tile in the first-level cache and written
// once: neither the zeros nor the additions go over memory by themselves.

#include "kernels.h"
#include "loops.h"
#include "reading.h"
#include "threads.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <new>
#include <vector>

namespace cddp {
namespace {

constexpr int64_t kTile = 4096; // elements: 16 KiB, half of a small first-level cache

constexpr int64_t kAhead = 48; // entries that are fetched before their turn: each lies in a line of its own

inline void prefetch(const float *at) {
#if defined(__GNUC__) || defined(__clang__)
  __builtin_prefetch(at, 1);
#else
  (void)at;
#endif
}

// How many of a bucket's elements belong to a shard.
inline int64_t shard_numel(int64_t numel, int64_t shards, int64_t shard) {
  const int64_t width = kBlock * shards, rest = numel % width - kBlock * shard;
  return numel / width * kBlock + std::min(std::max<int64_t>(rest, 0), kBlock);
}

// Where the sum goes.
struct Target {
  float *out;
  int64_t numel, shards;
  float scale;
};

// Entries that are already decoded, from local index `from` on.
class Listed {
public:
  Listed(const cddp_entries &piece, int64_t from)
      : shard(piece.shard), piece_(piece),
        at_(std::lower_bound(piece.indices, piece.indices + piece.count, from) - piece.indices) {}

  // Hands over the next entries, until use(index, value) refuses one or there are no more.
  template <typename Use> void feed(const Use &use) {
    while (at_ < piece_.count && use(piece_.indices[at_], piece_.values[at_])) ++at_;
  }
  int64_t shard;

private:
  cddp_entries piece_;
  int64_t at_;
};

// Entries of a (checked) message, decoded 64 at a time, which is also a block of the value codes.
class Coded {
public:
  Coded(const cddp_message &message, int values, int64_t from)
      : shard(message.shard), message_(message), part_(message), values_(values) {
    if (message.count == 0) return;
    seek(static_cast<uint64_t>(from) >> part_.width);
    feed([from](int64_t index, float) { return index < from; });
  }

  template <typename Use> void feed(const Use &use) {
    for (;; used_ = 0, decode()) {
      for (; used_ < have_; ++used_)
        if (!use(index_[used_], value_[used_])) return;
      if (next_ >= message_.count) {
        used_ = have_ = 0;
        return;
      }
    }
  }
  int64_t shard;

private:
  // To the block of 64 with the first index whose high part is at least `high`: that many zeros of
  // the bitmap, and all indices with smaller high parts, lie before it.
  void seek(uint64_t high) {
    at_ = part_.bitmap;
    ones_ = load64(at_, part_.end);
    if (high == 0) return;
    uint64_t zeros = 0, before = 0;
    for (const uint8_t *at = part_.bitmap; at < part_.end; at += 8) {
      uint64_t word = load64(at, part_.end);
      const auto set = static_cast<uint64_t>(std::popcount(word));
      if (zeros + 64 - set >= high) {
        for (; zeros < high; word >>= 1) {
          zeros += !(word & 1);
          before += word & 1;
        }
        break;
      }
      zeros += 64 - set;
      before += set;
    }
    next_ = static_cast<int64_t>(before / 64 * 64);
    int64_t passed = 0;
    while (passed + std::popcount(ones_) <= next_ && at_ + 8 < part_.end) {
      passed += std::popcount(ones_);
      at_ += 8;
      ones_ = load64(at_, part_.end);
    }
    for (; passed < next_; ++passed) ones_ &= ones_ - 1;
  }

  void decode() {
    const int n = static_cast<int>(std::min<int64_t>(64, message_.count - next_));
    for (int i = 0; i < n; ++i) {
      while (ones_ == 0) {
        at_ += 8;
        ones_ = load64(at_, part_.end);
      }
      const auto bit = static_cast<uint64_t>(at_ - part_.bitmap) * 8 + static_cast<uint64_t>(std::countr_zero(ones_));
      index_[i] = part_.index(bit, static_cast<uint64_t>(next_ + i));
      ones_ &= ones_ - 1;
    }
    read_values(message_.values, message_.count, values_, next_, n, value_);
    next_ += n;
    have_ = n;
  }

  cddp_message message_;
  IndexPart part_;
  int values_;
  const uint8_t *at_ = nullptr; // the word of the bitmap that is being read, and what is left of it
  uint64_t ones_ = 0;
  int64_t next_ = 0; // number of the first entry that is not decoded yet
  int have_ = 0, used_ = 0;
  int64_t index_[64];
  float value_[64];
};

// Rounds `first` to `last` of all sources; a round is one block of each shard. Returns how many
// entries were added: one out of order ends its source, and nothing is written outside.
template <typename Source>
int64_t add_rounds(const Target &target, std::vector<Source> &sources, int64_t first, int64_t last) {
  const Loops &loop = loops();
  const int64_t width = kBlock * target.shards;
  const int64_t per_tile = std::max<int64_t>(1, kTile / width);
  const bool one_shard = target.shards == 1;
  int64_t added = 0;
  // With many shards a round may be longer than a tile; then the tile is.
  std::vector<float> tile(static_cast<size_t>(per_tile * width + 16));
  for (int64_t round = first; round < last; round += per_tile) {
    const int64_t base = round * width;
    const auto local = static_cast<uint64_t>(round * kBlock);
    const auto size = static_cast<uint64_t>((std::min(round + per_tile, last) - round) * kBlock);
    const auto n = static_cast<uint64_t>(std::min(base + static_cast<int64_t>(size) * target.shards, target.numel) - base);
    std::memset(tile.data(), 0, n * sizeof(float));
    for (Source &source : sources) {
      const auto mine = static_cast<uint64_t>(source.shard * kBlock);
      source.feed([&](int64_t index, float value) {
        const uint64_t i = static_cast<uint64_t>(index) - local;
        const uint64_t place = one_shard ? i : i / kBlock * static_cast<uint64_t>(width) + mine + i % kBlock;
        if (i >= size || place >= n) return false; // the tile ends, or a last block that is not full
        tile[place] += value * target.scale;
        ++added;
        return true;
      });
    }
    float *to = target.out + base;
    const uint64_t whole = reinterpret_cast<uintptr_t>(to) & 31 ? 0 : n & ~uint64_t{15};
    loop.stream_copy(tile.data(), to, whole);
    std::memcpy(to + whole, tile.data() + whole, (n - whole) * sizeof(float));
  }
  loop.fence();
  return added;
}

// add_rounds over everything, by several threads; open(from) makes the sources from a local index on.
template <typename Open> int sum_all(const Target &target, int64_t entries, int threads, const Open &open) {
  const int64_t width = kBlock * target.shards, rounds = (target.numel + width - 1) / width;
  const int n_threads = worth(target.numel, threads);
  std::atomic<bool> memory{true};
  std::atomic<int64_t> added{0};
  in_parallel(n_threads, [&](int t) {
    const int64_t first = rounds * t / n_threads, last = rounds * (t + 1) / n_threads;
    try {
      auto sources = open(first * kBlock);
      added += add_rounds(target, sources, first, last);
    } catch (const std::bad_alloc &) {
      memory = false;
    }
  });
  if (!memory) return CDDP_NO_MEMORY;
  return added == entries ? CDDP_OK : CDDP_OUT_OF_RANGE;
}

// One message onto what is there, 64 entries at a time: while the next are decoded, memory fetches
// the places of these.
void add_onto(const Target &target, const cddp_message &message, int values) {
  const Deal deal{target.shards, message.shard};
  float *places[64] = {};
  float numbers[64];
  int n = 0;
  const auto flush = [&] {
    for (int i = 0; i < n; ++i) *places[i] += numbers[i] * target.scale;
    n = 0;
  };
  Coded(message, values, 0).feed([&](int64_t index, float value) {
    places[n] = target.out + deal.position(index);
    prefetch(places[n]);
    numbers[n++] = value;
    if (n == 64) flush();
    return true;
  });
  flush();
}

} // namespace
} // namespace cddp

extern "C" int cddp_accumulate(float *out, int64_t numel, int64_t shards, const cddp_entries *pieces,
                               int64_t n_pieces, float scale, int threads) {
  int64_t entries = 0;
  for (int64_t p = 0; p < n_pieces; ++p) {
    if (pieces[p].shard < 0 || pieces[p].shard >= shards) return CDDP_OUT_OF_RANGE;
    entries += pieces[p].count;
  }
  return cddp::sum_all({out, numel, shards, scale}, entries, threads, [&](int64_t from) {
    std::vector<cddp::Listed> sources;
    for (int64_t p = 0; p < n_pieces; ++p) sources.emplace_back(pieces[p], from);
    return sources;
  });
}

extern "C" int cddp_sum_messages(float *out, int64_t numel, int64_t shards, const cddp_message *messages,
                                 int64_t n_messages, int values, float scale, int fresh, int threads,
                                 int64_t *which, int64_t *found) {
  int64_t entries = 0;
  for (*which = 0; *which < n_messages; ++*which) {
    const cddp_message &message = messages[*which];
    if (message.shard < 0 || message.shard >= shards || message.numel > cddp::shard_numel(numel, shards, message.shard))
      return CDDP_OUT_OF_RANGE;
    const int status = cddp::walk(message, found, [](uint64_t, int64_t) {});
    if (status != CDDP_OK) return status;
    const int good = cddp::check_values(message.values, message.count, values);
    if (good != CDDP_OK) return good;
    entries += message.count;
  }
  const cddp::Target target{out, numel, shards, scale};
  if (!fresh) {
    for (int64_t m = 0; m < n_messages; ++m) cddp::add_onto(target, messages[m], values);
    return CDDP_OK;
  }
  return cddp::sum_all(target, entries, threads, [&](int64_t from) {
    std::vector<cddp::Coded> sources;
    for (int64_t m = 0; m < n_messages; ++m) sources.emplace_back(messages[m], values, from);
    return sources;
  });
}

namespace cddp {
namespace {

// change(out[position], i) for each of a shard's entries; false if some lie outside.
template <typename Change>
bool at_each(float *out, int64_t numel, Deal deal, const int64_t *indices, int64_t count, const Change &change) {
  if (deal.shard < 0 || deal.shard >= deal.shards) return false;
  bool inside = true;
  const auto place = [&](int64_t i) {
    const int64_t index = indices[i];
    return index < 0 || index >= numel ? numel : deal.position(index); // no position overflows
  };
  for (int64_t i = 0; i < count; ++i) {
    const int64_t ahead = place(std::min(i + kAhead, count - 1)), here = place(i);
    if (ahead < numel) prefetch(out + ahead);
    inside &= here < numel;
    if (here < numel) change(out[here], i);
  }
  return inside;
}

} // namespace
} // namespace cddp

extern "C" int cddp_put_difference(float *out, int64_t numel, int64_t shards, int64_t shard, const int64_t *indices,
                                   const float *a, const float *b, int64_t count) {
  const bool inside = cddp::at_each(out, numel, {shards, shard}, indices, count,
                                    [&](float &x, int64_t i) { x = a[i] - b[i]; });
  return inside ? CDDP_OK : CDDP_OUT_OF_RANGE;
}
