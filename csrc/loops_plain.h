// The loops for any processor: plain C++ that compilers vectorise (SSE2, NEON).

#pragma once

#include "loops_one.h"

namespace cddp {
namespace {
namespace plain {

constexpr int64_t kDenseFrom = 1; // makes no difference

size_t filter(const float *r, const float *g, float *out, size_t n, uint32_t first, uint32_t low, float *values,
              uint32_t *indices, bool, bool) {
  size_t count = 0;
  float sum[64];
  for (size_t i = 0; i < n; i += 64) {
    const size_t m = std::min<size_t>(64, n - i);
    for (size_t j = 0; j < m; ++j) sum[j] = r ? r[i + j] + g[i + j] : g[i + j];
    int32_t top = 0; // a block whose largest is below the filter is passed over at once
    for (size_t j = 0; j < m; ++j) top = std::max(top, static_cast<int32_t>(key_of(sum[j])));
    if (static_cast<uint32_t>(top) < low) {
      std::memcpy(out + i, sum, m * sizeof(float));
      continue;
    }
    for (size_t j = 0; j < m; ++j)
      count += filter_one(sum[j], out + i + j, first + static_cast<uint32_t>(i + j), low, values + count,
                          indices + count);
  }
  return count;
}

size_t below(const float *values, size_t n, uint32_t high, uint32_t *keys, uint32_t *top) {
  size_t count = 0;
  uint32_t best = *top; // a copy: keys and top could be the same memory, for all the compiler knows
  for (size_t i = 0; i < n; ++i) count += below_one(values[i], high, keys + count, &best);
  *top = best;
  return count;
}

size_t settle(const float *values, const uint32_t *indices, size_t n, uint32_t kth, size_t *ties, Deal deal,
              float *kept_values, int64_t *kept_indices, size_t, float *out) {
  size_t kept = 0;
  for (size_t i = 0; i < n; ++i)
    settle_one(values[i], indices[i], kth, ties, deal, kept_values, kept_indices, &kept, out);
  return kept;
}

void stream_copy(const float *from, float *to, size_t n) { std::memcpy(to, from, n * sizeof(float)); }

void fence() {}

bool read_indices(const IndexPart &part, int64_t, uint32_t *indices, uint64_t *last) {
  return read_indices_one(part, indices, last);
}

} // namespace plain
} // namespace
} // namespace cddp
