// Entries as they travel, from anyone: every kernel that reads them against a decoder that goes bit by bit.
//
// A few bytes choose sizes, formats and repairs; the rest are the parts of up to three messages. A message that
// is wrong in its first count tests little behind it, so repairs make it more nearly right: as many ones in the
// bitmap as there are entries, scales and floats that are numbers. What is accepted, what is refused and why,
// and every bit of the result must be the plain decoder's; what is refused must leave the result alone.

#include "common.h"
#include "kernels.h"

#include <algorithm>

namespace {

using fuzz::Exact;
using fuzz::must;
using Bytes = Exact<uint8_t>;

enum Repair { kBitmap = 1, kValues = 2, kSortLows = 4 };

bool bit_at(const uint8_t *data, int64_t bit) { return data[bit / 8] >> (bit % 8) & 1; }
void put_bit(uint8_t *data, int64_t bit, bool one) {
  const auto mask = static_cast<uint8_t>(1 << bit % 8);
  data[bit / 8] = static_cast<uint8_t>(one ? data[bit / 8] | mask : data[bit / 8] & ~mask);
}
int64_t number_at(const uint8_t *data, int64_t bit, int64_t width) {
  if (width == 0) return 0;
  uint64_t bytes = 0; // those that the number lies in: at most 5
  for (int64_t at = bit / 8; at <= (bit + width - 1) / 8; ++at) bytes |= static_cast<uint64_t>(data[at]) << (at - bit / 8) * 8;
  return static_cast<int64_t>(bytes >> bit % 8 & ((uint64_t{1} << width) - 1));
}

// --- docs/wire-format.md, as plainly as it can be said ----------------------------------------

struct Shape {
  int64_t numel, capacity, count, low_bits, low_bytes, bitmap_bytes;
  int format;

  Shape(int64_t n, int64_t room, int64_t entries, int values) : numel(n), capacity(room), count(entries), format(values) {
    low_bits = 0;
    while (capacity > 0 && (numel / capacity) >> (low_bits + 1)) ++low_bits;
    low_bytes = (low_bits * capacity + 7) / 8;
    bitmap_bytes = capacity > 0 ? (capacity + (numel >> low_bits) + 1 + 7) / 8 : 0;
  }
  int64_t index_bytes() const { return low_bytes + bitmap_bytes; }
  int64_t value_bytes() const {
    const int64_t blocks = 4 * ((count + 63) / 64);
    if (format == CDDP_FP32) return 4 * count;
    if (format == CDDP_LOG8) return blocks + count;
    return format == CDDP_LOG4 ? blocks + (count + 1) / 2 : 2 * count;
  }
};

struct Plain {
  int status = CDDP_OK;
  int64_t found = 0;
  std::vector<int64_t> indices;
  std::vector<float> values;
};

void read_indices(const Shape &shape, const uint8_t *part, Plain &plain) {
  std::vector<int64_t> ones;
  for (int64_t bit = 0; bit < 8 * shape.bitmap_bytes; ++bit)
    if (bit_at(part + shape.low_bytes, bit)) ones.push_back(bit);
  plain.found = static_cast<int64_t>(ones.size());
  if (plain.found != shape.count || shape.count > shape.capacity) {
    plain.status = CDDP_WRONG_COUNT;
    return;
  }
  bool increasing = true;
  for (int64_t i = 0; i < shape.count; ++i) {
    const int64_t index = (ones[static_cast<size_t>(i)] - i) << shape.low_bits | number_at(part, i * shape.low_bits, shape.low_bits);
    increasing = increasing && (i == 0 || index > plain.indices.back());
    plain.indices.push_back(index);
  }
  if (shape.count > 0 && plain.indices.back() >= shape.numel) {
    plain.status = CDDP_OUT_OF_RANGE;
    plain.found = plain.indices.back();
  } else if (!increasing) {
    plain.status = CDDP_NOT_INCREASING;
  }
}

float half_to_float(int64_t half) {
  const int64_t exponent = half >> 10 & 31, fraction = half & 1023;
  float size = exponent == 31 ? (fraction ? NAN : INFINITY)
               : exponent == 0 ? std::ldexp(static_cast<float>(fraction), -24)
                               : std::ldexp(static_cast<float>(fraction + 1024), static_cast<int>(exponent) - 25);
  return half >> 15 ? -size : size;
}

int read_values(const Shape &shape, const uint8_t *part, std::vector<float> &values) {
  const int width = shape.format == CDDP_LOG8 ? 8 : 4;
  const int64_t top = (1 << (width - 1)) - 1, codes_at = 8 * 4 * ((shape.count + 63) / 64);
  bool good = true;
  for (int64_t i = 0; i < shape.count; ++i) {
    if (shape.format == CDDP_FP32) values.push_back(fuzz::float_of(static_cast<uint32_t>(number_at(part, 32 * i, 32))));
    if (shape.format == CDDP_FP16) values.push_back(half_to_float(number_at(part, 16 * i, 16)));
    if (shape.format == CDDP_BF16)
      values.push_back(fuzz::float_of(static_cast<uint32_t>(number_at(part, 16 * i, 16)) << 16));
    if (shape.format <= CDDP_BF16) {
      good = good && fuzz::finite(values.back());
      continue;
    }
    const int64_t low = number_at(part, i / 64 * 32, 16), high = number_at(part, i / 64 * 32 + 16, 16);
    good = good && low <= high && high <= 0x7f7f;
    const int64_t code = number_at(part, codes_at + i * width, width), level = code & top;
    const int64_t step = std::max<int64_t>(1, ((high - low) << 16) / (top - 1));
    const int64_t key = level ? (low << 16) + (level - 1) * step : 0;
    values.push_back(fuzz::float_of(static_cast<uint32_t>(key | (code > top ? int64_t{1} << 31 : 0))));
  }
  if (good) return CDDP_OK;
  return shape.format <= CDDP_BF16 ? CDDP_BAD_VALUE : CDDP_BAD_SCALE;
}

// --- a message --------------------------------------------------------------------------------

struct Message {
  Shape shape;
  int64_t shard;
  Bytes indices, values;
  Plain plain;

  Message(const Shape &its, int64_t about) : shape(its), shard(about), indices(its.index_bytes()), values(its.value_bytes()) {}

  void fill(fuzz::Input &input, int repairs) {
    for (int64_t i = 0; i < indices.size(); ++i) indices[i] = input.byte();
    for (int64_t i = 0; i < values.size(); ++i) values[i] = input.byte();
    if (repairs & kBitmap) repair_bitmap();
    if (repairs & kSortLows) sort_lows();
    if (repairs & kValues) repair_values();
    read_indices(shape, indices.data(), plain);
    if (plain.status == CDDP_OK) plain.status = read_values(shape, values.data(), plain.values);
  }

  cddp_message as_told() const {
    return {indices.data(), values.data(), shape.count, shard, shape.numel, shape.capacity, shape.low_bits, shape.bitmap_bytes};
  }

private:
  void repair_bitmap() {
    int64_t ones = 0;
    uint8_t *bitmap = indices.data() + shape.low_bytes;
    for (int64_t bit = 0; bit < 8 * shape.bitmap_bytes; ++bit) {
      const bool one = bit_at(bitmap, bit) && ones < shape.count;
      ones += one;
      put_bit(bitmap, bit, one);
    }
    for (int64_t bit = 0; bit < 8 * shape.bitmap_bytes && ones < shape.count; ++bit) {
      ones += !bit_at(bitmap, bit);
      put_bit(bitmap, bit, true);
    }
  }
  void sort_lows() { // within equal high parts this makes indices increase; across them they do anyway
    std::vector<int64_t> lows;
    const int64_t n = std::min(shape.count, shape.capacity);
    for (int64_t i = 0; i < n; ++i) lows.push_back(number_at(indices.data(), i * shape.low_bits, shape.low_bits));
    std::sort(lows.begin(), lows.end());
    for (int64_t i = 0; i < n; ++i)
      for (int64_t b = 0; b < shape.low_bits; ++b)
        put_bit(indices.data(), i * shape.low_bits + b, lows[static_cast<size_t>(i)] >> b & 1);
  }
  void repair_values() {
    if (shape.format <= CDDP_BF16) { // no exponent of ones only
      const int64_t size = shape.format == CDDP_FP32 ? 4 : 2;
      for (int64_t at = size - 1; at < values.size(); at += size) values[at] &= shape.format == CDDP_FP16 ? 0xbf : 0xdf;
      return;
    }
    for (int64_t at = 0; at < 4 * ((shape.count + 63) / 64); at += 4) {
      uint16_t scale[2];
      std::memcpy(scale, &values[at], 4);
      for (uint16_t &half : scale) half = std::min<uint16_t>(half & 0x7fff, 0x7f7f);
      if (scale[0] > scale[1]) std::swap(scale[0], scale[1]);
      std::memcpy(&values[at], scale, 4);
    }
  }
};

// --- what must hold ---------------------------------------------------------------------------

void check_indices(const Message &message) {
  const Shape &shape = message.shape;
  if (shape.count > shape.capacity) return; // its caller refuses before there is room for them
  Plain plain;
  read_indices(shape, message.indices.data(), plain);
  Exact<int64_t> indices(shape.count, -7);
  int64_t found = -7;
  const int status = cddp_ef_decode(message.indices.data(), shape.capacity, static_cast<int>(shape.low_bits),
                                    shape.bitmap_bytes, shape.numel, shape.count, indices.data(), &found);
  must(status == plain.status, "ef_decode's verdict is not the plain decoder's");
  must(status == CDDP_OK || status == CDDP_NOT_INCREASING || found == plain.found, "ef_decode found something else");
  if (status != CDDP_OK) return;
  for (int64_t i = 0; i < shape.count; ++i) must(indices[i] == plain.indices[static_cast<size_t>(i)], "ef_decode: another index");
  Bytes again(shape.index_bytes(), 0xa5);
  must(cddp_ef_encode(indices.data(), shape.count, shape.numel, shape.capacity, static_cast<int>(shape.low_bits),
                      shape.bitmap_bytes, again.data()) == CDDP_OK,
       "ef_encode refuses what ef_decode gave");
  for (int64_t bit = 0; bit < 8 * shape.index_bytes(); ++bit) { // but for bits that mean nothing
    const bool low = bit < 8 * shape.low_bytes, used = !low || bit < shape.count * shape.low_bits;
    must(bit_at(again.data(), bit) == (used && bit_at(message.indices.data(), bit)), "ef_encode: other bytes");
  }
}

void check_values(const Message &message) {
  const Shape &shape = message.shape;
  if (shape.format != CDDP_LOG8 && shape.format != CDDP_LOG4) return;
  std::vector<float> plain;
  const int width = shape.format == CDDP_LOG8 ? 8 : 4;
  Exact<float> values(shape.count, 7.0f);
  const int status = cddp_log_decode(message.values.data(), shape.count, width, values.data());
  must(status == read_values(shape, message.values.data(), plain), "log_decode's verdict is not the plain decoder's");
  for (int64_t i = 0; i < shape.count; ++i) {
    must(fuzz::same(values[i], status == CDDP_OK ? plain[static_cast<size_t>(i)] : 7.0f), "log_decode: another value");
    must(fuzz::finite(values[i]), "log_decode: not a number");
  }
  if (status != CDDP_OK) return;
  Bytes codes(shape.value_bytes()); // what was decoded can be sent again
  cddp_log_encode(values.data(), shape.count, width, codes.data());
  must(cddp_log_decode(codes.data(), shape.count, width, values.data()) == CDDP_OK, "log_decode refuses log_encode's codes");
}

int64_t position(int64_t index, int64_t shards, int64_t shard) {
  return index / 64 * 64 * shards + shard * 64 + index % 64;
}

void check_sum(const std::vector<Message> &messages, int64_t numel, int64_t shards, float scale, int threads) {
  std::vector<cddp_message> told;
  for (const Message &message : messages) told.push_back(message.as_told());
  Exact<float> out(numel, 7.0f), wanted(numel, 0.0f);
  int64_t which = -7, found = -7;
  const auto n = static_cast<int64_t>(told.size());
  const int status = cddp_sum_messages(out.data(), numel, shards, told.data(), n, messages[0].shape.format, scale, threads, &which, &found);
  const auto bad = std::find_if(messages.begin(), messages.end(), [](const Message &m) { return m.plain.status != CDDP_OK; });
  // Counts are looked at before anything else, in all messages.
  const auto full = std::find_if(messages.begin(), messages.end(), [](const Message &m) { return m.shape.count > m.shape.capacity; });
  const auto first = full != messages.end() ? full : bad;
  must(status == (first == messages.end() ? CDDP_OK : first->plain.status), "sum_messages' verdict is not the plain decoder's");
  if (status != CDDP_OK) {
    must(which == first - messages.begin(), "sum_messages blames another message");
    for (int64_t i = 0; i < numel; ++i) must(out[i] == 7.0f, "sum_messages wrote before it had checked");
    return;
  }
  for (const Message &message : messages)
    for (size_t i = 0; i < message.plain.indices.size(); ++i)
      wanted[position(message.plain.indices[i], shards, message.shard)] += message.plain.values[i] * scale;
  for (int64_t i = 0; i < numel; ++i) must(fuzz::same(out[i], wanted[i]), "sum_messages: another sum");
}

// The same entries, already decoded; where they are hostile nothing is promised but that nobody is hurt.
void check_accumulate(const Message &message, int64_t numel, int64_t shards, float scale) {
  const auto count = static_cast<int64_t>(message.plain.indices.size());
  Exact<int64_t> indices(count);
  Exact<float> values(count, 1.5f), others(count, 1.0f), out(numel, 7.0f), wanted(numel, 0.0f);
  for (int64_t i = 0; i < count; ++i) indices[i] = message.plain.indices[static_cast<size_t>(i)];
  const cddp_entries entries{values.data(), indices.data(), count, message.shard};
  const bool hostile = message.plain.status == CDDP_OUT_OF_RANGE || message.plain.status == CDDP_NOT_INCREASING;
  const int status = cddp_accumulate(out.data(), numel, shards, &entries, 1, scale, 1);
  must(hostile || status == CDDP_OK, "accumulate refuses good entries");
  for (int64_t i = 0; i < count && !hostile; ++i) wanted[position(indices[i], shards, message.shard)] = 1.5f * scale;
  for (int64_t i = 0; i < numel && !hostile; ++i) must(fuzz::same(out[i], wanted[i]), "accumulate: another sum");
  const int put = cddp_put_difference(out.data(), numel, shards, message.shard, indices.data(), values.data(),
                                      others.data(), count);
  must(hostile || put == CDDP_OK, "put_difference refuses good entries");
  for (int64_t i = 0; i < count && !hostile; ++i)
    must(out[position(indices[i], shards, message.shard)] == 0.5f, "put_difference: another place");
}

void check_checksum(const uint8_t *data, size_t size) {
  const auto n = static_cast<int64_t>(size / 4);
  const int64_t skip = n ? static_cast<int64_t>(size) % n : -1;
  uint64_t total = 0;
  for (int64_t j = 0; j < n; ++j) {
    const auto word = static_cast<uint64_t>(number_at(data, 32 * j, 32));
    if (j != skip) total += word * ((static_cast<uint64_t>(j) * 0x9E3779B1u + 0x85EBCA6Bu) | 1u);
  }
  must(cddp_checksum(data, n, skip) == static_cast<uint32_t>(total ^ total >> 32), "another checksum");
}

int64_t local_numel(int64_t numel, int64_t shards, int64_t shard) {
  int64_t mine = 0;
  for (int64_t block = shard; 64 * block < numel; block += shards) mine += std::min<int64_t>(64, numel - 64 * block);
  return mine;
}

} // namespace

// Input: format, shards, repairs, messages | threads << 2 | plain loops << 4 | a very long bucket << 5 | narrower
// loops << 6, scale, numel (2), then for each message shard, room, entries and the bytes of its parts.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  fuzz::Input input(data, size);
  const int format = input.byte() % 5;
  const int64_t shards = 1 + input.byte() % 4;
  const int repairs = input.byte();
  const int how = input.byte();
  static constexpr float kScales[] = {1.0f, 0.5f, 1.0f / 3, 1.0f / 7, 3e38f};
  const float scale = kScales[input.byte() % 5];
  const int64_t numel = input.word() % 700;
  const bool far = how & 32;
  cddp_allow_simd(how & 16 ? 0 : how & 64 ? 1 : 2);
  std::vector<Message> messages;
  for (int m = 0; m < 1 + how % 3; ++m) {
    const int64_t shard = input.byte() % shards;
    const int64_t n = far ? 2147483647 - input.byte() : local_numel(numel, shards, shard);
    const int64_t room = std::min<int64_t>(input.byte(), n);
    messages.emplace_back(Shape(n, room, input.byte() % (room + 2), format), shard);
    messages.back().fill(input, repairs);
    check_indices(messages.back());
    check_values(messages.back());
    if (!far) check_accumulate(messages.back(), numel, shards, scale);
  }
  if (!far) check_sum(messages, numel, shards, scale, 1 + (how >> 2 & 3));
  check_checksum(data, size);
  return 0;
}
