// Which loops this processor runs.

#include "kernels.h"
#include "loops.h"

#include <atomic>

#if defined(CDDP_HAVE_AVX2) && defined(_MSC_VER)
#include <immintrin.h>
#include <intrin.h>
#endif

namespace cddp {
namespace {

#ifdef CDDP_HAVE_AVX2
bool has_avx2() {
#if defined(_MSC_VER)
  int info[4];
  __cpuid(info, 0);
  if (info[0] < 7) return false;
  __cpuid(info, 1);
  const bool saved = (info[2] >> 27 & 1) && (_xgetbv(0) & 6) == 6; // the system keeps wide registers
  const bool popcnt = info[2] >> 23 & 1;
  __cpuidex(info, 7, 0);
  return saved && popcnt && (info[1] >> 5 & 1) && (info[1] >> 3 & 1);
#else
  __builtin_cpu_init();
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi") && __builtin_cpu_supports("popcnt");
#endif
}
#endif

std::atomic<bool> simd_allowed{true};

} // namespace

const Loops &loops() {
#ifdef CDDP_HAVE_AVX2
  static const bool avx2 = has_avx2();
  if (avx2 && simd_allowed.load(std::memory_order_relaxed)) return avx2_loops;
#endif
  return baseline_loops;
}

} // namespace cddp

extern "C" const char *cddp_isa(void) { return cddp::loops().name; }

extern "C" void cddp_allow_simd(int allow) { cddp::simd_allowed = allow != 0; }
