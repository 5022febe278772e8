// Selection on any bits that a float can have: cddp_take_topk against a sort.
//
// A few bytes choose sizes, shards, ranges and which code runs; the rest are float bits, dealt over the bucket
// again and again, so that short inputs make long buckets with many ties.

#include "common.h"
#include "kernels.h"

#include <algorithm>
#include <utility>

namespace {

using fuzz::Exact;
using fuzz::must;

int64_t position(int64_t index, int64_t shards, int64_t shard) {
  return index / 64 * 64 * shards + shard * 64 + index % 64;
}

int64_t local_numel(int64_t numel, int64_t shards, int64_t shard) {
  int64_t mine = 0;
  for (int64_t block = shard; 64 * block < numel; block += shards) mine += std::min<int64_t>(64, numel - 64 * block);
  return mine;
}

uint32_t key_of(float x) { return fuzz::bits_of(x) & 0x7fffffffu; }

// The k largest of a range: by magnitude, then by position; returned by position.
std::vector<int64_t> by_sorting(const Exact<float> &sum, int64_t shards, const cddp_quota &quota) {
  std::vector<std::pair<uint32_t, int64_t>> order; // smaller is larger in magnitude, or earlier
  for (int64_t i = quota.start; i < quota.stop; ++i)
    order.emplace_back(~key_of(sum[position(i, shards, quota.shard)]), i);
  std::sort(order.begin(), order.end());
  std::vector<int64_t> largest;
  for (int64_t i = 0; i < quota.k; ++i) largest.push_back(order[static_cast<size_t>(i)].second);
  std::sort(largest.begin(), largest.end());
  return largest;
}

} // namespace

// Input: how (roughly, residual, in place, not the widest loops, 15 << 4: long), shards | loops << 7, numel (2),
// stride, two bytes for each shard's ranges, then float bits.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  fuzz::Input input(data, size);
  const int how = input.byte();
  const bool exact = !(how & 1), with_residual = how & 2, in_place = (how & 6) == 6;
  const int dealt = input.byte();
  cddp_allow_simd(how & 8 ? dealt >> 7 : 2);
  const int64_t shards = 1 + dealt % 3;
  const int64_t numel = input.word() % (how >> 4 == 15 ? 5000 : 300);
  const int64_t stride = 1 + 2 * input.byte();

  std::vector<cddp_quota> quotas;
  int64_t total = 0;
  for (int64_t shard = 0; shard < shards; ++shard) {
    const int64_t mine = local_numel(numel, shards, shard), cut = mine * input.byte() / 255;
    const int64_t share = input.byte();
    for (const auto &[start, stop] : {std::pair{int64_t{0}, cut}, std::pair{cut + (share & 1 ? (mine - cut) / 3 : 0), mine}})
      if (stop > start || share & 2) quotas.push_back({shard, start, std::max(start, stop), std::max<int64_t>(0, stop - start) * share / 255});
  }
  for (const cddp_quota &quota : quotas) total += quota.k;

  const auto n_floats = static_cast<int64_t>(input.left() / 4);
  const auto at = [&](int64_t i) {
    uint32_t bits = 0;
    if (n_floats) std::memcpy(&bits, input.rest() + 4 * (i * stride % n_floats), 4);
    return fuzz::float_of(bits);
  };
  Exact<float> residual(with_residual ? numel : 0), gradient(numel), sum(numel), beside(numel, 7.0f);
  bool finite = true;
  for (int64_t i = 0; i < numel; ++i) {
    gradient[i] = at(i);
    if (with_residual) residual[i] = at(i / 3 + 1);
    sum[i] = with_residual ? residual[i] + gradient[i] : gradient[i];
    finite = finite && fuzz::finite(sum[i]);
  }
  const float *old = with_residual ? residual.data() : nullptr;
  must(cddp_finite(old, gradient.data(), numel) == finite, "finite: another verdict");

  float *out = in_place ? residual.data() : beside.data();
  Exact<float> values(total, 7.0f);
  Exact<int64_t> indices(total, -7), taken(static_cast<int64_t>(quotas.size()), -7);
  const int status = cddp_take_topk(old, gradient.data(), out, numel, shards, quotas.data(), taken.size(), values.data(),
                                    indices.data(), taken.data(), exact, 2);
  must(status == (finite ? CDDP_OK : CDDP_NOT_FINITE), "take_topk: another verdict");
  if (!finite) return 0;

  int64_t room = 0;
  Exact<uint8_t> gone(numel, 0);
  for (int64_t q = 0; q < taken.size(); ++q) {
    const cddp_quota &quota = quotas[static_cast<size_t>(q)];
    must(exact ? taken[q] == quota.k : taken[q] >= 0 && taken[q] <= quota.k, "take_topk: another number of entries");
    const std::vector<int64_t> wanted = exact ? by_sorting(sum, shards, quota) : std::vector<int64_t>{};
    for (int64_t i = 0; i < taken[q]; ++i) {
      const int64_t index = indices[room + i];
      must(index >= quota.start && index < quota.stop && (i == 0 || index > indices[room + i - 1]), "take_topk: no such index");
      must(!exact || index == wanted[static_cast<size_t>(i)], "take_topk: not the largest");
      const int64_t place = position(index, shards, quota.shard);
      must(fuzz::bits_of(values[room + i]) == fuzz::bits_of(sum[place]), "take_topk: another value");
      gone[place] = 1;
    }
    room += quota.k;
  }
  // The law, to the bit: what was taken is gone, everything else is the sum.
  for (int64_t i = 0; i < numel; ++i)
    must(fuzz::bits_of(out[i]) == (gone[i] ? 0u : fuzz::bits_of(sum[i])), "take_topk: something is lost or left");
  return 0;
}
