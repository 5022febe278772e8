// The inner loops that are compiled once for every instruction set (loops.cpp), and the table
// through which the rest calls them.

#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace cddp {

// A float's bits below its sign, as an integer: orders magnitudes, NaN and infinity on top.
static inline uint32_t key_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits & 0x7fffffffu;
}

constexpr uint32_t kInfinity = 0x7f800000u; // keys from here on are not finite
constexpr int64_t kBlock = 64;              // shards are dealt in blocks of this many elements

// How a shard's local indices lie in the bucket. (Functions in this header are static: a copy that
// was compiled for AVX2 must not serve the other files.)
struct Deal {
  int64_t shards, shard;
};

static inline int64_t position(Deal deal, int64_t local) {
  if (deal.shards == 1) return local;
  return local / kBlock * (kBlock * deal.shards) + deal.shard * kBlock + local % kBlock;
}

// Up to 8 bytes at `at`, little endian, never reading at or after `end`.
static inline uint64_t load64(const uint8_t *at, const uint8_t *end) {
  uint64_t word = 0;
  if (end - at >= 8) {
    std::memcpy(&word, at, 8);
  } else if (end > at) {
    std::memcpy(&word, at, static_cast<size_t>(end - at));
  }
  return word;
}

// Where a message's index part has what: `width` bits of each index from `low` on, then the bitmap.
struct IndexPart {
  const uint8_t *low, *bitmap, *end;
  uint64_t width;
};

// Index number i, whose one is at `bit` of the bitmap. Past the low bits lies the bitmap, so a full
// word is there for all but the last few.
static inline uint64_t index_at(const IndexPart &part, uint64_t bit, uint64_t i) {
  const uint64_t at = i * part.width, mask = (uint64_t{1} << part.width) - 1;
  return (bit - i) << part.width | (load64(part.low + at / 8, part.end) >> at % 8 & mask);
}

struct Loops {
  const char *name;

  // From one entry in so many elements on, `filter` is to be told that it is dense.
  int64_t dense_from;

  // out[i] = r[i] + g[i] where its key is below `low`; elsewhere out[i] = 0, and (sum, first + i)
  // is appended. Returns how many were appended; values and indices have room for n + 16.
  // `dense`: expect many. `stream`: write past the caches.
  size_t (*filter)(const float *r, const float *g, float *out, size_t n, uint32_t first, uint32_t low,
                   float *values, uint32_t *indices, bool dense, bool stream);

  // Appends the keys below `high` to `keys` (room for n + 16) and returns their number; `top` is
  // raised to the largest key of all.
  size_t (*below)(const float *values, size_t n, uint32_t high, uint32_t *keys, uint32_t *top);

  // Entries with a key above `kth`, and the first *ties equal to it, go to kept_values and
  // kept_indices (room for `room`, and that many at most are kept); the others go back to out.
  // Returns how many were kept.
  size_t (*settle)(const float *values, const uint32_t *indices, size_t n, uint32_t kth, size_t *ties, Deal deal,
                   float *kept_values, int64_t *kept_indices, size_t room, float *out);

  // The largest key of r + g (r may be null).
  uint32_t (*largest)(const float *r, const float *g, size_t n);

  // How many bits of the bitmap are set.
  int64_t (*count_ones)(const IndexPart &part);

  // All `count` indices of a message, as many as its bitmap has ones; `indices` has room for 16 more.
  // *last is the last one, and none has a larger upper part: only if it is below 2^32 are they right.
  // Returns whether each is larger than the one before.
  bool (*read_indices)(const IndexPart &part, int64_t count, uint32_t *indices, uint64_t *last);

  // to[i] = from[i], past the caches where that can be; n is a multiple of 16, `to` aligned to 32.
  void (*stream_copy)(const float *from, float *to, size_t n);

  // Makes what was written past the caches visible to other threads.
  void (*fence)();

  // One block of at most 64 values: its scale (two 16-bit numbers) and its codes, one a byte.
  void (*log_codes)(const float *values, int n, int bits, uint16_t scale[2], uint8_t *codes);
  void (*log_values)(const uint8_t *codes, int n, int bits, const uint16_t scale[2], float *values);
};

extern const Loops baseline_loops;
#ifdef CDDP_HAVE_X86
extern const Loops avx2_loops;
extern const Loops avx512_loops;
#endif

// The best of them that this processor runs.
const Loops &loops();

} // namespace cddp
