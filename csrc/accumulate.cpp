// Sums of sparse messages. The result is built tile by tile in the first-level cache and written
// once: neither the zeros nor the additions go over memory by themselves.

#include "kernels.h"
#include "loops.h"
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

// Rounds `first` to `last`; a round is one block of each shard. Returns how many entries were added:
// an index out of order ends its piece, and nothing is written outside.
int64_t add_rounds(const Sum &sum, int64_t first, int64_t last) {
  const Loops &loop = loops();
  const int64_t width = kBlock * sum.shards;
  const int64_t per_tile = std::max<int64_t>(1, kTile / width);
  const bool one_shard = sum.shards == 1;
  int64_t added = 0;
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
      const auto mine = static_cast<uint64_t>(piece.shard * kBlock);
      const auto size = static_cast<uint64_t>(stop - local);
      int64_t at = cursors[p];
      for (; at < piece.count; ++at) {
        const uint64_t i = static_cast<uint64_t>(piece.indices[at]) - static_cast<uint64_t>(local);
        if (i >= size) break;
        const uint64_t place = one_shard ? i : i / kBlock * static_cast<uint64_t>(width) + mine + i % kBlock;
        if (place >= static_cast<uint64_t>(n)) break; // beyond a last block that is not full
        tile[place] += piece.values[at] * sum.scale;
      }
      added += at - cursors[p];
      cursors[p] = at;
    }
    float *to = sum.out + base;
    const int64_t whole = reinterpret_cast<uintptr_t>(to) & 31 ? 0 : n & ~int64_t{15};
    loop.stream_copy(tile.data(), to, static_cast<size_t>(whole));
    std::memcpy(to + whole, tile.data() + whole, static_cast<size_t>(n - whole) * sizeof(float));
  }
  loop.fence();
  return added;
}

} // namespace
} // namespace cddp

extern "C" int cddp_accumulate(float *out, int64_t numel, int64_t shards, const cddp_entries *pieces,
                               int64_t n_pieces, float scale, int threads) {
  const cddp::Sum sum{out, numel, shards, pieces, n_pieces, scale};
  const int64_t width = cddp::kBlock * shards, rounds = (numel + width - 1) / width;
  const int n_threads = cddp::worth(numel, threads);
  int64_t entries = 0;
  for (int64_t p = 0; p < n_pieces; ++p) {
    if (pieces[p].shard < 0 || pieces[p].shard >= shards) return CDDP_OUT_OF_RANGE;
    entries += pieces[p].count;
  }
  std::atomic<bool> memory{true};
  std::atomic<int64_t> added{0};
  cddp::in_parallel(n_threads, [&](int t) {
    try {
      added += cddp::add_rounds(sum, rounds * t / n_threads, rounds * (t + 1) / n_threads);
    } catch (const std::bad_alloc &) {
      memory = false;
    }
  });
  if (!memory) return CDDP_NO_MEMORY;
  return added == entries ? CDDP_OK : CDDP_OUT_OF_RANGE;
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

extern "C" int cddp_add(float *out, int64_t numel, int64_t shards, const cddp_entries *pieces, int64_t n_pieces,
                        float scale) {
  bool inside = true;
  for (int64_t p = 0; p < n_pieces; ++p) {
    const cddp_entries &piece = pieces[p];
    inside &= cddp::at_each(out, numel, {shards, piece.shard}, piece.indices, piece.count,
                            [&](float &x, int64_t i) { x += piece.values[i] * scale; });
  }
  return inside ? CDDP_OK : CDDP_OUT_OF_RANGE;
}

extern "C" int cddp_put_difference(float *out, int64_t numel, int64_t shards, int64_t shard, const int64_t *indices,
                                   const float *a, const float *b, int64_t count) {
  const bool inside = cddp::at_each(out, numel, {shards, shard}, indices, count,
                                    [&](float &x, int64_t i) { x = a[i] - b[i]; });
  return inside ? CDDP_OK : CDDP_OUT_OF_RANGE;
}
