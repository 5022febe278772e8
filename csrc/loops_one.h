// One element at a time: heads, tails, and where there are no vectors.

#pragma once

#include "loops.h"

#include <algorithm>
#include <bit>

namespace cddp {
namespace {

inline size_t filter_one(float sum, float *out, uint32_t index, uint32_t low, float *values, uint32_t *indices) {
  const bool hit = key_of(sum) >= low;
  *values = sum;
  *indices = index;
  *out = hit ? 0.0f : sum;
  return hit;
}

inline void settle_one(float value, uint32_t index, uint32_t kth, size_t *ties, Deal deal, float *kept_values,
                       int64_t *kept_indices, size_t *kept, float *out) {
  const uint32_t key = key_of(value);
  const bool tie = key == kth && *ties > 0;
  if (key > kth || tie) {
    *ties -= tie;
    kept_values[*kept] = value;
    kept_indices[*kept] = index;
    ++*kept;
  } else {
    out[position(deal, index)] = value;
  }
}

// Appends the key of `value` where it is below `high`; raises *top.
inline size_t below_one(float value, uint32_t high, uint32_t *keys, uint32_t *top) {
  const uint32_t key = key_of(value);
  *top = std::max(*top, key);
  *keys = key;
  return key < high;
}

// Loops::read_indices, one by one.
inline bool read_indices_one(const IndexPart &part, uint32_t *indices, uint64_t *last) {
  bool increasing = true;
  uint64_t i = 0, bit = 0;
  for (const uint8_t *at = part.bitmap; at < part.end; at += 8, bit += 64)
    for (uint64_t ones = load64(at, part.end); ones; ones &= ones - 1, ++i) {
      const uint64_t index = index_at(part, bit + static_cast<uint64_t>(std::countr_zero(ones)), i);
      increasing &= i == 0 || index > *last;
      *last = index;
      indices[i] = static_cast<uint32_t>(index);
    }
  return increasing;
}

} // namespace
} // namespace cddp
