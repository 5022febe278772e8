// The loops with vectors of 256 bits; loops.h says what each does.

#pragma once

#include "loops_one.h"

#include <bit>
#include <immintrin.h>

namespace cddp {
namespace {
namespace avx2 {

// From one entry in so many elements on, lanes are moved without asking whether there is any.
constexpr int64_t kDenseFrom = 33;

// Row m lists the set bits of m: the permutation that brings the chosen lanes to the front.
struct Fronts {
  alignas(64) uint8_t lanes[256][8];
  constexpr Fronts() : lanes() {
    for (int m = 0; m < 256; ++m) {
      int at = 0;
      for (int bit = 0; bit < 8; ++bit)
        if (m >> bit & 1) lanes[m][at++] = static_cast<uint8_t>(bit);
      while (at < 8) lanes[m][at++] = 0;
    }
  }
};
constexpr Fronts fronts;

inline __m256i front(unsigned mask) {
  return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i *>(fronts.lanes[mask])));
}

inline __m256i keys_of(__m256 x) {
  return _mm256_and_si256(_mm256_castps_si256(x), _mm256_set1_epi32(0x7fffffff));
}

inline unsigned bits_of(__m256i mask) {
  return static_cast<unsigned>(_mm256_movemask_ps(_mm256_castsi256_ps(mask)));
}

inline void store(uint32_t *to, __m256i x) { _mm256_storeu_si256(reinterpret_cast<__m256i *>(to), x); }

inline void widen(int64_t *to, __m256i x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i *>(to), _mm256_cvtepu32_epi64(_mm256_castsi256_si128(x)));
  _mm256_storeu_si256(reinterpret_cast<__m256i *>(to + 4), _mm256_cvtepu32_epi64(_mm256_extracti128_si256(x, 1)));
}

template <bool kResidual> inline __m256 sum8(const float *r, const float *g, size_t at) {
  const __m256 x = _mm256_loadu_ps(g + at);
  if constexpr (kResidual) return _mm256_add_ps(_mm256_loadu_ps(r + at), x); // otherwise r is null
  return x;
}

template <bool kResidual, bool kDense, bool kStream>
size_t filter_with(const float *r, const float *g, float *out, size_t n, uint32_t first, uint32_t low, float *values,
                   uint32_t *indices) {
  size_t count = 0, i = 0;
  const auto one = [&](size_t at) {
    const float sum = kResidual ? r[at] + g[at] : g[at];
    count += filter_one(sum, out + at, first + static_cast<uint32_t>(at), low, values + count, indices + count);
  };
  const auto write = [&](size_t at, __m256 x) {
    if constexpr (kStream)
      _mm256_stream_ps(out + at, x);
    else
      _mm256_storeu_ps(out + at, x);
  };
  if (kStream)
    for (; i < n && (reinterpret_cast<uintptr_t>(out + i) & 31); ++i) one(i);
  const __m256i below = _mm256_set1_epi32(static_cast<int>(low) - 1);
  for (; i + 32 <= n; i += 32) {
    if constexpr (kStream) { // the processor's own prefetcher stops at pages
      for (int line = 0; line < 32; line += 16) {
        _mm_prefetch(reinterpret_cast<const char *>(g + i + 512 + line), _MM_HINT_T0);
        if (kResidual) _mm_prefetch(reinterpret_cast<const char *>(r + i + 512 + line), _MM_HINT_T0);
      }
    }
    __m256 sum[4];
    __m256i hit[4];
    for (int v = 0; v < 4; ++v) {
      sum[v] = sum8<kResidual>(r, g, i + 8 * static_cast<size_t>(v));
      hit[v] = _mm256_cmpgt_epi32(keys_of(sum[v]), below);
    }
    const __m256i any = _mm256_or_si256(_mm256_or_si256(hit[0], hit[1]), _mm256_or_si256(hit[2], hit[3]));
    if (_mm256_testz_si256(any, any)) {
      for (int v = 0; v < 4; ++v) write(i + 8 * v, sum[v]);
      continue;
    }
    if constexpr (kDense) {
      for (int v = 0; v < 4; ++v) {
        const unsigned bits = bits_of(hit[v]);
        const __m256i lanes = front(bits);
        const int base = static_cast<int>(first + static_cast<uint32_t>(i) + 8u * static_cast<unsigned>(v));
        _mm256_storeu_ps(values + count, _mm256_permutevar8x32_ps(sum[v], lanes));
        store(indices + count, _mm256_add_epi32(lanes, _mm256_set1_epi32(base)));
        count += static_cast<size_t>(std::popcount(bits));
      }
    } else {
      unsigned bits = bits_of(hit[0]) | bits_of(hit[1]) << 8 | bits_of(hit[2]) << 16 | bits_of(hit[3]) << 24;
      for (; bits; bits &= bits - 1) {
        const size_t at = i + static_cast<size_t>(std::countr_zero(bits));
        values[count] = kResidual ? r[at] + g[at] : g[at];
        indices[count++] = first + static_cast<uint32_t>(at);
      }
    }
    for (int v = 0; v < 4; ++v) write(i + 8 * v, _mm256_andnot_ps(_mm256_castsi256_ps(hit[v]), sum[v]));
  }
  for (; i < n; ++i) one(i);
  return count;
}

size_t filter(const float *r, const float *g, float *out, size_t n, uint32_t first, uint32_t low, float *values,
              uint32_t *indices, bool dense, bool stream) {
  using Filter = size_t (*)(const float *, const float *, float *, size_t, uint32_t, uint32_t, float *, uint32_t *);
  static constexpr Filter all[8] = {
      filter_with<false, false, false>, filter_with<false, false, true>, filter_with<false, true, false>,
      filter_with<false, true, true>,   filter_with<true, false, false>, filter_with<true, false, true>,
      filter_with<true, true, false>,   filter_with<true, true, true>,
  };
  return all[4 * (r != nullptr) + 2 * dense + stream](r, g, out, n, first, low, values, indices);
}

size_t below(const float *values, size_t n, uint32_t high, uint32_t *keys, uint32_t *top) {
  size_t count = 0, i = 0;
  __m256i most = _mm256_set1_epi32(static_cast<int>(*top));
  const __m256i limit = _mm256_set1_epi32(static_cast<int>(high));
  for (; i + 8 <= n; i += 8) {
    const __m256i key = keys_of(_mm256_loadu_ps(values + i));
    most = _mm256_max_epi32(most, key);
    const unsigned bits = bits_of(_mm256_cmpgt_epi32(limit, key));
    store(keys + count, _mm256_permutevar8x32_epi32(key, front(bits)));
    count += static_cast<size_t>(std::popcount(bits));
  }
  alignas(32) uint32_t lanes[8];
  _mm256_store_si256(reinterpret_cast<__m256i *>(lanes), most);
  *top = *std::max_element(lanes, lanes + 8);
  for (; i < n; ++i) count += below_one(values[i], high, keys + count, top);
  return count;
}

size_t settle(const float *values, const uint32_t *indices, size_t n, uint32_t kth, size_t *ties, Deal deal,
              float *kept_values, int64_t *kept_indices, size_t room, float *out) {
  size_t kept = 0, i = 0;
  const __m256i limit = _mm256_set1_epi32(static_cast<int>(kth));
  for (; i + 8 <= n && kept + 8 <= room; i += 8) {
    const __m256 value = _mm256_loadu_ps(values + i);
    const __m256i key = keys_of(value);
    if (bits_of(_mm256_cmpeq_epi32(key, limit))) {
      for (size_t at = i; at < i + 8; ++at)
        settle_one(values[at], indices[at], kth, ties, deal, kept_values, kept_indices, &kept, out);
      continue;
    }
    const __m256i index = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(indices + i));
    const unsigned keep = bits_of(_mm256_cmpgt_epi32(key, limit));
    const __m256i lanes = front(keep);
    _mm256_storeu_ps(kept_values + kept, _mm256_permutevar8x32_ps(value, lanes));
    widen(kept_indices + kept, _mm256_permutevar8x32_epi32(index, lanes));
    kept += static_cast<size_t>(std::popcount(keep));
    for (unsigned back = ~keep & 0xffu; back; back &= back - 1) {
      const size_t at = i + static_cast<size_t>(std::countr_zero(back));
      out[position(deal, indices[at])] = values[at];
    }
  }
  for (; i < n; ++i) settle_one(values[i], indices[i], kth, ties, deal, kept_values, kept_indices, &kept, out);
  return kept;
}

void stream_copy(const float *from, float *to, size_t n) {
  for (size_t i = 0; i < n; i += 8) _mm256_stream_ps(to + i, _mm256_loadu_ps(from + i));
}

void fence() { _mm_sfence(); }

bool read_indices(const IndexPart &part, int64_t, uint32_t *indices, uint64_t *last) {
  return read_indices_one(part, indices, last);
}

} // namespace avx2
} // namespace
} // namespace cddp
