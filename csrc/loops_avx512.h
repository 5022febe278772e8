// The loops with vectors of 512 bits, which can bring chosen lanes to the front by themselves.

#pragma once

#include "loops_avx2.h"

namespace cddp {
namespace {
namespace avx512 {

constexpr int64_t kDenseFrom = 400;

inline __m512i keys_of(__m512 x) { return _mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32(0x7fffffff)); }

inline size_t ones(__mmask16 mask) { return static_cast<size_t>(std::popcount(static_cast<unsigned>(mask))); }

// The lanes below `n`.
inline __mmask16 first_lanes(size_t n) { return static_cast<__mmask16>(n >= 16 ? 0xffffu : (1u << n) - 1); }

template <bool kResidual> inline __m512 sum16(const float *r, const float *g, size_t at, __mmask16 lanes = 0xffff) {
  const __m512 x = _mm512_maskz_loadu_ps(lanes, g + at);
  if constexpr (kResidual) return _mm512_add_ps(_mm512_maskz_loadu_ps(lanes, r + at), x); // otherwise r is null
  return x;
}

template <bool kResidual, bool kDense, bool kStream>
size_t filter_with(const float *r, const float *g, float *out, size_t n, uint32_t first, uint32_t low, float *values,
                   uint32_t *indices) {
  size_t count = 0, i = 0;
  const __m512i limit = _mm512_set1_epi32(static_cast<int>(low));
  const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  // Appends the lanes `hit`, and returns the others.
  const auto move = [&](__m512 sum, __mmask16 hit, size_t at) {
    const __m512i index = _mm512_add_epi32(lane, _mm512_set1_epi32(static_cast<int>(first + static_cast<uint32_t>(at))));
    _mm512_storeu_ps(values + count, _mm512_maskz_compress_ps(hit, sum));
    _mm512_storeu_si512(indices + count, _mm512_maskz_compress_epi32(hit, index));
    count += ones(hit);
    return _mm512_maskz_mov_ps(static_cast<__mmask16>(~hit), sum);
  };
  const auto write = [&](size_t at, __m512 x) {
    if constexpr (kStream)
      _mm512_stream_ps(out + at, x);
    else
      _mm512_storeu_ps(out + at, x);
  };
  if constexpr (kDense) {
    for (; i + 16 <= n; i += 16) {
      const __m512 sum = sum16<kResidual>(r, g, i);
      write(i, move(sum, _mm512_cmpge_epi32_mask(keys_of(sum), limit), i));
    }
  } else {
    for (; i + 32 <= n; i += 32) {
      __m512 sum[2];
      __mmask16 hit[2];
      for (size_t v = 0; v < 2; ++v) {
        sum[v] = sum16<kResidual>(r, g, i + 16 * v);
        hit[v] = _mm512_cmpge_epi32_mask(keys_of(sum[v]), limit);
      }
      if (hit[0] | hit[1])
        for (size_t v = 0; v < 2; ++v)
          if (hit[v]) sum[v] = move(sum[v], hit[v], i + 16 * v);
      for (size_t v = 0; v < 2; ++v) write(i + 16 * v, sum[v]);
    }
  }
  for (; i < n; i += 16) {
    const __mmask16 lanes = first_lanes(n - i);
    const __m512 sum = sum16<kResidual>(r, g, i, lanes);
    _mm512_mask_storeu_ps(out + i, lanes, move(sum, _mm512_mask_cmpge_epi32_mask(lanes, keys_of(sum), limit), i));
  }
  return count;
}

size_t filter(const float *r, const float *g, float *out, size_t n, uint32_t first, uint32_t low, float *values,
              uint32_t *indices, bool dense, bool stream) {
  // Lines that are only half written past the caches cost dearly.
  stream &= (reinterpret_cast<uintptr_t>(out) & 63) == 0;
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
  __m512i most = _mm512_set1_epi32(static_cast<int>(*top));
  const __m512i limit = _mm512_set1_epi32(static_cast<int>(high));
  for (; i < n; i += 16) {
    const __mmask16 lanes = first_lanes(n - i);
    const __m512i key = keys_of(_mm512_maskz_loadu_ps(lanes, values + i));
    most = _mm512_max_epi32(most, key);
    const __mmask16 chosen = _mm512_mask_cmplt_epi32_mask(lanes, key, limit);
    _mm512_storeu_si512(keys + count, _mm512_maskz_compress_epi32(chosen, key));
    count += ones(chosen);
  }
  *top = static_cast<uint32_t>(_mm512_reduce_max_epi32(most));
  return count;
}

size_t settle(const float *values, const uint32_t *indices, size_t n, uint32_t kth, size_t *ties, Deal deal,
              float *kept_values, int64_t *kept_indices, size_t room, float *out) {
  size_t kept = 0, i = 0, going = 0;
  const __m512i limit = _mm512_set1_epi32(static_cast<int>(kth));
  // What goes back is gathered first: to ask for each would be a guess that is often wrong.
  constexpr size_t kGoing = 1024;
  float back_values[kGoing + 16];
  uint32_t back_indices[kGoing + 16];
  const auto bring_back = [&] {
    for (size_t at = 0; at < going; ++at) out[position(deal, back_indices[at])] = back_values[at];
    going = 0;
  };
  for (; i + 16 <= n && kept + 16 <= room; i += 16) {
    const __m512 value = _mm512_loadu_ps(values + i);
    const __m512i key = keys_of(value);
    if (_mm512_cmpeq_epi32_mask(key, limit)) {
      for (size_t at = i; at < i + 16; ++at)
        settle_one(values[at], indices[at], kth, ties, deal, kept_values, kept_indices, &kept, out);
      continue;
    }
    const __mmask16 keep = _mm512_cmpgt_epi32_mask(key, limit), back = static_cast<__mmask16>(~keep);
    const __m512i all = _mm512_loadu_si512(indices + i), index = _mm512_maskz_compress_epi32(keep, all);
    _mm512_storeu_ps(kept_values + kept, _mm512_maskz_compress_ps(keep, value));
    _mm512_storeu_si512(kept_indices + kept, _mm512_cvtepu32_epi64(_mm512_castsi512_si256(index)));
    _mm512_storeu_si512(kept_indices + kept + 8, _mm512_cvtepu32_epi64(_mm512_extracti64x4_epi64(index, 1)));
    kept += ones(keep);
    _mm512_storeu_ps(back_values + going, _mm512_maskz_compress_ps(back, value));
    _mm512_storeu_si512(back_indices + going, _mm512_maskz_compress_epi32(back, all));
    going += ones(back);
    if (going >= kGoing) bring_back();
  }
  bring_back();
  for (; i < n; ++i) settle_one(values[i], indices[i], kth, ties, deal, kept_values, kept_indices, &kept, out);
  return kept;
}

bool read_indices(const IndexPart &part, int64_t count, uint32_t *indices, uint64_t *last) {
  const auto n = static_cast<size_t>(count), width = static_cast<size_t>(part.width);
  const auto bitmap_bytes = static_cast<size_t>(part.end - part.bitmap);
  if (n == 0 || width > 25 || bitmap_bytes >> 28) return read_indices_one(part, indices, last);
  const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  size_t found = 0;
  for (size_t at = 0; at < bitmap_bytes; at += 8) { // where the ones are
    uint64_t word = load64(part.bitmap + at, part.end);
    for (size_t bit = 8 * at; bit < 8 * at + 64; bit += 16, word >>= 16) {
      const auto mask = static_cast<__mmask16>(word);
      const __m512i here = _mm512_add_epi32(lane, _mm512_set1_epi32(static_cast<int>(bit)));
      _mm512_storeu_si512(indices + found, _mm512_maskz_compress_epi32(mask, here));
      found += ones(mask);
    }
  }
  *last = index_at(part, indices[n - 1], n - 1);
  // Sixteen times `width` bits begin with a byte; each group lies in the four bytes from its first one on.
  const __m512i start = _mm512_mullo_epi32(lane, _mm512_set1_epi32(static_cast<int>(width)));
  const __m512i bytes = _mm512_srli_epi32(start, 3), shift = _mm512_and_si512(start, _mm512_set1_epi32(7));
  const __m512i mask = _mm512_set1_epi32((1 << width) - 1);
  const __m128i up = _mm_cvtsi32_si128(static_cast<int>(width));
  size_t i = 0;
  for (; i + 16 <= n && part.end - part.low >= static_cast<ptrdiff_t>((i + 16) * width / 8 + 8); i += 16) {
    const __m512i word = _mm512_i32gather_epi32(bytes, part.low + i * width / 8, 1);
    const __m512i low = _mm512_and_si512(_mm512_srlv_epi32(word, shift), mask);
    const __m512i before = _mm512_add_epi32(lane, _mm512_set1_epi32(static_cast<int>(i)));
    const __m512i high = _mm512_sub_epi32(_mm512_loadu_si512(indices + i), before);
    _mm512_storeu_si512(indices + i, _mm512_or_si512(_mm512_sll_epi32(high, up), low));
  }
  for (; i < n; ++i) indices[i] = static_cast<uint32_t>(index_at(part, indices[i], i));
  __mmask16 wrong = 0;
  for (i = 0; i + 16 < n; i += 16)
    wrong |= _mm512_cmpge_epu32_mask(_mm512_loadu_si512(indices + i), _mm512_loadu_si512(indices + i + 1));
  for (++i; i < n; ++i) wrong |= indices[i - 1] >= indices[i];
  return wrong == 0;
}

void stream_copy(const float *from, float *to, size_t n) {
  if (reinterpret_cast<uintptr_t>(to) & 63) return avx2::stream_copy(from, to, n);
  for (size_t i = 0; i < n; i += 16) _mm512_stream_ps(to + i, _mm512_loadu_ps(from + i));
}

using avx2::fence;

} // namespace avx512
} // namespace
} // namespace cddp
