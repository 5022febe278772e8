// A call's own helpers: started for it, joined before it returns. No pool that would spin beside
// torch's; starting a thread costs some 20 microseconds, so only long work is split.

#pragma once

#include <algorithm>
#include <cstdint>
#include <system_error>
#include <thread>
#include <vector>

namespace cddp {

// How many of `allowed` threads `numel` elements are worth.
inline int worth(int64_t numel, int allowed) {
  return static_cast<int>(std::clamp<int64_t>(std::min<int64_t>(numel / (512 * 1024), allowed), 1, 32));
}

// job(0) ... job(n - 1), each once, some of them at the same time. job must not throw.
template <typename Job> void in_parallel(int n, const Job &job) {
  std::vector<std::thread> helpers;
  int started = 1;
  try {
    helpers.reserve(static_cast<size_t>(n));
    for (; started < n; ++started) helpers.emplace_back([&job, started] { job(started); });
  } catch (const std::exception &) {
    // The system gives no more threads: the caller does the rest itself.
  }
  job(0);
  for (int i = started; i < n; ++i) job(i);
  for (auto &helper : helpers) helper.join();
}

} // namespace cddp
