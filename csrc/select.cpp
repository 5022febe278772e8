// residual + gradient less its largest entries, in one pass over memory.
//
// 1. A sample of the sum brackets the k-th magnitude between two keys, low and high.
// 2. One pass writes the sum and moves everything from `low` on (a little more than k) to a list.
// 3. The exact k-th is found among the listed keys below `high`; entries beyond k go back.
// Where the sample was wrong (fewer than k listed, or too many to hold), the list goes back and the
// k-th is found by counting digits of all keys. Either way the result is exact, and ties go to the
// lower index whatever the number of threads.

#include "kernels.h"
#include "loops.h"
#include "scratch.h"
#include "threads.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <functional>
#include <memory>
#include <new>
#include <vector>

namespace cddp {
namespace {

constexpr int64_t kTile = 512;    // longest run given to one call of Loops::filter
constexpr int64_t kSlack = kTile + 8;
constexpr int64_t kLine = 16;     // elements sampled together: a cache line
constexpr int64_t kStreamFrom = 1 << 19; // elements from which results are written past the caches
constexpr uint32_t kNothing = 0xffffffffu;

// One quota and what is known about it.
struct Segment {
  cddp_quota quota;
  uint32_t low = 0, high = kInfinity; // the bracket: [low, high) holds the k-th key, most likely
  uint32_t tie = kNothing;            // many elements have this very key, and low is the next one
  int64_t capacity = 0;               // entries a list may hold
  bool dense = false;                 // expect many entries
  bool exact = true;
  int64_t size() const { return quota.stop - quota.start; }
};

// What one thread found for one segment, in increasing order.
struct List {
  float *values = nullptr;
  uint32_t *indices = nullptr;
  int64_t count = 0;
  bool full = false; // gave up: too many
};

struct Job {
  const float *residual, *gradient;
  float *out;
  int64_t numel, shards;
  bool exact, stream;
  float sum(int64_t at) const { return residual ? residual[at] + gradient[at] : gradient[at]; }
};

// --- ranks ------------------------------------------------------------------------------------

struct Rank {
  uint32_t key;  // the rank-th largest
  int64_t above; // how many are larger
};

// The rank-th largest (from 1) of n keys, by their digits from the top; keys are reordered.
Rank kth_largest(uint32_t *keys, int64_t n, int64_t rank) {
  static constexpr int kShifts[3] = {20, 10, 0};
  uint32_t prefix = 0;
  int64_t above = 0;
  for (const int shift : kShifts) {
    if (n <= 64) {
      std::nth_element(keys, keys + (rank - 1), keys + n, std::greater<uint32_t>());
      const uint32_t key = keys[rank - 1];
      return {key, above + std::count_if(keys, keys + n, [key](uint32_t other) { return other > key; })};
    }
    const uint32_t mask = shift == 20 ? 0x7ffu : 0x3ffu;
    uint32_t counts[2048] = {};
    for (int64_t i = 0; i < n; ++i) ++counts[keys[i] >> shift & mask];
    uint32_t digit = mask;
    while (static_cast<int64_t>(counts[digit]) < rank) {
      rank -= counts[digit];
      above += counts[digit];
      --digit;
    }
    int64_t kept = 0;
    for (int64_t i = 0; i < n; ++i) {
      const uint32_t key = keys[i];
      keys[kept] = key;
      kept += (key >> shift & mask) == digit;
    }
    n = kept;
    prefix |= digit << shift;
  }
  return {prefix, above};
}

// --- the sample -------------------------------------------------------------------------------

// How many lines of 16 are sampled of `size` elements; 0: all of them are looked at.
int64_t sample_lines(int64_t size) {
  return size <= 2048 ? 0 : std::min<int64_t>(std::max<int64_t>(size / 2048, 128), 8192);
}

// Keys of the sum at sampled places of a segment. selection.sample_positions is the same.
int64_t sample(const Job &job, const Segment &segment, uint32_t *keys) {
  const Deal deal{job.shards, segment.quota.shard};
  int64_t count = 0;
  const auto add = [&](int64_t local, int64_t n) {
    while (n > 0) {
      const int64_t run = job.shards == 1 ? n : std::min(n, kBlock - local % kBlock);
      const int64_t at = position(deal, local);
      for (int64_t i = 0; i < run; ++i) keys[count++] = key_of(job.sum(at + i));
      local += run;
      n -= run;
    }
  };
  const int64_t lines = sample_lines(segment.size());
  if (lines == 0) {
    add(segment.quota.start, segment.size());
    return count;
  }
  const int64_t width = segment.size() / lines;
  for (int64_t j = 0; j < lines; ++j) {
    const int64_t jitter = (j * 40503 % 65536) * (width - kLine + 1) / 65536;
    add(segment.quota.start + (j * width + jitter) / kLine * kLine, kLine);
  }
  return count;
}

// Sets the segment's bracket and how much a list must hold. keys and work have room for a sample.
void bracket(const Job &job, Segment &segment, uint32_t *keys, uint32_t *work) {
  const int64_t size = segment.size(), k = segment.quota.k;
  segment.dense = k * 33 > size;
  if (k == 0 || k == size) { // nothing, or everything: no threshold to find
    segment.low = segment.high = k == 0 ? kInfinity : 0;
    segment.capacity = k;
    return;
  }
  const int64_t n = sample(job, segment, keys);
  const auto ranked = [&](int64_t rank) {
    std::copy(keys, keys + n, work);
    return std::min(kth_largest(work, n, rank).key, kInfinity - 1);
  };
  if (n == size) { // small enough to look at everything: this is the k-th
    segment.low = ranked(k);
    segment.high = segment.low + 1;
    segment.capacity = size;
    return;
  }
  const double rank = static_cast<double>(n * k) / static_cast<double>(size);
  if (!job.exact) {
    segment.exact = false;
    segment.low = ranked(std::max<int64_t>(1, static_cast<int64_t>(rank + 0.5)));
    segment.high = kInfinity;
    segment.capacity = std::min(size, 2 * k);
    return;
  }
  // Entries of a line are alike, so the spread is wider than that of independent draws.
  const double margin = 5.0 * std::sqrt(1.5 * rank) + 4.0;
  const int64_t low = std::min(n, static_cast<int64_t>(rank + margin) + 1);
  segment.low = ranked(low);
  if (rank - margin >= 1.0) segment.high = ranked(static_cast<int64_t>(rank - margin)) + 1;
  // Twice what is expected to be listed, which for small ranks is several times k.
  segment.capacity = std::min(size, std::max(3 * k, 2 * (low * size / n)) + 256);
  // Many equal keys at the bracket's lower end: list what is above them, and fill up from them.
  const auto listed = std::count_if(keys, keys + n, [&](uint32_t key) { return key >= segment.low; });
  if (static_cast<double>(listed) * static_cast<double>(size) > 0.8 * static_cast<double>(n * segment.capacity)) {
    segment.tie = segment.low++;
    segment.high = std::max(segment.high, segment.low);
  }
}

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

// --- after the pass ---------------------------------------------------------------------------

// Calls visit(pointer into out, length, first local index) for all of a segment, in order; visit
// returns false to stop.
template <typename Visit> void each_run(const Job &job, const Segment &segment, const Visit &visit) {
  const Deal deal{job.shards, segment.quota.shard};
  int64_t local = segment.quota.start;
  while (local < segment.quota.stop) {
    const int64_t rest = segment.quota.stop - local;
    const int64_t n = std::min(rest, job.shards == 1 ? 8 * kTile : kBlock - local % kBlock);
    if (!visit(job.out + position(deal, local), n, local)) return;
    local += n;
  }
}

// The k-th key of everything in `out`, whatever the data: one pass counts leading digits, the next
// gathers the keys that share the k-th's; where those are most of all, their digits are counted too.
Rank kth_of_all(const Job &job, const Segment &segment) {
  static constexpr int kShifts[3] = {20, 10, 0};
  int64_t rank = segment.quota.k, above = 0;
  uint32_t prefix = 0, known = 0; // bits above the digit, and which bits those are
  for (const int shift : kShifts) {
    const uint32_t mask = shift == 20 ? 0x7ffu : 0x3ffu;
    // Four tables, so that equal neighbours do not wait for each other's increment.
    std::array<std::array<uint32_t, 2048>, 4> tables{};
    each_run(job, segment, [&](const float *x, int64_t n, int64_t) {
      for (int64_t i = 0; i < n; ++i) {
        const uint32_t key = key_of(x[i]);
        tables[static_cast<size_t>(i & 3)][key >> shift & mask] += (key & known) == prefix;
      }
      return true;
    });
    const auto total = [&](uint32_t digit) {
      return int64_t{tables[0][digit]} + tables[1][digit] + tables[2][digit] + tables[3][digit];
    };
    uint32_t digit = mask;
    while (total(digit) < rank) {
      rank -= total(digit);
      above += total(digit);
      --digit;
    }
    prefix |= digit << shift;
    known |= mask << shift;
    if (shift > 0 && total(digit) <= segment.size() / 4) {
      std::vector<uint32_t> keys(static_cast<size_t>(total(digit) + 1));
      size_t count = 0;
      each_run(job, segment, [&](const float *x, int64_t n, int64_t) {
        for (int64_t i = 0; i < n; ++i) {
          const uint32_t key = key_of(x[i]);
          keys[count] = key;
          count += (key & known) == prefix;
        }
        return true;
      });
      const Rank kth = kth_largest(keys.data(), total(digit), rank);
      return {kth.key, above + kth.above};
    }
  }
  return {prefix, above};
}

// Takes what is above the k-th key, and the first of its equals, out of `out`.
int64_t take_all_above(const Job &job, const Segment &segment, Rank kth, float *values, int64_t *indices) {
  int64_t taken = 0, ties = segment.quota.k - kth.above;
  each_run(job, segment, [&](float *x, int64_t n, int64_t local) {
    for (int64_t from = 0; from < n; from += 64) {
      const int64_t to = std::min(n, from + 64);
      if (loops().largest(nullptr, x + from, static_cast<size_t>(to - from)) < kth.key) continue;
      for (int64_t i = from; i < to; ++i) {
        const uint32_t key = key_of(x[i]);
        const bool tie = key == kth.key && ties > 0;
        if (key > kth.key || tie) {
          ties -= tie;
          values[taken] = x[i];
          indices[taken++] = local + i;
          x[i] = 0.0f;
        }
      }
    }
    return taken < segment.quota.k;
  });
  return taken;
}

// All that threads listed for one segment, in increasing order.
struct Lists {
  const List *first;
  int64_t threads, stride;
  const List &operator[](int64_t t) const { return first[t * stride]; }
};

// The lowest `wanted` elements whose key is the segment's tie leave `out`; returns how many there
// were. Listed elements are zero there by now, so where the tie is zero they must be passed over.
int64_t take_ties(const Job &job, const Segment &segment, Lists lists, int64_t wanted, float *values,
                  uint32_t *indices) {
  int64_t found = 0, t = 0, next = 0;
  const auto listed = [&](int64_t index) { // asked for increasing indices
    for (; t < lists.threads; ++t, next = 0) {
      while (next < lists[t].count && lists[t].indices[next] < index) ++next;
      if (next < lists[t].count) return lists[t].indices[next] == index;
    }
    return false;
  };
  each_run(job, segment, [&](float *x, int64_t n, int64_t local) {
    for (int64_t i = 0; i < n && found < wanted; ++i) {
      if (key_of(x[i]) != segment.tie || listed(local + i)) continue;
      values[found] = x[i];
      indices[found++] = static_cast<uint32_t>(local + i);
      x[i] = 0.0f;
    }
    return found < wanted;
  });
  return found;
}

// Merges what is listed with the ties, which are not, into `values` and `indices`.
void merge(Lists lists, const float *tie_values, const uint32_t *tie_indices, int64_t ties, float *values,
           int64_t *indices) {
  int64_t at = 0, tie = 0;
  const auto put_tie = [&] {
    values[at] = tie_values[tie];
    indices[at++] = tie_indices[tie++];
  };
  for (int64_t t = 0; t < lists.threads; ++t) {
    const List &list = lists[t];
    for (int64_t i = 0; i < list.count; ++i) {
      while (tie < ties && tie_indices[tie] < list.indices[i]) put_tie();
      values[at] = list.values[i];
      indices[at++] = list.indices[i];
    }
  }
  while (tie < ties) put_tie();
}

// Everything listed goes back, and all keys are counted.
int64_t start_over(const Job &job, const Segment &segment, Lists lists, float *values, int64_t *indices) {
  const Deal deal{job.shards, segment.quota.shard};
  for (int64_t t = 0; t < lists.threads; ++t)
    for (int64_t i = 0; i < lists[t].count; ++i) job.out[position(deal, lists[t].indices[i])] = lists[t].values[i];
  return take_all_above(job, segment, kth_of_all(job, segment), values, indices);
}

// Fewer than k are listed, and the rest are ties.
int64_t fill_up(const Job &job, const Segment &segment, Lists lists, int64_t missing, float *values,
                int64_t *indices) {
  std::vector<float> tie_values(static_cast<size_t>(missing));
  std::vector<uint32_t> tie_indices(static_cast<size_t>(missing));
  const int64_t ties = take_ties(job, segment, lists, missing, tie_values.data(), tie_indices.data());
  if (ties == missing) {
    merge(lists, tie_values.data(), tie_indices.data(), ties, values, indices);
    return segment.quota.k;
  }
  const Deal deal{job.shards, segment.quota.shard};
  for (size_t i = 0; i < static_cast<size_t>(ties); ++i) job.out[position(deal, tie_indices[i])] = tie_values[i];
  return start_over(job, segment, lists, values, indices);
}

// The entries listed, thinned evenly to k, so that no part of the bucket is favoured.
int64_t thin_out(const Job &job, const Segment &segment, Lists lists, int64_t listed, float *values,
                 int64_t *indices) {
  const Deal deal{job.shards, segment.quota.shard};
  int64_t kept = 0, due = 0; // kept = floor(seen * k / listed), due the remainder
  for (int64_t t = 0; t < lists.threads; ++t) {
    const List &list = lists[t];
    for (int64_t i = 0; i < list.count; ++i) {
      due += segment.quota.k;
      if (due >= listed) {
        due -= listed;
        values[kept] = list.values[i];
        indices[kept++] = list.indices[i];
      } else {
        job.out[position(deal, list.indices[i])] = list.values[i];
      }
    }
  }
  return kept;
}

// Entries above the k-th key and the first `ties` equal to it stay; the others go back.
int64_t settle(const Job &job, const Segment &segment, Lists lists, uint32_t kth, size_t ties, float *values,
               int64_t *indices) {
  const Deal deal{job.shards, segment.quota.shard};
  int64_t kept = 0;
  for (int64_t t = 0; t < lists.threads; ++t) {
    const List &list = lists[t];
    kept += static_cast<int64_t>(loops().settle(list.values, list.indices, static_cast<size_t>(list.count), kth,
                                                &ties, deal, values + kept, indices + kept,
                                                static_cast<size_t>(segment.quota.k - kept), job.out));
  }
  return kept;
}

// Brings one segment's lists down to exactly k entries. Returns how many were taken, or -1 where an
// entry is not finite. keys has room for all that is listed, and 8 more.
int64_t finish(const Job &job, const Segment &segment, Lists lists, uint32_t *keys, float *values, int64_t *indices) {
  const int64_t k = segment.quota.k;
  int64_t listed = 0;
  uint32_t top = 0;
  bool full = false;
  const auto keys_below = [&](uint32_t high) {
    int64_t n = 0;
    for (int64_t t = 0; t < lists.threads; ++t)
      n += static_cast<int64_t>(
          loops().below(lists[t].values, static_cast<size_t>(lists[t].count), high, keys + n, &top));
    return n;
  };
  const int64_t inside = keys_below(segment.high);
  for (int64_t t = 0; t < lists.threads; ++t) {
    listed += lists[t].count;
    full |= lists[t].full;
  }
  if (top >= kInfinity) return -1;
  if (k == 0) return 0;
  if (full || listed > segment.capacity) return start_over(job, segment, lists, values, indices);
  if (!segment.exact && 2 * listed >= k && listed > k) return thin_out(job, segment, lists, listed, values, indices);
  if (!segment.exact && 2 * listed >= k) return settle(job, segment, lists, 0, SIZE_MAX, values, indices);
  if (listed < k && segment.tie == kNothing) return start_over(job, segment, lists, values, indices);
  if (listed < k) return fill_up(job, segment, lists, k - listed, values, indices);
  if (listed == k) return settle(job, segment, lists, 0, SIZE_MAX, values, indices);
  const int64_t sure = listed - inside; // at or above the bracket
  if (sure < k) {
    const Rank kth = kth_largest(keys, inside, k - sure);
    return settle(job, segment, lists, kth.key, static_cast<size_t>(k - sure - kth.above), values, indices);
  }
  const Rank kth = kth_largest(keys, keys_below(kInfinity), k); // the bracket lies too low
  return settle(job, segment, lists, kth.key, static_cast<size_t>(k - kth.above), values, indices);
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
  const int64_t sampled = std::max<int64_t>(2048, sample_lines(largest_size) * kLine);
  {
    std::unique_ptr<uint32_t[]> keys(new uint32_t[static_cast<size_t>(2 * sampled)]);
    for (Segment &segment : segments) bracket(job, segment, keys.get(), keys.get() + sampled);
  }

  // Threads get whole rounds of blocks.
  const int64_t round = job.shards;
  const int64_t rounds = (job.numel + kBlock * round - 1) / (kBlock * round);
  const int64_t share = kBlock * ((rounds + n_threads - 1) / n_threads); // elements of a shard that one sees
  // Lists for each thread and segment.
  int64_t room = 0, widest = 0;
  const auto list_room = [&](const Segment &segment) { return std::min(segment.capacity, share) + kSlack; };
  for (const Segment &segment : segments) {
    room += list_room(segment) + 16;
    widest = std::max(widest, list_room(segment));
  }
  const int64_t keys_room = n_threads * widest + 8;
  const auto n_lists = static_cast<int64_t>(n_threads) * n_quotas;
  Scratch &scratch = Scratch::mine();
  scratch.reserve(static_cast<size_t>(n_threads * (2 * room + 32 * n_quotas) + keys_room + 64) * 4);
  std::vector<List> lists(static_cast<size_t>(n_lists));
  for (int64_t t = 0; t < n_threads; ++t) {
    for (int64_t q = 0; q < n_quotas; ++q) {
      const int64_t capacity = list_room(segments[static_cast<size_t>(q)]);
      lists[static_cast<size_t>(t * n_quotas + q)].values = scratch.take<float>(capacity);
      lists[static_cast<size_t>(t * n_quotas + q)].indices = scratch.take<uint32_t>(capacity);
    }
  }
  auto *keys = scratch.take<uint32_t>(keys_room);

  std::atomic<bool> finite{true}, memory{true};
  in_parallel(n_threads, [&](int t) {
    const int64_t first = rounds * t / n_threads * round, last = rounds * (t + 1) / n_threads * round;
    try {
      if (!pass(job, segments, begins, first, last, lists.data() + t * n_quotas)) finite = false;
    } catch (const std::bad_alloc &) {
      memory = false;
    }
  });
  if (!memory) return CDDP_NO_MEMORY;
  if (!finite) return CDDP_NOT_FINITE;
  for (int64_t q = 0; q < n_quotas; ++q) {
    const Lists found{lists.data() + q, n_threads, n_quotas};
    taken[q] = finish(job, segments[static_cast<size_t>(q)], found, keys, values, indices);
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
