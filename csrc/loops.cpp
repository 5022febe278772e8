// The inner loops. This file is compiled once for each instruction set, with CDDP_LOOPS naming the
// table it defines. What compilers do not find by themselves is written out for AVX2 and AVX-512.

#include "loops.h"

#include <algorithm>
#include <bit>
#include <cmath>

#if defined(__AVX512VL__)
#include "loops_avx512.h"
#elif defined(__AVX2__)
#include "loops_avx2.h"
#else
#include "loops_plain.h"
#endif

static_assert(std::endian::native == std::endian::little, "messages are little endian");

namespace cddp {
namespace {

// --- what compilers vectorise by themselves ---------------------------------------------------

uint32_t largest(const float *r, const float *g, size_t n) {
  int32_t top = 0;
  if (r)
    for (size_t i = 0; i < n; ++i) top = std::max(top, static_cast<int32_t>(key_of(r[i] + g[i])));
  else
    for (size_t i = 0; i < n; ++i) top = std::max(top, static_cast<int32_t>(key_of(g[i])));
  return static_cast<uint32_t>(top);
}

int64_t count_ones(const IndexPart &part) {
  int64_t count = 0;
  for (const uint8_t *at = part.bitmap; at < part.end; at += 8) count += std::popcount(load64(at, part.end));
  return count;
}

constexpr int32_t kOctave = 1 << 23;
constexpr int32_t kLargest = 0x7f7f; // the upper half of the largest finite key

struct Steps {
  int32_t base, step, top;
};

inline Steps steps_of(const uint16_t scale[2], int bits) {
  const int32_t top = (1 << (bits - 1)) - 1;
  const int32_t width = (static_cast<int32_t>(scale[1]) - scale[0]) << 16;
  return {static_cast<int32_t>(scale[0]) << 16, std::max(1, width / (top - 1)), top};
}

void log_codes(const float *values, int n, int bits, uint16_t scale[2], uint8_t *codes) {
  int32_t key[64], level[64];
  int32_t highest = 0, lowest = kLargest << 16;
  for (int i = 0; i < n; ++i) {
    key[i] = static_cast<int32_t>(key_of(values[i]));
    highest = std::max(highest, key[i]);
    lowest = std::min(lowest, key[i] == 0 ? kLargest << 16 : key[i]);
  }
  const int32_t octaves = bits == 8 ? 15 : 4;
  lowest = std::min(std::max(lowest, highest - octaves * kOctave), highest);
  scale[0] = static_cast<uint16_t>(lowest >> 16);
  scale[1] = static_cast<uint16_t>(std::min((highest >> 16) + ((highest & 0xffff) != 0), kLargest));
  const Steps s = steps_of(scale, bits);
  // (x + 0.5) / step is at least 0.5 / step from any integer, far more than a double's rounding, so
  // multiplying by the reciprocal and cutting off gives x // step exactly. Negative x is as good as 0.
  const double per_step = 1.0 / s.step;
  for (int i = 0; i < n; ++i) {
    const int32_t x = std::max(key[i] - s.base + s.step / 2, 0);
    level[i] = std::min(static_cast<int32_t>((x + 0.5) * per_step) + 1, s.top);
  }
  for (int i = 0; i < n; ++i) {
    if (key[i] == 0 || key[i] < s.base - kOctave) level[i] = 0;
    const int negative = std::signbit(values[i]) && level[i] > 0;
    codes[i] = static_cast<uint8_t>(level[i] | negative << (bits - 1));
  }
}

void log_values(const uint8_t *codes, int n, int bits, const uint16_t scale[2], float *values) {
  const Steps s = steps_of(scale, bits);
  for (int i = 0; i < n; ++i) {
    const int32_t level = codes[i] & s.top;
    const uint32_t key = level == 0 ? 0u : static_cast<uint32_t>(s.base + (level - 1) * s.step);
    const uint32_t number = key | static_cast<uint32_t>(codes[i] > s.top) << 31;
    std::memcpy(values + i, &number, 4);
  }
}

} // namespace

#if defined(__AVX512VL__)
#define CDDP_NAME "avx512"
namespace best = avx512;
#elif defined(__AVX2__)
#define CDDP_NAME "avx2"
namespace best = avx2;
#else
#if defined(__ARM_NEON)
#define CDDP_NAME "neon"
#else
#define CDDP_NAME "baseline"
#endif
namespace best = plain;
#endif

extern const Loops CDDP_LOOPS;
const Loops CDDP_LOOPS = {CDDP_NAME, best::kDenseFrom, best::filter, best::below, best::settle, largest,
                          count_ones, best::read_indices, best::stream_copy, best::fence, log_codes, log_values};

} // namespace cddp
