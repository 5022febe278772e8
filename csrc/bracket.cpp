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

// Asks for memory that will be read soon: sampled lines lie too far apart for the processor to guess.
inline void prefetch([[maybe_unused]] const float *at) {
#if defined(__GNUC__)
  __builtin_prefetch(at);
#endif
}

// Keys of the sum at sampled places of a segment, from the key `least` on; of every `step`-th line only.
// selection.sample_positions is the same.
int64_t sample(const Job &job, const Segment &segment, int64_t step, uint32_t least, uint32_t *keys) {
  constexpr int64_t kAhead = 32;
  const Deal deal{job.shards, segment.quota.shard};
  const int64_t lines = sample_lines(segment.size());
  const int64_t width = lines == 0 ? 0 : segment.size() / lines;
  const auto place = [&](int64_t j) {
    const int64_t jitter = (j * 40503 % 65536) * (width - kLine + 1) / 65536;
    return segment.quota.start + (j * width + jitter) / kLine * kLine;
  };
  int64_t count = 0;
  const auto add = [&](int64_t local, int64_t n) {
    while (n > 0) {
      const int64_t run = std::min({n, kLine, job.shards == 1 ? n : kBlock - local % kBlock});
      const int64_t at = position(deal, local);
      float sums[kLine + 16], unused[kLine];
      uint32_t indices[kLine + 16];
      const size_t found = loops().filter(job.residual ? job.residual + at : nullptr, job.gradient + at, unused,
                                          static_cast<size_t>(run), 0, least, sums, indices, true, false);
      for (size_t i = 0; i < found; ++i) keys[count++] = key_of(sums[i]);
      local += run;
      n -= run;
    }
  };
  if (lines == 0) add(segment.quota.start, segment.size());
  for (int64_t j = 0; j < lines; j += step) {
    if (const int64_t ahead = j + step * kAhead; ahead < lines) {
      const int64_t at = position(deal, place(ahead));
      prefetch(job.gradient + at);
      if (job.residual) prefetch(job.residual + at);
    }
    add(place(j), kLine);
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
  const int64_t lines = sample_lines(size), n = lines == 0 ? size : lines * kLine;
  int64_t sampled = n; // so many of the keys are known: the largest ones
  const auto ranked = [&](int64_t rank) {
    std::copy(keys, keys + sampled, work);
    return std::min(kth_largest(work, sampled, rank).key, kInfinity - 1);
  };
  if (n == size) { // small enough to look at everything: this is the k-th
    sample(job, segment, 1, 0, keys);
    segment.low = ranked(k);
    segment.high = segment.low + 1;
    segment.capacity = size;
    return;
  }
  // Entries of a line are alike, so the spread is wider than that of independent draws.
  const auto margin_of = [](double rank) { return 5.0 * std::sqrt(1.5 * rank) + 4.0; };
  const double rank = static_cast<double>(n * k) / static_cast<double>(size), margin = margin_of(rank);
  const int64_t low = job.exact ? std::min(n, static_cast<int64_t>(rank + margin) + 1)
                                : std::max<int64_t>(1, static_cast<int64_t>(rank + 0.5));
  uint32_t least = 0;
  if (lines >= 1024) { // a sixteenth of the sample says which keys of it will not matter
    constexpr int64_t kStep = 16;
    const double part = static_cast<double>(low) / kStep;
    sampled = sample(job, segment, kStep, 0, keys);
    least = ranked(std::min(sampled, static_cast<int64_t>(part + margin_of(part)) + 1));
  }
  sampled = sample(job, segment, 1, least, keys);
  if (sampled < low) sampled = sample(job, segment, 1, 0, keys); // that was wrong
  segment.low = ranked(low);
  if (!job.exact) {
    segment.exact = false;
    segment.high = kInfinity;
    segment.capacity = std::min(size, 2 * k);
    return;
  }
  if (rank - margin >= 1.0) segment.high = ranked(static_cast<int64_t>(rank - margin)) + 1;
  // Twice what is expected to be listed, which for small ranks is several times k.
  segment.capacity = std::min(size, std::max(3 * k, 2 * (low * size / n)) + 256);
  // Many equal keys at the bracket's lower end: list what is above them, and fill up from them.
  const auto listed = std::count_if(keys, keys + sampled, [&](uint32_t key) { return key >= segment.low; });
  if (static_cast<double>(listed) * static_cast<double>(size) > 0.8 * static_cast<double>(n * segment.capacity)) {
    segment.tie = segment.low++;
    segment.high = std::max(segment.high, segment.low);
  }
}

} // namespace cddp
