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
  if (capacity == 0) return CDDP_OK; // no bytes; `data` may be null
  int64_t last = -1;
  bool increasing = true;
  for (int64_t i = 0; i < count; ++i) {
    increasing &= indices[i] > last;
    last = indices[i];
  }
  if (!increasing) return CDDP_NOT_INCREASING;
  if (last >= numel) return CDDP_OUT_OF_RANGE;

  const int64_t low_bytes = (low_bits * capacity + 7) / 8;
  std::memset(data, 0, static_cast<size_t>(low_bytes + bitmap_bytes));
  const uint64_t mask = (uint64_t{1} << low_bits) - 1;
  uint64_t word = 0;
  unsigned filled = 0;
  uint8_t *to = data;
  const auto append = [&](int64_t index) { // whole bytes leave the word: at most 38 bits are ever in it
    word |= (static_cast<uint64_t>(index) & mask) << filled;
    filled += static_cast<unsigned>(low_bits);
  };
  const auto advance = [&] {
    to += filled / 8;
    word >>= filled / 8 * 8;
    filled %= 8;
  };
  int64_t next = 0;
  if (low_bits <= 16) { // eight at a time are a whole number of bytes, so none waits for the one before
    const auto half = [&](const int64_t *four) {
      uint64_t bits = 0;
      for (int j = 0; j < 4; ++j) bits |= (static_cast<uint64_t>(four[j]) & mask) << j * low_bits;
      return bits;
    };
    const int split = 4 * low_bits;
    for (; next + 8 <= count && data + low_bytes - to >= 16; next += 8, to += low_bits) {
      const uint64_t lower = half(indices + next), upper = half(indices + next + 4);
      const uint64_t words[2] = {split < 64 ? lower | upper << split : lower, upper >> (64 - split)};
      std::memcpy(to, words, 16);
    }
  }
  for (; next < count && data + low_bytes - to >= 8; ++next) {
    append(indices[next]);
    std::memcpy(to, &word, 8);
    advance();
  }
  for (; next < count; ++next) {
    append(indices[next]);
    std::memcpy(to, &word, (filled + 7) / 8);
    advance();
  }

  uint8_t *bitmap = data + low_bytes;
  uint64_t ones = 0, at = 0; // 64 bits of the bitmap, and which
  const auto flush = [&] {
    const auto left = static_cast<uint64_t>(bitmap_bytes) - at * 8;
    if (left >= 8)
      std::memcpy(bitmap + at * 8, &ones, 8);
    else
      std::memcpy(bitmap + at * 8, &ones, left);
  };
  for (int64_t i = 0; i < count; ++i) {
    const uint64_t bit = (static_cast<uint64_t>(indices[i]) >> low_bits) + static_cast<uint64_t>(i);
    if (bit / 64 != at) {
      flush();
      ones = 0;
      at = bit / 64;
    }
    ones |= uint64_t{1} << bit % 64;
  }
  if (count > 0) flush();
  return CDDP_OK;
}

extern "C" int cddp_ef_decode(const uint8_t *data, int64_t capacity, int low_bits, int64_t bitmap_bytes,
                              int64_t numel, int64_t count, int64_t *indices, int64_t *found) {
  const int64_t low_bytes = (low_bits * capacity + 7) / 8;
  const uint8_t *bitmap = data + low_bytes, *end = bitmap + bitmap_bytes;
  *found = count_ones(bitmap, bitmap_bytes);
  if (*found != count || count > capacity) return CDDP_WRONG_COUNT;
  const auto width = static_cast<uint64_t>(low_bits);
  const uint64_t mask = (uint64_t{1} << width) - 1;
  uint64_t i = 0;
  int64_t last = -1;
  bool increasing = true;
  for (int64_t at = 0; at < bitmap_bytes; at += 8) {
    const auto base = static_cast<uint64_t>(at) * 8;
    for (uint64_t ones = load64(bitmap + at, end); ones; ones &= ones - 1, ++i) {
      const uint64_t high = base + static_cast<uint64_t>(std::countr_zero(ones)) - i;
      const uint64_t bit = i * width;
      // Past the low bits lies the bitmap, so a full word is there for all but the last few.
      const uint64_t low = load64(data + bit / 8, end) >> bit % 8 & mask;
      const auto index = static_cast<int64_t>(high << width | low);
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
