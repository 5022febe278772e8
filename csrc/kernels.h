// The kernels of compressed-ddp: a plain C interface on raw pointers, no torch, no Python.
//
// The definition of every result is src/compressed_ddp/kernels/reference.py; these give the same
// bits. The caller owns all buffers, checks their sizes and keeps them alive; nothing is kept
// between calls but scratch memory of the calling thread. Arrays are contiguous; float and integer
// arrays are aligned to their element, messages (uint8_t) to nothing. Nothing here throws to the
// caller: memory that cannot be had is reported as CDDP_NO_MEMORY. A bucket has fewer than 2^32
// elements.

#ifndef COMPRESSED_DDP_KERNELS_H
#define COMPRESSED_DDP_KERNELS_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum cddp_status {
  CDDP_OK = 0,
  CDDP_NOT_FINITE = 1,     // the sum holds a NaN or an infinity
  CDDP_NO_MEMORY = 2,
  CDDP_WRONG_COUNT = 3,    // a bitmap holds more or fewer ones than the header says
  CDDP_OUT_OF_RANGE = 4,   // an index is not below numel
  CDDP_NOT_INCREASING = 5, // indices are not strictly increasing
  CDDP_BAD_SCALE = 6,      // a block's smallest magnitude exceeds its largest, or that is too large
  CDDP_BAD_VALUE = 7,      // a value is a NaN or an infinity
};

// How values travel: the wire format's own numbers.
enum cddp_values { CDDP_FP32 = 0, CDDP_FP16 = 1, CDDP_BF16 = 2, CDDP_LOG8 = 3, CDDP_LOG4 = 4 };

// Which code runs: "avx512", "avx2", "neon" or "baseline". Chosen by what the processor can do.
const char *cddp_isa(void);

// For tests and benchmarks: the widest vectors that may be used where they exist. 0: those that every
// processor has, 1: AVX2, 2: AVX-512, as at first.
void cddp_allow_simd(int level);

// --- selection ------------------------------------------------------------------------------

// The k largest magnitudes among a shard's own elements start to stop are wanted. Quotas are
// sorted by shard, then by start; ranges of one shard do not overlap; 0 <= k <= stop - start.
struct cddp_quota {
  int64_t shard, start, stop, k;
};

// out = residual + gradient, less what each quota takes, which is returned. residual may be null
// (zero) or equal to out; otherwise buffers do not overlap. values and indices have room for the
// sum of all k; quota after quota, indices (local to the shard) increase inside each. taken[q] is
// how many entries quota q took: k, or where exact is 0 sometimes fewer; what it did not take is a
// hole at the end of its room.
//
// exact = 0 takes what is at or above a sampled estimate of the k-th magnitude, thinned to k.
// threads is how many may work (the caller's among them). CDDP_NOT_FINITE, CDDP_NO_MEMORY: the
// results and out mean nothing.
int cddp_take_topk(const float *residual, const float *gradient, float *out, int64_t numel, int64_t shards,
                   const struct cddp_quota *quotas, int64_t n_quotas, float *values, int64_t *indices,
                   int64_t *taken, int exact, int threads);

// Whether residual + gradient (residual may be null) is finite everywhere: 1 or 0.
int cddp_finite(const float *residual, const float *gradient, int64_t numel);

// --- sums -----------------------------------------------------------------------------------

// Entries of one message about `shard`, at strictly increasing local indices.
struct cddp_entries {
  const float *values;
  const int64_t *indices;
  int64_t count, shard;
};

// out = 0, then for each piece in order out[position] += value * scale (two roundings).
// CDDP_OUT_OF_RANGE: indices of some piece are not increasing, or reach outside; out means nothing.
int cddp_accumulate(float *out, int64_t numel, int64_t shards, const struct cddp_entries *pieces,
                    int64_t n_pieces, float scale, int threads);

// out[position] = a - b for each entry of `shard`. CDDP_OUT_OF_RANGE: some
// entry lies outside and was left out.
int cddp_put_difference(float *out, int64_t numel, int64_t shards, int64_t shard, const int64_t *indices, const float *a,
                         const float *b, int64_t count);

// --- codes ----------------------------------------------------------------------------------

// Elias-Fano with `low_bits` stored bits an index; docs/wire-format.md. `data` has room for
// ceil(low_bits * capacity / 8) bytes, then `bitmap_bytes` bytes, which are enough for numel and
// capacity; low_bits is at most 31; all bytes are written. Indices
// must be strictly increasing and below numel, and at most `capacity`; otherwise a status says so.
int cddp_ef_encode(const int64_t *indices, int64_t count, int64_t numel, int64_t capacity, int low_bits,
                   int64_t bitmap_bytes, uint8_t *data);

// Reads exactly those bytes and writes `count` indices; checks everything. found: the bitmap's ones
// where CDDP_WRONG_COUNT, the offending index where CDDP_OUT_OF_RANGE.
int cddp_ef_decode(const uint8_t *data, int64_t capacity, int low_bits, int64_t bitmap_bytes, int64_t numel,
                   int64_t count, int64_t *indices, int64_t *found);

// Logarithmic codes of 8 or 4 bits in blocks of 64: 4 bytes a block, then the codes. Values are
// finite.
void cddp_log_encode(const float *values, int64_t count, int bits, uint8_t *data);
int cddp_log_decode(const uint8_t *data, int64_t count, int bits, float *values);

// The entries of one message as they travel: an Elias-Fano part (as above) and a value part for
// `count` values, about `shard`, which has `numel` elements.
struct cddp_message {
  const uint8_t *indices, *values;
  int64_t count, shard, numel, capacity, low_bits, bitmap_bytes;
};

// Checks all messages; then out = 0, and out[position] += value * scale for
// each message in order. Nothing is written unless all are good; otherwise which says which one is
// not, and found what was found there, as in cddp_ef_decode. (CDDP_NO_MEMORY: out means nothing.)
int cddp_sum_messages(float *out, int64_t numel, int64_t shards, const struct cddp_message *messages,
                      int64_t n_messages, int values, float scale, int threads, int64_t *which, int64_t *found);

// A sum of n_words 32-bit words, each times an odd weight of its position, modulo 2^64; word `skip` taken as
// zero (-1: none).
uint64_t cddp_fingerprint(const uint8_t *data, int64_t n_words, int64_t skip);

// The checksum of a message: that sum with its halves folded together.
uint32_t cddp_checksum(const uint8_t *message, int64_t n_words, int64_t skip);

#ifdef __cplusplus
}
#endif

#endif
