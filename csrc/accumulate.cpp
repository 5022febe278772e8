// Sums of sparse messages. The result is built tile by tile in the first-level cache and written
// once: neither the zeros nor the additions go over memory by themselves.

#include "kernels.h"
#include "loops.h"
#include "threads.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <vector>

namespace cddp {
namespace {

constexpr int64_t kTile = 4096; // elements: 16 KiB, half of a small first-level cache

constexpr int64_t kAhead = 24; // entries that are fetched before their turn: each lies in a line of its own

struct Sum {
  float *out;
  int64_t numel, shards;
  const cddp_entries *pieces;
  int64_t n_pieces;
  float scale;
};

inline void prefetch(const float *at) {
#if defined(__GNUC__) || defined(__clang__)
  __builtin_prefetch(at, 1);
#else
  (void)at;
#endif
}

// Rounds `first` to `last`; a round is one block of each shard.
void add_rounds(const Sum &sum, int64_t first, int64_t last) {
  const Loops &loop = loops();
  const int64_t width = kBlock * sum.shards;
  const int64_t per_tile = std::max<int64_t>(1, kTile / width);
  std::vector<int64_t> cursors(static_cast<size_t>(sum.n_pieces));
  for (size_t p = 0; p < cursors.size(); ++p) {
    const cddp_entries &piece = sum.pieces[p];
    cursors[p] = std::lower_bound(piece.indices, piece.indices + piece.count, first * kBlock) - piece.indices;
  }
  // With many shards a round may be longer than a tile; then the tile is.
  std::vector<float> tile(static_cast<size_t>(per_tile * width + 16));
  for (int64_t round = first; round < last; round += per_tile) {
    const int64_t base = round * width, local = round * kBlock;
    const int64_t stop = std::min(round + per_tile, last) * kBlock; // first local index after the tile
    const int64_t n = std::min(stop / kBlock * width, sum.numel) - base;
    std::memset(tile.data(), 0, static_cast<size_t>(n) * sizeof(float));
    for (size_t p = 0; p < cursors.size(); ++p) {
      const cddp_entries &piece = sum.pieces[p];
      int64_t at = cursors[p];
      if (sum.shards == 1) {
        for (; at < piece.count && piece.indices[at] < stop; ++at)
          tile[static_cast<size_t>(piece.indices[at] - local)] += piece.values[at] * sum.scale;
      } else {
        float *mine = tile.data() + piece.shard * kBlock;
        for (; at < piece.count && piece.indices[at] < stop; ++at) {
          const int64_t i = piece.indices[at] - local;
          mine[(i / kBlock) * width + i % kBlock] += piece.values[at] * sum.scale;
        }
      }
      cursors[p] = at;
    }
    float *to = sum.out + base;
    const int64_t whole = reinterpret_cast<uintptr_t>(to) & 31 ? 0 : n & ~int64_t{15};
    loop.stream_copy(tile.data(), to, static_cast<size_t>(whole));
    std::memcpy(to + whole, tile.data() + whole, static_cast<size_t>(n - whole) * sizeof(float));
  }
  loop.fence();
}

} // namespace
} // namespace cddp

extern "C" int cddp_accumulate(float *out, int64_t numel, int64_t shards, const cddp_entries *pieces,
                               int64_t n_pieces, float scale, int threads) {
  const cddp::Sum sum{out, numel, shards, pieces, n_pieces, scale};
  const int64_t width = cddp::kBlock * shards, rounds = (numel + width - 1) / width;
  const int n_threads = cddp::worth(numel, threads);
  std::atomic<bool> memory{true};
  cddp::in_parallel(n_threads, [&](int t) {
    try {
      cddp::add_rounds(sum, rounds * t / n_threads, rounds * (t + 1) / n_threads);
    } catch (const std::bad_alloc &) {
      memory = false;
    }
  });
  return memory ? CDDP_OK : CDDP_NO_MEMORY;
}

extern "C" void cddp_add(float *out, int64_t shards, const cddp_entries *pieces, int64_t n_pieces, float scale) {
  for (int64_t p = 0; p < n_pieces; ++p) {
    const cddp_entries &piece = pieces[p];
    const cddp::Deal deal{shards, piece.shard};
    for (int64_t i = 0; i < piece.count; ++i) {
      cddp::prefetch(out + deal.position(piece.indices[std::min(i + cddp::kAhead, piece.count - 1)]));
      out[deal.position(piece.indices[i])] += piece.values[i] * scale;
    }
  }
}

extern "C" void cddp_put_difference(float *out, int64_t shards, int64_t shard, const int64_t *indices,
                                    const float *a, const float *b, int64_t count) {
  const cddp::Deal deal{shards, shard};
  for (int64_t i = 0; i < count; ++i) {
    cddp::prefetch(out + deal.position(indices[std::min(i + cddp::kAhead, count - 1)]));
    out[deal.position(indices[i])] = a[i] - b[i];
  }
}
