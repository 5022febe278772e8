// What selection is about: a job, the segments it consists of, and what was found for each.

#pragma once

#include "kernels.h"
#include "loops.h"

#include <cstdint>

namespace cddp {

constexpr uint32_t kNothing = 0xffffffffu;

// One quota and what is known about it.
struct Segment {
  cddp_quota quota;
  uint32_t low = 0, high = kInfinity; // the bracket: [low, high) holds the k-th key, most likely
  uint32_t tie = kNothing;            // many elements have this very key, and low is the next one
  int64_t capacity = 0;               // entries a list may hold
  bool dense = false;                 // expect many entries
  bool exact = true;
  int64_t size() const { return quota.stop - quota.start; }
};

// What one thread found for one segment, in increasing order. A cache line for each: several threads
// count at the same time.
struct alignas(64) List {
  float *values = nullptr;
  uint32_t *indices = nullptr;
  uint32_t *keys = nullptr; // of those inside the bracket; the lists of a segment have theirs in one array
  int64_t count = 0, inside = 0;
  uint32_t top = 0;  // the largest key
  bool full = false; // gave up: too many
};

struct Job {
  const float *residual, *gradient;
  float *out;
  int64_t numel, shards;
  bool exact, stream;
};

// All that threads listed for one segment, in increasing order.
struct Lists {
  const List *first;
  int64_t threads, stride;
  const List &operator[](int64_t t) const { return first[t * stride]; }
};

struct Rank {
  uint32_t key;  // the rank-th largest
  int64_t above; // how many are larger
};

// bracket.cpp: the rank-th largest (from 1) of n keys; keys are reordered.
Rank kth_largest(uint32_t *keys, int64_t n, int64_t rank);

// How many elements of a segment are sampled at most.
int64_t sample_size(int64_t size);

// Sets a segment's bracket and how much a list must hold. keys and work have room for a sample.
void bracket(const Job &job, Segment &segment, uint32_t *keys, uint32_t *work);

// finish.cpp: brings one segment's lists down to exactly k entries. Returns how many were taken, or -1
// where an entry is not finite.
int64_t finish(const Job &job, const Segment &segment, Lists lists, float *values, int64_t *indices);

} // namespace cddp
