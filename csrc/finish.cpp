// After the pass: from a list of somewhat more than k entries to exactly k, whatever the sample said.

#include "segment.h"
#include "threads.h"

#include <algorithm>
#include <array>
#include <vector>

namespace cddp {
namespace {

constexpr int64_t kSpreadFrom = 1 << 16; // entries that are worth starting threads for

// Calls visit(pointer into out, length, first local index) for all of a segment, in order; visit
// returns false to stop.
template <typename Visit> void each_run(const Job &job, const Segment &segment, const Visit &visit) {
  const Deal deal{job.shards, segment.quota.shard};
  int64_t local = segment.quota.start;
  while (local < segment.quota.stop) {
    const int64_t rest = segment.quota.stop - local;
    const int64_t n = std::min(rest, job.shards == 1 ? 64 * kBlock : kBlock - local % kBlock);
    if (!visit(job.out + position(deal, local), n, local)) return;
    local += n;
  }
}

// The k-th key of everything in `out`, whatever the data: one pass counts leading digits, the next
// gathers the keys that share the k-th's; where those are most of all, their digits are counted too.
Rank kth_of_all(const Job &job, const Segment &segment) {
  static constexpr int kShifts[3] = {20, 10, 0};
  int64_t rank = segment.quota.k, above = 0;
  uint32_t prefix = 0, known = 0; // bits above the digit, and which bits those are
  for (const int shift : kShifts) {
    const uint32_t mask = shift == 20 ? 0x7ffu : 0x3ffu;
    // Four tables, so that equal neighbours do not wait for each other's increment.
    std::array<std::array<uint32_t, 2048>, 4> tables{};
    each_run(job, segment, [&](const float *x, int64_t n, int64_t) {
      for (int64_t i = 0; i < n; ++i) {
        const uint32_t key = key_of(x[i]);
        tables[static_cast<size_t>(i & 3)][key >> shift & mask] += (key & known) == prefix;
      }
      return true;
    });
    const auto total = [&](uint32_t digit) {
      return int64_t{tables[0][digit]} + tables[1][digit] + tables[2][digit] + tables[3][digit];
    };
    uint32_t digit = mask;
    while (total(digit) < rank) {
      rank -= total(digit);
      above += total(digit);
      --digit;
    }
    prefix |= digit << shift;
    known |= mask << shift;
    if (shift > 0 && total(digit) <= segment.size() / 4) {
      std::vector<uint32_t> keys(static_cast<size_t>(total(digit) + 1));
      size_t count = 0;
      each_run(job, segment, [&](const float *x, int64_t n, int64_t) {
        for (int64_t i = 0; i < n; ++i) {
          const uint32_t key = key_of(x[i]);
          keys[count] = key;
          count += (key & known) == prefix;
        }
        return true;
      });
      const Rank kth = kth_largest(keys.data(), total(digit), rank);
      return {kth.key, above + kth.above};
    }
  }
  return {prefix, above};
}

// Takes what is above the k-th key, and the first of its equals, out of `out`.
int64_t take_all_above(const Job &job, const Segment &segment, Rank kth, float *values, int64_t *indices) {
  int64_t taken = 0, ties = segment.quota.k - kth.above;
  each_run(job, segment, [&](float *x, int64_t n, int64_t local) {
    for (int64_t from = 0; from < n; from += 64) {
      const int64_t to = std::min(n, from + 64);
      if (loops().largest(nullptr, x + from, static_cast<size_t>(to - from)) < kth.key) continue;
      for (int64_t i = from; i < to; ++i) {
        const uint32_t key = key_of(x[i]);
        const bool tie = key == kth.key && ties > 0;
        if (key > kth.key || tie) {
          ties -= tie;
          values[taken] = x[i];
          indices[taken++] = local + i;
          x[i] = 0.0f;
        }
      }
    }
    return taken < segment.quota.k;
  });
  return taken;
}

// The lowest `wanted` elements whose key is the segment's tie leave `out`; returns how many there
// were. Listed elements are zero there by now, so where the tie is zero they must be passed over.
int64_t take_ties(const Job &job, const Segment &segment, Lists lists, int64_t wanted, float *values,
                  uint32_t *indices) {
  int64_t found = 0, t = 0, next = 0;
  const auto listed = [&](int64_t index) { // asked for increasing indices
    for (; t < lists.threads; ++t, next = 0) {
      while (next < lists[t].count && lists[t].indices[next] < index) ++next;
      if (next < lists[t].count) return lists[t].indices[next] == index;
    }
    return false;
  };
  each_run(job, segment, [&](float *x, int64_t n, int64_t local) {
    for (int64_t i = 0; i < n && found < wanted; ++i) {
      if (key_of(x[i]) != segment.tie || listed(local + i)) continue;
      values[found] = x[i];
      indices[found++] = static_cast<uint32_t>(local + i);
      x[i] = 0.0f;
    }
    return found < wanted;
  });
  return found;
}

// Merges what is listed with the ties, which are not, into `values` and `indices`.
void merge(Lists lists, const float *tie_values, const uint32_t *tie_indices, int64_t ties, float *values,
           int64_t *indices) {
  int64_t at = 0, tie = 0;
  const auto put_tie = [&] {
    values[at] = tie_values[tie];
    indices[at++] = tie_indices[tie++];
  };
  for (int64_t t = 0; t < lists.threads; ++t) {
    const List &list = lists[t];
    for (int64_t i = 0; i < list.count; ++i) {
      while (tie < ties && tie_indices[tie] < list.indices[i]) put_tie();
      values[at] = list.values[i];
      indices[at++] = list.indices[i];
    }
  }
  while (tie < ties) put_tie();
}

// Everything listed goes back, and all keys are counted.
int64_t start_over(const Job &job, const Segment &segment, Lists lists, float *values, int64_t *indices) {
  const Deal deal{job.shards, segment.quota.shard};
  for (int64_t t = 0; t < lists.threads; ++t)
    for (int64_t i = 0; i < lists[t].count; ++i) job.out[position(deal, lists[t].indices[i])] = lists[t].values[i];
  return take_all_above(job, segment, kth_of_all(job, segment), values, indices);
}

// Fewer than k are listed, and the rest are ties.
int64_t fill_up(const Job &job, const Segment &segment, Lists lists, int64_t missing, float *values,
                int64_t *indices) {
  std::vector<float> tie_values(static_cast<size_t>(missing));
  std::vector<uint32_t> tie_indices(static_cast<size_t>(missing));
  const int64_t ties = take_ties(job, segment, lists, missing, tie_values.data(), tie_indices.data());
  if (ties == missing) {
    merge(lists, tie_values.data(), tie_indices.data(), ties, values, indices);
    return segment.quota.k;
  }
  const Deal deal{job.shards, segment.quota.shard};
  for (size_t i = 0; i < static_cast<size_t>(ties); ++i) job.out[position(deal, tie_indices[i])] = tie_values[i];
  return start_over(job, segment, lists, values, indices);
}

// The entries listed, thinned evenly to k, so that no part of the bucket is favoured.
int64_t thin_out(const Job &job, const Segment &segment, Lists lists, int64_t listed, float *values,
                 int64_t *indices) {
  const Deal deal{job.shards, segment.quota.shard};
  int64_t kept = 0, due = 0; // kept = floor(seen * k / listed), due the remainder
  for (int64_t t = 0; t < lists.threads; ++t) {
    const List &list = lists[t];
    for (int64_t i = 0; i < list.count; ++i) {
      due += segment.quota.k;
      if (due >= listed) {
        due -= listed;
        values[kept] = list.values[i];
        indices[kept++] = list.indices[i];
      } else {
        job.out[position(deal, list.indices[i])] = list.values[i];
      }
    }
  }
  return kept;
}

// How many of a list are above the k-th key, and how many equal to it.
struct Part {
  int64_t above = 0, equal = 0;
};

Part part_of(const List &list, uint32_t kth) {
  Part part;
  for (int64_t i = 0; i < list.count; ++i) {
    const auto key = static_cast<int32_t>(key_of(list.values[i]));
    part.above += key > static_cast<int32_t>(kth);
    part.equal += key == static_cast<int32_t>(kth);
  }
  return part;
}

// Entries above the k-th key and the first `ties` equal to it stay; the others go back. Each thread's
// list is settled by itself, once it is known how many of those before it stay.
int64_t settle(const Job &job, const Segment &segment, Lists lists, uint32_t kth, int64_t ties, float *values,
               int64_t *indices) {
  const Deal deal{job.shards, segment.quota.shard};
  const auto settle_list = [&](const List &list, int64_t ties_here, int64_t from, int64_t room) {
    auto left = static_cast<size_t>(ties_here);
    return static_cast<int64_t>(loops().settle(list.values, list.indices, static_cast<size_t>(list.count), kth, &left,
                                               deal, values + from, indices + from, static_cast<size_t>(room),
                                               job.out));
  };
  if (lists.threads == 1) return settle_list(lists[0], ties, 0, segment.quota.k);

  struct Place { // `stay` entries, `ties` of them equal to the k-th, go to `from` and on
    int64_t ties, from, stay;
  };
  std::vector<Part> parts(static_cast<size_t>(lists.threads));
  std::vector<Place> places;
  const auto spread = [&](const auto &work) {
    if (segment.quota.k >= kSpreadFrom) return in_parallel(static_cast<int>(lists.threads), work);
    for (int t = 0; t < lists.threads; ++t) work(t);
  };
  spread([&](int t) { parts[static_cast<size_t>(t)] = part_of(lists[t], kth); });
  int64_t kept = 0;
  for (const Part &part : parts) {
    const int64_t here = std::min(ties, part.equal);
    places.push_back({here, kept, part.above + here});
    ties -= here;
    kept += part.above + here;
  }
  spread([&](int t) {
    const Place &place = places[static_cast<size_t>(t)];
    settle_list(lists[t], place.ties, place.from, place.stay);
  });
  return kept;
}

} // namespace

int64_t finish(const Job &job, const Segment &segment, Lists lists, float *values, int64_t *indices) {
  const int64_t k = segment.quota.k;
  int64_t listed = 0, inside = 0;
  uint32_t top = 0;
  bool full = false;
  for (int64_t t = 0; t < lists.threads; ++t) {
    listed += lists[t].count;
    inside += lists[t].inside;
    top = std::max(top, lists[t].top);
    full |= lists[t].full;
  }
  if (top >= kInfinity) return -1;
  if (k == 0) return 0;
  if (full || listed > segment.capacity) return start_over(job, segment, lists, values, indices);
  if (!segment.exact && 2 * listed >= k && listed > k) return thin_out(job, segment, lists, listed, values, indices);
  if (!segment.exact && 2 * listed >= k) return settle(job, segment, lists, 0, INT64_MAX, values, indices);
  if (listed < k && segment.tie == kNothing) return start_over(job, segment, lists, values, indices);
  if (listed < k) return fill_up(job, segment, lists, k - listed, values, indices);
  if (listed == k) return settle(job, segment, lists, 0, INT64_MAX, values, indices);
  const int64_t sure = listed - inside; // at or above the bracket
  uint32_t *keys = lists[0].keys;
  if (sure < k) {
    uint32_t *end = keys + lists[0].inside;
    for (int64_t t = 1; t < lists.threads; ++t) end = std::copy(lists[t].keys, lists[t].keys + lists[t].inside, end);
    const Rank kth = kth_largest(keys, inside, k - sure);
    return settle(job, segment, lists, kth.key, k - sure - kth.above, values, indices);
  }
  uint32_t *end = keys;
  for (int64_t t = 0; t < lists.threads; ++t) // the bracket lies too low
    end += loops().below(lists[t].values, static_cast<size_t>(lists[t].count), kInfinity, end, &top);
  const Rank kth = kth_largest(keys, listed, k);
  return settle(job, segment, lists, kth.key, k - kth.above, values, indices);
}

} // namespace cddp
