// Which loops this processor runs.

#include "kernels.h"
#include "loops.h"

#include <algorithm>
#include <atomic>

#if defined(CDDP_HAVE_X86) && defined(_MSC_VER)
#include <immintrin.h>
#include <intrin.h>
#endif

namespace cddp {
namespace {

#ifdef CDDP_HAVE_X86
// The widest vectors that processor and system have: 0 (128 bits), 1 (256: AVX2) or 2 (512: AVX-512).
int widest() {
#if defined(_MSC_VER)
  const auto bit = [](int word, int at) { return (word >> at & 1) != 0; };
  int info[4];
  __cpuid(info, 0);
  if (info[0] < 7) return 0;
  __cpuid(info, 1);
  if (!bit(info[2], 27) || !bit(info[2], 23)) return 0; // xgetbv, popcnt
  const auto saved = _xgetbv(0); // which registers the system keeps
  __cpuidex(info, 7, 0);
  const bool avx2 = (saved & 6) == 6 && bit(info[1], 5) && bit(info[1], 3);
  const bool more = bit(info[1], 8) && bit(info[1], 16) && bit(info[1], 17) && bit(info[1], 30) && bit(info[1], 31);
  return avx2 ? 1 + (more && (saved & 0xe6) == 0xe6) : 0;
#else
  __builtin_cpu_init();
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("bmi") || !__builtin_cpu_supports("popcnt")) return 0;
  return 1 + (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
              __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
              __builtin_cpu_supports("bmi2"));
#endif
}
#endif

std::atomic<int> allowed{2};

} // namespace

const Loops &loops() {
#ifdef CDDP_HAVE_X86
  static const int found = widest();
  const int level = std::min(found, allowed.load(std::memory_order_relaxed));
  if (level == 2) return avx512_loops;
  if (level == 1) return avx2_loops;
#endif
  return baseline_loops;
}

} // namespace cddp

extern "C" const char *cddp_isa(void) { return cddp::loops().name; }

extern "C" void cddp_allow_simd(int level) { cddp::allowed = level; }
