// Where the k-th magnitude most likely lies, from a sample of the sums.

#include "segment.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <functional>

namespace cddp {

// By digits from the top, of what tells the keys apart: where they are alike they differ in few bits.
Rank kth_largest(uint32_t *keys, int64_t n, int64_t rank) {
  int64_t above = 0;
  for (;;) {
    if (n <= 64) {
      std::nth_element(keys, keys + (rank - 1), keys + n, std::greater<uint32_t>());
      const uint32_t key = keys[rank - 1];
      return {key, above + std::count_if(keys, keys + n, [key](uint32_t other) { return other > key; })};
    }
    auto bottom = static_cast<int32_t>(keys[0]), top = bottom; // signed ones are compared by vectors everywhere
    for (int64_t i = 1; i < n; ++i) {
      bottom = std::min(bottom, static_cast<int32_t>(keys[i]));
      top = std::max(top, static_cast<int32_t>(keys[i]));
    }
    const auto least = static_cast<uint32_t>(bottom), most = static_cast<uint32_t>(top);
    if (least == most) return {least, above};
    const int shift = std::max(0, static_cast<int>(std::bit_width(most - least)) - 11);
    uint32_t counts[2048] = {};
    for (int64_t i = 0; i < n; ++i) ++counts[(keys[i] - least) >> shift];
    uint32_t digit = (most - least) >> shift;
    while (static_cast<int64_t>(counts[digit]) < rank) {
      rank -= counts[digit];
      above += counts[digit];
      --digit;
    }
    int64_t kept = 0;
    for (int64_t i = 0; i < n; ++i) {
      const uint32_t key = keys[i];
      keys[kept] = key;
      kept += (key - least) >> shift == digit;
    }
    n = kept;
  }
}

namespace {

constexpr int64_t kLine = 16; // elements sampled together: a cache line

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

} // namespace

int64_t sample_size(int64_t size) { return std::max<int64_t>(2048, sample_lines(size) * kLine); }

void bracket(const Job &job, Segment &segment, uint32_t *keys, uint32_t *work) {
  const int64_t size = segment.size(), k = segment.quota.k;
  segment.dense = k * loops().dense_from > size;
  if (k == 0 || k == size) { // nothing, or everything: no threshold to find
    segment.low = segment.high = k == 0 ? kInfinity : 0;
    segment.capacity = k;
    return;
  }
  const int64_t n = sample(job, segment, keys);
  const auto ranked = [&](int64_t rank, uint32_t least = 0) { // which is known to be at least `least`
    int64_t kept = 0;
    for (int64_t i = 0; i < n; ++i) {
      work[kept] = keys[i];
      kept += keys[i] >= least;
    }
    return std::min(kth_largest(work, kept, rank).key, kInfinity - 1);
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
  if (rank - margin >= 1.0) segment.high = ranked(static_cast<int64_t>(rank - margin), segment.low) + 1;
  // Twice what is expected to be listed, which for small ranks is several times k.
  segment.capacity = std::min(size, std::max(3 * k, 2 * (low * size / n)) + 256);
  // Many equal keys at the bracket's lower end: list what is above them, and fill up from them.
  const auto listed = std::count_if(keys, keys + n, [&](uint32_t key) { return key >= segment.low; });
  if (static_cast<double>(listed) * static_cast<double>(size) > 0.8 * static_cast<double>(n * segment.capacity)) {
    segment.tie = segment.low++;
    segment.high = std::max(segment.high, segment.low);
  }
}

} // namespace cddp
