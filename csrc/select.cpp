// residual + gradient less its largest entries, in one pass over memory.
//
// 1. A sample of the sum brackets the k-th magnitude between two keys, low and high.
// 2. One pass writes the sum and moves everything from `low` on (a little more than k) to a list.
// 3. The exact k-th is found among the listed keys below `high`; entries beyond k go back.
// Where the sample was wrong (fewer than k listed, or too many to hold), the list goes back and the
// k-th is found by counting digits of all keys. Either way the result is exact, and ties go to the
// lower index whatever the number of threads.

#include "segment.h"
#include "scratch.h"
#include "threads.h"

#include <algorithm>
#include <atomic>
#include <memory>
#include <new>
#include <vector>

namespace cddp {
namespace {

constexpr int64_t kTile = 2048;          // longest run given to one call of Loops::filter
constexpr int64_t kSlack = kTile + 16;   // what a list needs beyond its capacity
constexpr int64_t kStreamFrom = 1 << 19; // elements from which results are written past the caches

// --- the pass ---------------------------------------------------------------------------------

// The segments of one shard, first to last, and a place among them that only moves on.
struct Cursor {
  int64_t at, end;
};

// Works on the elements from block `first` to block `last`; lists has one entry for each segment.
// Returns false where an element outside all quotas is not finite.
bool pass(const Job &job, const std::vector<Segment> &segments, const std::vector<Cursor> &begins, int64_t first,
          int64_t last, List *lists) {
  const Loops &loop = loops();
  bool finite = true;
  float lost_values[kSlack];
  uint32_t lost_indices[kSlack];
  std::vector<Cursor> cursors = begins;

  // Elements [local, local + n) of a shard, which lie at `at` in the bucket; quotas cut them up.
  const auto run = [&](Cursor &cursor, int64_t local, int64_t n, int64_t at) {
    while (n > 0) {
      while (cursor.at < cursor.end && segments[static_cast<size_t>(cursor.at)].quota.stop <= local) ++cursor.at;
      int64_t length = std::min(n, kTile);
      const Segment *segment = cursor.at < cursor.end ? &segments[static_cast<size_t>(cursor.at)] : nullptr;
      List *list = nullptr;
      if (segment && segment->quota.start > local) { // before it
        length = std::min(length, segment->quota.start - local);
      } else if (segment) {
        length = std::min(length, segment->quota.stop - local);
        list = &lists[cursor.at];
      }
      const float *r = job.residual ? job.residual + at : nullptr;
      const auto size = static_cast<size_t>(length);
      const auto index = static_cast<uint32_t>(local);
      if (list && !list->full) {
        list->count += static_cast<int64_t>(loop.filter(r, job.gradient + at, job.out + at, size, index,
                                                        segment->low, list->values + list->count,
                                                        list->indices + list->count, segment->dense, job.stream));
        list->full = list->count > segment->capacity;
      } else if (loop.filter(r, job.gradient + at, job.out + at, size, index, kInfinity, lost_values, lost_indices,
                             false, job.stream)) {
        finite = false;
      }
      local += length;
      at += length;
      n -= length;
    }
  };

  const int64_t begin = first * kBlock, end = std::min(last * kBlock, job.numel);
  if (job.shards == 1) {
    run(cursors[0], begin, end - begin, begin);
  } else {
    int64_t at = begin; // where a round begins, so shards take turns from the first one on
    for (int64_t local = first / job.shards * kBlock; at < end; local += kBlock)
      for (Cursor &cursor : cursors) {
        if (at >= end) break;
        run(cursor, local, std::min(kBlock, end - at), at);
        at += kBlock;
      }
  }
  loop.fence();
  return finite;
}

int take(const Job &job, const cddp_quota *quotas, int64_t n_quotas, float *values, int64_t *indices, int64_t *taken,
         int threads) {
  std::vector<Segment> segments(static_cast<size_t>(n_quotas));
  std::vector<Cursor> begins(static_cast<size_t>(job.shards), Cursor{0, 0});
  int64_t largest_size = 0;
  for (int64_t q = 0; q < n_quotas; ++q) {
    segments[static_cast<size_t>(q)].quota = quotas[q];
    Cursor &cursor = begins[static_cast<size_t>(quotas[q].shard)];
    if (cursor.end == 0) cursor.at = q;
    cursor.end = q + 1;
    largest_size = std::max(largest_size, quotas[q].stop - quotas[q].start);
  }
  const int n_threads = worth(job.numel, threads);
  const int64_t sampled = sample_size(largest_size);
  {
    std::unique_ptr<uint32_t[]> keys(new uint32_t[static_cast<size_t>(2 * sampled)]);
    for (Segment &segment : segments) bracket(job, segment, keys.get(), keys.get() + sampled);
  }

  // Threads get whole rounds of blocks.
  const int64_t round = job.shards;
  const int64_t rounds = (job.numel + kBlock * round - 1) / (kBlock * round);
  const int64_t share = kBlock * ((rounds + n_threads - 1) / n_threads); // elements of a shard that one sees
  // Lists for each thread and segment.
  int64_t room = 0;
  const auto list_room = [&](const Segment &segment) { return std::min(segment.capacity, share) + kSlack; };
  for (const Segment &segment : segments) room += list_room(segment) + 16;
  const auto n_lists = static_cast<int64_t>(n_threads) * n_quotas;
  Scratch &scratch = Scratch::mine();
  scratch.reserve(static_cast<size_t>(n_threads * (3 * room + 48 * n_quotas) + 64) * 4);
  std::vector<List> lists(static_cast<size_t>(n_lists));
  for (int64_t t = 0; t < n_threads; ++t) {
    for (int64_t q = 0; q < n_quotas; ++q) {
      const int64_t capacity = list_room(segments[static_cast<size_t>(q)]);
      lists[static_cast<size_t>(t * n_quotas + q)].values = scratch.take<float>(capacity);
      lists[static_cast<size_t>(t * n_quotas + q)].indices = scratch.take<uint32_t>(capacity);
    }
  }
  for (int64_t q = 0; q < n_quotas; ++q) {
    const int64_t capacity = list_room(segments[static_cast<size_t>(q)]);
    auto *keys = scratch.take<uint32_t>(n_threads * capacity);
    for (int64_t t = 0; t < n_threads; ++t) lists[static_cast<size_t>(t * n_quotas + q)].keys = keys + t * capacity;
  }

  std::atomic<bool> finite{true}, memory{true};
  in_parallel(n_threads, [&](int t) {
    const int64_t first = rounds * t / n_threads * round, last = rounds * (t + 1) / n_threads * round;
    List *mine = lists.data() + t * n_quotas;
    try {
      if (!pass(job, segments, begins, first, last, mine)) finite = false;
      // Keys are read by the core that wrote the list: lines that two cores share are slow to write again.
      for (const Segment &segment : segments) {
        mine->inside = static_cast<int64_t>(
            loops().below(mine->values, static_cast<size_t>(mine->count), segment.high, mine->keys, &mine->top));
        ++mine;
      }
    } catch (const std::bad_alloc &) {
      memory = false;
    }
  });
  if (!memory) return CDDP_NO_MEMORY;
  if (!finite) return CDDP_NOT_FINITE;
  for (int64_t q = 0; q < n_quotas; ++q) {
    const Lists found{lists.data() + q, n_threads, n_quotas};
    taken[q] = finish(job, segments[static_cast<size_t>(q)], found, values, indices);
    if (taken[q] < 0) return CDDP_NOT_FINITE;
    values += quotas[q].k;
    indices += quotas[q].k;
  }
  return CDDP_OK;
}

} // namespace
} // namespace cddp

extern "C" int cddp_take_topk(const float *residual, const float *gradient, float *out, int64_t numel, int64_t shards,
                              const cddp_quota *quotas, int64_t n_quotas, float *values, int64_t *indices,
                              int64_t *taken, int exact, int threads) {
  const bool stream = numel >= cddp::kStreamFrom && out != residual;
  const cddp::Job job{residual, gradient, out, numel, shards, exact != 0, stream};
  try {
    return cddp::take(job, quotas, n_quotas, values, indices, taken, threads);
  } catch (const std::bad_alloc &) {
    return CDDP_NO_MEMORY;
  }
}

extern "C" int cddp_finite(const float *residual, const float *gradient, int64_t numel) {
  for (int64_t at = 0; at < numel; at += 65536) {
    const auto n = static_cast<size_t>(std::min<int64_t>(65536, numel - at));
    if (cddp::loops().largest(residual ? residual + at : nullptr, gradient + at, n) >= cddp::kInfinity) return 0;
  }
  return 1;
}
