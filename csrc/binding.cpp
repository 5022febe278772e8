// Python sees addresses as integers: kernels/native.py checks the tensors behind them, which costs
// less than handing over arrays. The interpreter's lock is released during each call.

#include <nanobind/nanobind.h>

#include "kernels.h"

namespace nb = nanobind;

namespace {

using Address = uintptr_t;
static_assert(sizeof(void *) == 8, "structures are filled from Python as 64-bit words");
static_assert(sizeof(cddp_entries) == 32 && sizeof(cddp_quota) == 32 && sizeof(cddp_message) == 64);

template <typename T> T *at(Address address) { return reinterpret_cast<T *>(address); }

int take_topk(Address residual, Address gradient, Address out, int64_t numel, int64_t shards, Address quotas,
              int64_t n_quotas, Address values, Address indices, Address taken, bool exact, int threads) {
  return cddp_take_topk(at<const float>(residual), at<const float>(gradient), at<float>(out), numel, shards,
                        at<const cddp_quota>(quotas), n_quotas, at<float>(values), at<int64_t>(indices),
                        at<int64_t>(taken), exact, threads);
}

bool all_finite(Address residual, Address gradient, int64_t numel) {
  return cddp_finite(at<const float>(residual), at<const float>(gradient), numel) != 0;
}

int accumulate(Address out, int64_t numel, int64_t shards, Address pieces, int64_t n_pieces, float scale,
               int threads) {
  return cddp_accumulate(at<float>(out), numel, shards, at<const cddp_entries>(pieces), n_pieces, scale, threads);
}

int put_difference(Address out, int64_t numel, int64_t shards, int64_t shard, Address indices, Address a, Address b,
                   int64_t count) {
  return cddp_put_difference(at<float>(out), numel, shards, shard, at<const int64_t>(indices), at<const float>(a),
                             at<const float>(b), count);
}

int ef_encode(Address indices, int64_t count, int64_t numel, int64_t capacity, int low_bits, int64_t bitmap_bytes,
              Address data) {
  return cddp_ef_encode(at<const int64_t>(indices), count, numel, capacity, low_bits, bitmap_bytes, at<uint8_t>(data));
}

// The status, and what was found where it is not CDDP_OK.
nb::object ef_decode(Address data, int64_t capacity, int low_bits, int64_t bitmap_bytes, int64_t numel, int64_t count,
                     Address indices) {
  int64_t found = 0;
  int status = 0;
  {
    nb::gil_scoped_release unlocked;
    status = cddp_ef_decode(at<const uint8_t>(data), capacity, low_bits, bitmap_bytes, numel, count,
                            at<int64_t>(indices), &found);
  }
  return nb::make_tuple(status, found);
}

// The status, and where it is not CDDP_OK which message it is about and what was found there.
nb::object sum_messages(Address out, int64_t numel, int64_t shards, Address messages, int64_t n_messages, int values,
                        float scale, int threads) {
  int64_t which = 0, found = 0;
  int status = 0;
  {
    nb::gil_scoped_release unlocked;
    status = cddp_sum_messages(at<float>(out), numel, shards, at<const cddp_message>(messages), n_messages, values,
                               scale, threads, &which, &found);
  }
  return nb::make_tuple(status, which, found);
}

void log_encode(Address values, int64_t count, int bits, Address data) {
  cddp_log_encode(at<const float>(values), count, bits, at<uint8_t>(data));
}

int log_decode(Address data, int64_t count, int bits, Address values) {
  return cddp_log_decode(at<const uint8_t>(data), count, bits, at<float>(values));
}

uint32_t checksum(Address message, int64_t n_words, int64_t skip) {
  return cddp_checksum(at<const uint8_t>(message), n_words, skip);
}

uint64_t fingerprint(Address data, int64_t n_words) {
  return cddp_fingerprint(at<const uint8_t>(data), n_words, -1);
}

} // namespace

NB_MODULE(_native, m) {
  using unlocked = nb::call_guard<nb::gil_scoped_release>;
  m.doc() = "The kernels in C++. Use compressed_ddp.kernels, which checks what goes in.";
  m.def("isa", &cddp_isa);
  m.def("allow_simd", &cddp_allow_simd);
  m.def("take_topk", &take_topk, unlocked());
  m.def("all_finite", &all_finite, unlocked());
  m.def("accumulate", &accumulate, unlocked());
  m.def("sum_messages", &sum_messages);
  m.def("put_difference", &put_difference, unlocked());
  m.def("ef_encode", &ef_encode, unlocked());
  m.def("ef_decode", &ef_decode);
  m.def("log_encode", &log_encode, unlocked());
  m.def("log_decode", &log_decode, unlocked());
  m.def("checksum", &checksum, unlocked());
  m.def("fingerprint", &fingerprint, unlocked());
}
