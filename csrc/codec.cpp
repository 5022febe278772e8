// Elias-Fano index sets, logarithmic value codes, the checksum. docs/wire-format.md says what every
// bit means.

#include "kernels.h"
#include "loops.h"

#include <bit>
#include <cstring>

namespace {

// Up to 8 bytes at `at`, little endian, never reading at or after `end`.
inline uint64_t load64(const uint8_t *at, const uint8_t *end) {
  uint64_t word = 0;
  if (end - at >= 8) {
    std::memcpy(&word, at, 8);
  } else if (end > at) {
    std::memcpy(&word, at, static_cast<size_t>(end - at));
  }
  return word;
}

int64_t count_ones(const uint8_t *data, int64_t n_bytes) {
  int64_t ones = 0;
  for (int64_t at = 0; at < n_bytes; at += 8) ones += std::popcount(load64(data + at, data + n_bytes));
  return ones;
}

// The upper half of a byte is the later code.
inline void pack_fours(const uint8_t *codes, int n, uint8_t *to) {
  for (int i = 0; i + 1 < n; i += 2) to[i / 2] = static_cast<uint8_t>(codes[i] | codes[i + 1] << 4);
  if (n & 1) to[n / 2] = codes[n - 1];
}

inline void unpack_fours(const uint8_t *from, int n, uint8_t *codes) {
  for (int i = 0; i < n; ++i) codes[i] = static_cast<uint8_t>(from[i / 2] >> (i & 1) * 4 & 15);
}

} // namespace

extern "C" int cddp_ef_encode(const int64_t *indices, int64_t count, int64_t numel, int64_t capacity, int low_bits,
                              int64_t bitmap_bytes, uint8_t *data) {
  if (count > capacity) return CDDP_WRONG_COUNT;
  const int64_t low_bytes = (low_bits * capacity + 7) / 8;
  uint8_t *bitmap = data + low_bytes;
  std::memset(data, 0, static_cast<size_t>(low_bytes + bitmap_bytes));
  const uint64_t mask = (uint64_t{1} << low_bits) - 1;
  uint64_t word = 0;
  int filled = 0;
  uint8_t *to = data;
  int64_t last = -1;
  for (int64_t i = 0; i < count; ++i) {
    if (indices[i] <= last) return CDDP_NOT_INCREASING;
    if (indices[i] >= numel) return CDDP_OUT_OF_RANGE;
    last = indices[i];
    const auto index = static_cast<uint64_t>(last);
    const uint64_t bit = (index >> low_bits) + static_cast<uint64_t>(i);
    bitmap[bit / 8] = static_cast<uint8_t>(bitmap[bit / 8] | 1u << bit % 8);
    word |= (index & mask) << filled;
    filled += low_bits;
    if (filled >= 32) {
      const auto out = static_cast<uint32_t>(word);
      std::memcpy(to, &out, 4);
      to += 4;
      word >>= 32;
      filled -= 32;
    }
  }
  std::memcpy(to, &word, static_cast<size_t>((filled + 7) / 8));
  return CDDP_OK;
}

extern "C" int cddp_ef_decode(const uint8_t *data, int64_t capacity, int low_bits, int64_t bitmap_bytes,
                              int64_t numel, int64_t count, int64_t *indices, int64_t *found) {
  const int64_t low_bytes = (low_bits * capacity + 7) / 8;
  const uint8_t *bitmap = data + low_bytes, *end = bitmap + bitmap_bytes;
  *found = count_ones(bitmap, bitmap_bytes);
  if (*found != count) return CDDP_WRONG_COUNT;
  const uint64_t mask = (uint64_t{1} << low_bits) - 1;
  int64_t i = 0, last = -1;
  bool increasing = true;
  for (int64_t at = 0; at < bitmap_bytes; at += 8) {
    for (uint64_t ones = load64(bitmap + at, end); ones; ones &= ones - 1, ++i) {
      const int64_t high = at * 8 + std::countr_zero(ones) - i;
      const int64_t bit = i * low_bits;
      // Past the low bits lies the bitmap, so a full word is there for all but the last few.
      const uint64_t low = load64(data + bit / 8, end) >> (bit & 7) & mask;
      const int64_t index = high << low_bits | static_cast<int64_t>(low);
      increasing &= index > last;
      indices[i] = last = index;
    }
  }
  if (count > 0 && last >= numel) {
    *found = last;
    return CDDP_OUT_OF_RANGE;
  }
  return increasing ? CDDP_OK : CDDP_NOT_INCREASING;
}

extern "C" void cddp_log_encode(const float *values, int64_t count, int bits, uint8_t *data) {
  const cddp::Loops &loop = cddp::loops();
  uint8_t *codes = data + 4 * ((count + 63) / 64);
  uint8_t buffer[64];
  for (int64_t at = 0; at < count; at += 64, data += 4) {
    const int n = static_cast<int>(count - at < 64 ? count - at : 64);
    uint16_t scale[2];
    loop.log_codes(values + at, n, bits, scale, buffer);
    std::memcpy(data, scale, 4);
    if (bits == 8)
      std::memcpy(codes + at, buffer, static_cast<size_t>(n));
    else
      pack_fours(buffer, n, codes + at / 2);
  }
}

extern "C" int cddp_log_decode(const uint8_t *data, int64_t count, int bits, float *values) {
  const cddp::Loops &loop = cddp::loops();
  const uint8_t *codes = data + 4 * ((count + 63) / 64);
  uint8_t buffer[64];
  for (int64_t at = 0; at < count; at += 64, data += 4) {
    const int n = static_cast<int>(count - at < 64 ? count - at : 64);
    uint16_t scale[2];
    std::memcpy(scale, data, 4);
    if (scale[0] > scale[1] || scale[1] > 0x7f7f) return CDDP_BAD_SCALE;
    if (bits == 8)
      std::memcpy(buffer, codes + at, static_cast<size_t>(n));
    else
      unpack_fours(codes + at / 2, n, buffer);
    loop.log_values(buffer, n, bits, scale, values + at);
  }
  return CDDP_OK;
}

extern "C" uint32_t cddp_checksum(const uint8_t *message, int64_t n_words, int64_t skip) {
  uint64_t total = 0;
  for (int64_t j = 0; j < n_words; ++j) {
    uint32_t word;
    std::memcpy(&word, message + 4 * j, 4);
    const uint64_t weight = (static_cast<uint64_t>(j) * 0x9E3779B1u + 0x85EBCA6Bu) | 1u;
    total += (j == skip ? 0 : word) * weight;
  }
  return static_cast<uint32_t>(total ^ total >> 32);
}
