// Elias-Fano index sets, logarithmic value codes, the checksum. docs/wire-format.md says what every
// bit means.

#include "kernels.h"
#include "loops.h"
#include "reading.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <new>

namespace {

// The upper half of a byte is the later code.
inline void pack_fours(const uint8_t *codes, int n, uint8_t *to) {
  for (int i = 0; i + 1 < n; i += 2) to[i / 2] = static_cast<uint8_t>(codes[i] | codes[i + 1] << 4);
  if (n & 1) to[n / 2] = codes[n - 1];
}

// Writes numbers of `width` bits end to end. No byte at or after `end` is touched.
struct BitWriter {
  uint8_t *to;
  const uint8_t *end;
  int width;
  uint64_t mask, word = 0;
  unsigned filled = 0; // bits in `word`: at most 7 between calls

  BitWriter(uint8_t *data, int64_t n_bytes, int bits)
      : to(data), end(data + n_bytes), width(bits), mask((uint64_t{1} << bits) - 1) {}

  // Eight at a time are a whole number of bytes, so none has to wait for the one before.
  int64_t by_eights(const int64_t *numbers, int64_t count) {
    int64_t next = 0;
    if (width > 16 || filled) return next;
    const auto four = [&](const int64_t *from) {
      uint64_t bits = 0;
      for (int j = 0; j < 4; ++j) bits |= (static_cast<uint64_t>(from[j]) & mask) << j * width;
      return bits;
    };
    for (; next + 8 <= count && end - to >= 16; next += 8, to += width) {
      const uint64_t lower = four(numbers + next), upper = four(numbers + next + 4);
      const int split = 4 * width; // from 4 to 64: there are no bytes to fill where width is 0
      const uint64_t words[2] = {split < 64 ? lower | upper << split : lower, upper >> (64 - split)};
      std::memcpy(to, words, 16);
    }
    return next;
  }

  void one(int64_t number) {
    word |= (static_cast<uint64_t>(number) & mask) << filled;
    filled += static_cast<unsigned>(width);
    if (end - to >= 8)
      std::memcpy(to, &word, 8);
    else
      std::memcpy(to, &word, (filled + 7) / 8);
    to += filled / 8;
    word >>= filled / 8 * 8;
    filled %= 8;
  }
};

// Sets bits in increasing order, 64 at a time.
struct BitmapWriter {
  uint8_t *data;
  uint64_t n_bytes, ones = 0, at = 0;

  void set(uint64_t bit) {
    if (bit / 64 != at) {
      flush();
      ones = 0;
      at = bit / 64;
    }
    ones |= uint64_t{1} << bit % 64;
  }
  void flush() const {
    const uint64_t left = n_bytes - at * 8;
    if (left >= 8)
      std::memcpy(data + at * 8, &ones, 8);
    else
      std::memcpy(data + at * 8, &ones, left);
  }
};

} // namespace

extern "C" int cddp_ef_encode(const int64_t *indices, int64_t count, int64_t numel, int64_t capacity, int low_bits,
                              int64_t bitmap_bytes, uint8_t *data) {
  if (count > capacity) return CDDP_WRONG_COUNT;
  if (capacity == 0) return CDDP_OK; // no bytes; `data` may be null
  const int64_t low_bytes = (low_bits * capacity + 7) / 8;
  std::memset(data, 0, static_cast<size_t>(low_bytes + bitmap_bytes));
  BitWriter lows(data, low_bytes, low_bits);
  BitmapWriter highs{data + low_bytes, static_cast<uint64_t>(bitmap_bytes)};
  constexpr int64_t kChunk = 4096; // what stays in the nearest cache from one loop to the next
  int64_t last = -1;
  for (int64_t from = 0; from < count; from += kChunk) {
    const int64_t n = count - from < kChunk ? count - from : kChunk;
    const int64_t *chunk = indices + from;
    bool increasing = true;
    for (int64_t i = 0; i < n; ++i) {
      increasing &= chunk[i] > last;
      last = chunk[i];
    }
    if (!increasing) return CDDP_NOT_INCREASING;
    if (last >= numel) return CDDP_OUT_OF_RANGE;
    for (int64_t i = lows.by_eights(chunk, n); i < n; ++i) lows.one(chunk[i]);
    for (int64_t i = 0; i < n; ++i)
      highs.set((static_cast<uint64_t>(chunk[i]) >> low_bits) + static_cast<uint64_t>(from + i));
  }
  if (count > 0) highs.flush();
  return CDDP_OK;
}

extern "C" int cddp_ef_decode(const uint8_t *data, int64_t capacity, int low_bits, int64_t bitmap_bytes,
                              int64_t numel, int64_t count, int64_t *indices, int64_t *found) {
  const cddp_message message{data, nullptr, count, 0, numel, capacity, low_bits, bitmap_bytes};
  const std::unique_ptr<uint32_t[]> narrow(new (std::nothrow) uint32_t[static_cast<size_t>(count) + 16]);
  *found = 0;
  if (!narrow) return CDDP_NO_MEMORY;
  const int status = cddp::read_indices(message, narrow.get(), found);
  if (status == CDDP_OK) std::copy(narrow.get(), narrow.get() + count, indices);
  return status;
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
  const int format = bits == 8 ? CDDP_LOG8 : CDDP_LOG4;
  const int status = cddp::check_values(data, count, format);
  if (status != CDDP_OK) return status;
  for (int64_t at = 0; at < count; at += 64)
    cddp::read_values(data, count, format, at, static_cast<int>(count - at < 64 ? count - at : 64), values + at);
  return CDDP_OK;
}

extern "C" uint64_t cddp_fingerprint(const uint8_t *data, int64_t n_words, int64_t skip) {
  uint64_t total = 0;
  for (int64_t j = 0; j < n_words; ++j) {
    uint32_t word;
    std::memcpy(&word, data + 4 * j, 4);
    const uint64_t weight = (static_cast<uint64_t>(j) * 0x9E3779B1u + 0x85EBCA6Bu) | 1u;
    total += (j == skip ? 0 : word) * weight;
  }
  return total;
}

extern "C" uint32_t cddp_checksum(const uint8_t *message, int64_t n_words, int64_t skip) {
  const uint64_t total = cddp_fingerprint(message, n_words, skip);
  return static_cast<uint32_t>(total ^ total >> 32);
}
