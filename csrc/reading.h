// Reading the parts of a message: bits, index sets, values. docs/wire-format.md says what they mean.

#pragma once

#include "kernels.h"
#include "loops.h"

#include <cstring>

namespace cddp {

// Reads all indices of a message (room for 16 more), all of it checked; see cddp_ef_decode for `found`.
static inline int read_indices(const cddp_message &message, uint32_t *indices, int64_t *found) {
  const uint8_t *bitmap = message.indices + (message.low_bits * message.capacity + 7) / 8;
  const IndexPart part{message.indices, bitmap, bitmap + message.bitmap_bytes, static_cast<uint64_t>(message.low_bits)};
  *found = loops().count_ones(part);
  if (*found != message.count || message.count > message.capacity) return CDDP_WRONG_COUNT;
  uint64_t last = 0;
  const bool increasing = loops().read_indices(part, message.count, indices, &last);
  if (message.count > 0 && last >= static_cast<uint64_t>(message.numel)) {
    *found = static_cast<int64_t>(last);
    return CDDP_OUT_OF_RANGE;
  }
  return increasing ? CDDP_OK : CDDP_NOT_INCREASING;
}

// --- values -----------------------------------------------------------------------------------

static inline float from_half(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000) << 16, rest = half & 0x7fff;
  float value;
  if (rest < 0x400) { // denormal: a multiple of 2^-24
    value = static_cast<float>(rest) * 5.9604644775390625e-8f;
    return sign ? -value : value;
  }
  const uint32_t bits = sign | (rest >= 0x7c00 ? 0x7f800000u | rest << 13 : (rest << 13) + 0x38000000u);
  std::memcpy(&value, &bits, 4);
  return value;
}

// Values number `at` to `at + n` of a part for `count`; `at` is a multiple of 64 and n at most 64.
static inline void read_values(const uint8_t *data, int64_t count, int format, int64_t at, int n, float *values) {
  if (format == CDDP_FP32) {
    std::memcpy(values, data + 4 * at, 4 * static_cast<size_t>(n));
  } else if (format == CDDP_FP16 || format == CDDP_BF16) {
    uint16_t halves[64];
    std::memcpy(halves, data + 2 * at, 2 * static_cast<size_t>(n));
    for (int i = 0; i < n; ++i) {
      const uint32_t bits = static_cast<uint32_t>(halves[i]) << 16;
      if (format == CDDP_FP16)
        values[i] = from_half(halves[i]);
      else
        std::memcpy(values + i, &bits, 4);
    }
  } else {
    uint16_t scale[2];
    std::memcpy(scale, data + at / 64 * 4, 4);
    const uint8_t *from = data + (count + 63) / 64 * 4;
    uint8_t codes[64];
    if (format == CDDP_LOG8)
      std::memcpy(codes, from + at, static_cast<size_t>(n));
    else
      for (int i = 0; i < n; ++i) codes[i] = static_cast<uint8_t>(from[at / 2 + i / 2] >> (i & 1) * 4 & 15);
    loops().log_values(codes, n, format == CDDP_LOG8 ? 8 : 4, scale, values);
  }
}

// Whether a value part is one that an encoder can have written.
static inline int check_values(const uint8_t *data, int64_t count, int format) {
  if (format == CDDP_LOG8 || format == CDDP_LOG4) {
    for (int64_t block = 0; block < (count + 63) / 64; ++block) {
      uint16_t scale[2];
      std::memcpy(scale, data + 4 * block, 4);
      if (scale[0] > scale[1] || scale[1] > 0x7f7f) return CDDP_BAD_SCALE;
    }
    return CDDP_OK;
  }
  float values[64];
  for (int64_t at = 0; at < count; at += 64) {
    const int n = static_cast<int>(count - at < 64 ? count - at : 64);
    read_values(data, count, format, at, n, values);
    if (loops().largest(nullptr, values, static_cast<size_t>(n)) >= kInfinity) return CDDP_BAD_VALUE;
  }
  return CDDP_OK;
}

} // namespace cddp
