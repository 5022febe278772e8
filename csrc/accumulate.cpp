// Sums of sparse messages, decoded or as they travel. The result is built tile by tile in the
// first-level cache and written once: neither the zeros nor the additions go over memory by themselves.

#include "kernels.h"
#include "loops.h"
#include "reading.h"
#include "scratch.h"
#include "threads.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <new>
#include <vector>

namespace cddp {
namespace {

constexpr int64_t kTile = 8192; // elements: 32 KiB; shorter tiles end too often, and every end is a wrong guess

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

  // use(index, value) for the next entries as long as their index is in [from, to); returns how many.
  template <typename Use> int64_t feed(int64_t from, int64_t to, const Use &use) {
    const int64_t begin = at_;
    for (; at_ < piece_.count; ++at_) {
      const int64_t index = piece_.indices[at_];
      if (index < from || index >= to) break;
      use(index, piece_.values[at_]);
    }
    return at_ - begin;
  }
  int64_t shard;

private:
  cddp_entries piece_;
  int64_t at_;
};

// Entries of a checked message: indices that were read when they were checked, and values that are
// read 64 at a time, which is a block of their codes.
class Coded {
public:
  Coded(const cddp_message &message, const uint32_t *indices, int values, int64_t from)
      : shard(message.shard), message_(message), indices_(indices), values_(values),
        at_(std::lower_bound(indices, indices + message.count, from) - indices), end_(at_) {}

  // As above; `from` is known to be right, for indices increase.
  template <typename Use> int64_t feed(int64_t, int64_t to, const Use &use) {
    const int64_t begin = at_;
    for (; at_ < message_.count; read()) {
      int64_t at = at_;
      for (; at < end_ && indices_[at] < to; ++at) use(indices_[at], value_[at & 63]);
      at_ = at;
      if (at < end_) break;
    }
    return at_ - begin;
  }
  int64_t shard;

private:
  void read() {
    const int64_t begin = at_ / 64 * 64;
    end_ = std::min(begin + 64, message_.count);
    read_values(message_.values, message_.count, values_, begin, static_cast<int>(end_ - begin), value_);
  }

  cddp_message message_;
  const uint32_t *indices_;
  int values_;
  int64_t at_, end_; // the next entry, and up to where values are read
  float value_[64];
};

// Rounds `first` to `last` of all sources; a round is one block of each shard. Returns how many
// entries were added: one out of order ends its source, and nothing is written outside.
template <typename Source>
int64_t add_rounds(const Target &target, std::vector<Source> &sources, int64_t first, int64_t last) {
  const Loops &loop = loops();
  const int64_t width = kBlock * target.shards;
  const int64_t per_tile = std::max<int64_t>(1, kTile / width);
  int64_t added = 0;
  // With many shards a round may be longer than a tile; then the tile is.
  std::vector<float> tile(static_cast<size_t>(per_tile * width + 16));
  for (int64_t round = first; round < last; round += per_tile) {
    const int64_t base = round * width;
    const int64_t local = round * kBlock, size = (std::min(round + per_tile, last) - round) * kBlock;
    const auto n = static_cast<size_t>(std::min(base + size * target.shards, target.numel) - base);
    std::memset(tile.data(), 0, n * sizeof(float));
    for (Source &source : sources) {
      // The last block of a shard need not be full.
      const int64_t to = std::min(local + size, shard_numel(target.numel, target.shards, source.shard));
      float *mine = tile.data() + source.shard * kBlock;
      if (target.shards == 1)
        added += source.feed(local, to, [&](int64_t index, float value) { mine[index - local] += value * target.scale; });
      else
        added += source.feed(local, to, [&](int64_t index, float value) {
          const int64_t i = index - local;
          mine[i / kBlock * width + i % kBlock] += value * target.scale;
        });
    }
    float *to = target.out + base;
    const size_t whole = reinterpret_cast<uintptr_t>(to) & 31 ? 0 : n & ~size_t{15};
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
                                 int64_t n_messages, int values, float scale, int threads, int64_t *which,
                                 int64_t *found) {
  int64_t entries = 0;
  for (*which = 0; *which < n_messages; ++*which) {
    const cddp_message &message = messages[*which];
    if (message.shard < 0 || message.shard >= shards || message.count < 0 ||
        message.numel > cddp::shard_numel(numel, shards, message.shard))
      return CDDP_OUT_OF_RANGE;
    if (message.count > message.capacity) return CDDP_WRONG_COUNT;
    entries += message.count;
  }
  try {
    // Every message is checked before anything is written; its indices are kept from that.
    cddp::Scratch &scratch = cddp::Scratch::mine();
    scratch.reserve(static_cast<size_t>(entries + 32 * n_messages) * sizeof(uint32_t));
    std::vector<uint32_t *> indices;
    for (int64_t m = 0; m < n_messages; ++m) indices.push_back(scratch.take<uint32_t>(messages[m].count + 16));
    struct Finding {
      int status;
      int64_t found;
    };
    std::vector<Finding> findings(static_cast<size_t>(n_messages));
    const int readers = std::max(1, std::min(cddp::worth(numel, threads), static_cast<int>(n_messages)));
    cddp::in_parallel(readers, [&](int t) {
      for (auto m = static_cast<size_t>(t); m < findings.size(); m += static_cast<size_t>(readers)) {
        auto &[status, ones] = findings[m];
        status = cddp::read_indices(messages[m], indices[m], &ones);
        if (status == CDDP_OK) status = cddp::check_values(messages[m].values, messages[m].count, values);
      }
    });
    for (*which = 0; *which < n_messages; ++*which) {
      const auto &[status, what] = findings[static_cast<size_t>(*which)];
      *found = what;
      if (status != CDDP_OK) return status;
    }
    const cddp::Target target{out, numel, shards, scale};
    return cddp::sum_all(target, entries, threads, [&](int64_t from) {
      std::vector<cddp::Coded> sources;
      for (int64_t m = 0; m < n_messages; ++m)
        sources.emplace_back(messages[m], indices[static_cast<size_t>(m)], values, from);
      return sources;
    });
  } catch (const std::bad_alloc &) {
    return CDDP_NO_MEMORY;
  }
}

extern "C" int cddp_put_difference(float *out, int64_t numel, int64_t shards, int64_t shard, const int64_t *indices,
                                   const float *a, const float *b, int64_t count) {
  if (shard < 0 || shard >= shards) return CDDP_OUT_OF_RANGE;
  bool inside = true;
  const auto place = [&](int64_t i) { // of entry i, or numel if it lies outside; no position overflows
    const int64_t index = indices[i];
    return index < 0 || index >= numel ? numel : cddp::position({shards, shard}, index);
  };
  for (int64_t i = 0; i < count; ++i) {
    const int64_t ahead = place(std::min(i + cddp::kAhead, count - 1)), here = place(i);
    if (ahead < numel) cddp::prefetch(out + ahead);
    inside &= here < numel;
    if (here < numel) out[here] = a[i] - b[i];
  }
  return inside ? CDDP_OK : CDDP_OUT_OF_RANGE;
}
