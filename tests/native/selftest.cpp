// Every function of csrc/kernels.h against the plainest code that gives the same result.
//
//   selftest SEED ROUNDS short|long|callers
//
// short: many small cases of everything. long: buckets that several threads share and that are
// written past the caches. callers: small cases from several threads at the same time.
//
// Buffers are exactly as long as kernels.h asks for and end where their allocation ends, so that
// AddressSanitizer sees every byte touched outside of them. tests/unit/test_sanitizers.py builds
// and runs this; a case that fails is named, and the same arguments bring it back.

#include "kernels.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <cmath>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <iterator>
#include <limits>
#include <memory>
#include <string>
#include <thread>
#include <vector>

namespace {

using Bytes = std::vector<uint8_t>;
using Floats = std::vector<float>;
using Integers = std::vector<int64_t>;

// --- tools ------------------------------------------------------------------------------------

// splitmix64: the same numbers everywhere, so no expression draws two of them in no certain order.
class Random {
public:
  explicit Random(uint64_t seed) : state_(seed) {}
  uint64_t next() {
    uint64_t z = state_ += 0x9E3779B97F4A7C15u;
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u;
    z = (z ^ z >> 27) * 0x94D049BB133111EBu;
    return z ^ z >> 31;
  }
  int64_t below(int64_t n) { return n > 0 ? static_cast<int64_t>(next() % static_cast<uint64_t>(n)) : 0; }
  bool chance(int percent) { return below(100) < percent; }
  double unit() { return static_cast<double>(next() >> 11) * 0x1p-53; }
  template <typename T, size_t n> T pick(const T (&from)[n]) { return from[below(n)]; }

private:
  uint64_t state_;
};

// What is being tried, for the message where it fails.
class Case {
public:
  __attribute__((format(printf, 2, 3))) explicit Case(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text_, sizeof text_, format, arguments);
    va_end(arguments);
    ++n_cases;
  }
  __attribute__((format(printf, 3, 4))) void must(bool holds, const char *format, ...) const {
    if (holds) return;
    fprintf(stderr, "selftest: [%s] %s: ", cddp_isa(), text_);
    va_list arguments;
    va_start(arguments, format);
    vfprintf(stderr, format, arguments);
    va_end(arguments);
    fputc('\n', stderr);
    _Exit(1);
  }
  static std::atomic<int64_t> n_cases;

private:
  char text_[400];
};
std::atomic<int64_t> Case::n_cases{0};

long long ll(int64_t x) { return x; }
uint32_t bits_of(float x) { return std::bit_cast<uint32_t>(x); }
uint32_t key_of(float x) { return bits_of(x) & 0x7fffffffu; }

// Exactly `size` elements up to the end of an allocation, now and then some odd way into it; full
// of rubbish. An empty one may be a null pointer: torch's empty tensors are.
//
// Sanitizers do not see every store past the caches, so where `margin` is asked for there are that
// many bytes on both sides instead, which must stay as they are.
template <typename T> class Buffer {
public:
  Buffer(Random &random, int64_t size, int64_t margin = 0) : size_(size), margin_(margin) {
    if (size == 0 && margin == 0 && random.chance(50)) return;
    const int64_t shift = random.chance(50) ? 0 : random.below(sizeof(T) == 1 ? 9 : 16);
    const int64_t before = shift * static_cast<int64_t>(sizeof(T)) + margin;
    const int64_t total = before + size * static_cast<int64_t>(sizeof(T)) + margin;
    memory_ = static_cast<uint8_t *>(malloc(static_cast<size_t>(total)));
    if (!memory_ && total > 0) abort();
    if (memory_) memset(memory_, 0xA5, static_cast<size_t>(total));
    data_ = reinterpret_cast<T *>(memory_ + before);
  }
  Buffer(Random &random, const std::vector<T> &from) : Buffer(random, std::ssize(from)) {
    std::copy(from.begin(), from.end(), data_);
  }
  ~Buffer() { free(memory_); }
  Buffer(const Buffer &) = delete;
  Buffer &operator=(const Buffer &) = delete;

  T *data() { return data_; }
  T &operator[](int64_t at) { return data_[at]; }
  bool intact() const {
    if (margin_ == 0) return true;
    const auto *first = reinterpret_cast<const uint8_t *>(data_);
    const auto *last = reinterpret_cast<const uint8_t *>(data_ + size_);
    const auto rubbish = [](uint8_t byte) { return byte == 0xA5; };
    return std::all_of(first - margin_, first, rubbish) && std::all_of(last, last + margin_, rubbish);
  }
  // Where it first differs from `wanted`, bit by bit; -1: nowhere.
  int64_t differs(const std::vector<T> &wanted, int64_t from = 0) const {
    for (int64_t i = 0; i < std::ssize(wanted); ++i)
      if (memcmp(&data_[from + i], &wanted[i], sizeof(T)) != 0) return from + i;
    return -1;
  }

private:
  uint8_t *memory_ = nullptr;
  T *data_ = nullptr;
  int64_t size_, margin_;
};

// Sizes at and around the places where loops change over.
int64_t any_size(Random &random) {
  static constexpr int64_t units[] = {1, 8, 16, 32, 64, 512, 2048};
  if (random.chance(30)) return random.below(5000);
  const int64_t unit = random.pick(units), times = random.below(std::min<int64_t>(5000 / unit + 1, 20));
  return std::max<int64_t>(0, unit * times + random.below(3) - 1);
}

// --- data -------------------------------------------------------------------------------------

enum Kind { kGaussian, kHeavy, kZero, kEqual, kFew, kSparse, kDenormal, kHuge, kSigns, kAnyBits, kRamp, kKinds };
constexpr const char *kind_names[] = {"gaussian", "heavy", "zero", "equal",    "few", "mostly zero",
                                      "denormal", "huge",  "+-0",  "any bits", "ramp"};
static_assert(std::size(kind_names) == kKinds);

float gaussian(Random &random) {
  const uint64_t bits = random.next();
  const uint64_t sum = (bits & 0xffff) + (bits >> 16 & 0xffff) + (bits >> 32 & 0xffff) + (bits >> 48);
  return static_cast<float>(sum) / 37837.0f - 3.4639f;
}

Floats draw(Random &random, Kind kind, int64_t n) {
  Floats x(static_cast<size_t>(n));
  const float equal = gaussian(random);
  static constexpr float few[] = {0.0f, -0.0f, 1.0f, -1.0f, 0.5f, 2.0f, -2.0f, 1e-30f};
  for (size_t i = 0; i < x.size(); ++i) {
    const auto sign = static_cast<uint32_t>(random.next() & 0x80000000u);
    switch (kind) {
    case kGaussian: x[i] = gaussian(random); break;
    case kHeavy:
      x[i] = gaussian(random);
      x[i] /= 1e-6f + static_cast<float>(random.unit());
      break;
    case kZero: x[i] = 0.0f; break;
    case kEqual: x[i] = sign ? -equal : equal; break;
    case kFew: x[i] = random.pick(few); break;
    case kSparse: x[i] = random.chance(2) ? gaussian(random) : 0.0f; break;
    case kDenormal: x[i] = std::bit_cast<float>(sign | static_cast<uint32_t>(random.below(0x00800010))); break;
    case kHuge: x[i] = std::bit_cast<float>(sign | static_cast<uint32_t>(0x7f7fffff - random.below(0x100000))); break;
    case kSigns: x[i] = std::bit_cast<float>(sign); break;
    case kAnyBits: x[i] = std::bit_cast<float>(sign | static_cast<uint32_t>(random.below(0x7f000000))); break;
    default: x[i] = std::bit_cast<float>(sign | (0x3f800000u + static_cast<uint32_t>(i))); break;
    }
  }
  return x;
}

// Each shard's bucket positions in local order, by dealing out blocks one after the other.
std::vector<Integers> deal(int64_t numel, int64_t shards) {
  std::vector<Integers> positions(static_cast<size_t>(shards));
  for (int64_t at = 0; at < numel; ++at) positions[at / 64 % shards].push_back(at);
  return positions;
}

// A strictly increasing choice of `count` of 0 to numel - 1.
Integers choose(Random &random, int64_t numel, int64_t count) {
  Integers chosen;
  if (count * 4 > numel) { // each with the chance that leaves enough
    for (int64_t i = 0; i < numel; ++i)
      if (random.below(numel - i) < count - std::ssize(chosen)) chosen.push_back(i);
    return chosen;
  }
  while (std::ssize(chosen) < count) {
    while (std::ssize(chosen) < count) chosen.push_back(random.below(numel));
    std::sort(chosen.begin(), chosen.end());
    chosen.erase(std::unique(chosen.begin(), chosen.end()), chosen.end());
  }
  return chosen;
}

// --- selection --------------------------------------------------------------------------------

// The k largest magnitudes, the lower index first among equals; in increasing order.
Integers largest(const Floats &x, int64_t k) {
  std::vector<uint64_t> order;
  for (size_t i = 0; i < x.size(); ++i) order.push_back(uint64_t{key_of(x[i])} << 32 | (0xffffffffu - i));
  if (k < std::ssize(order)) std::nth_element(order.begin(), order.begin() + k, order.end(), std::greater<>());
  Integers chosen;
  for (int64_t i = 0; i < k; ++i) chosen.push_back(0xffffffff - static_cast<int64_t>(order[i] & 0xffffffffu));
  std::sort(chosen.begin(), chosen.end());
  return chosen;
}

// selection.sample_positions
Integers sample_positions(int64_t n) {
  Integers positions;
  if (n <= 2048) return positions;
  const int64_t lines = std::min<int64_t>(std::max<int64_t>(n / 2048, 128), 8192), width = n / lines;
  for (int64_t j = 0; j < lines; ++j) {
    const int64_t jitter = (j * 40503 % 65536) * (width - 16 + 1) / 65536;
    for (int64_t i = 0; i < 16; ++i) positions.push_back((j * width + jitter) / 16 * 16 + i);
  }
  return positions;
}

// selection.roughly_topk_indices
Integers roughly_largest(const Floats &x, int64_t k) {
  const int64_t n = std::ssize(x);
  if (k == 0 || k >= n || n <= 2048) return largest(x, k);
  std::vector<uint32_t> sample;
  for (const int64_t at : sample_positions(n)) sample.push_back(key_of(x[at]));
  std::sort(sample.begin(), sample.end(), std::greater<>());
  const double share = static_cast<double>(std::ssize(sample) * k) / static_cast<double>(n);
  const auto rank = std::max<int64_t>(1, static_cast<int64_t>(share + 0.5));
  Integers passing;
  for (int64_t i = 0; i < n; ++i)
    if (key_of(x[i]) >= sample[rank - 1]) passing.push_back(i);
  const int64_t count = std::ssize(passing);
  if (2 * count < k || count > 2 * k) return largest(x, k);
  if (count <= k) return passing;
  Integers thinned;
  for (int64_t i = 0; i < count; ++i)
    if ((i + 1) * k / count > i * k / count) thinned.push_back(passing[i]);
  return thinned;
}

int64_t any_k(Random &random, int64_t size) {
  switch (random.below(size > 2048 ? 14 : 8)) {
  case 0: return 0;
  case 1: return std::min<int64_t>(1, size);
  case 2: return size;
  case 3: return std::max<int64_t>(0, size - 1);
  case 4: return random.below(size + 1);
  case 5: return size / 3;
  case 6: return (size + 9) / 10;
  default: return (size + 99) / (random.chance(70) ? 100 : 1000);
  }
}

// One range a shard, or several with gaps, some of them empty; some shards may have none. There are
// few large buckets, so among their ranges one is dense: it goes through loops of its own.
std::vector<cddp_quota> any_quotas(Random &random, const std::vector<Integers> &positions) {
  std::vector<cddp_quota> quotas;
  const bool large = positions[0].size() > 50000, several = random.chance(large ? 70 : 40);
  for (int64_t s = 0; s < std::ssize(positions); ++s) {
    const int64_t size = std::ssize(positions[s]);
    if (!several) {
      if (size > 0 || random.chance(50)) quotas.push_back({s, 0, size, any_k(random, size)});
      continue;
    }
    Integers cuts;
    for (int64_t i = 2 * (large + random.below(4)); i > 0; --i) cuts.push_back(random.below(size + 1));
    std::sort(cuts.begin(), cuts.end());
    for (size_t i = 0; i + 1 < cuts.size(); i += random.chance(50) ? 2 : 1) {
      const int64_t length = cuts[i + 1] - cuts[i];
      quotas.push_back({s, cuts[i], cuts[i + 1], large && i == 0 ? length / 3 : any_k(random, length)});
    }
  }
  return quotas;
}

enum Trick { kHonest, kShrunk, kGrown, kTiny, kGiant, kLevel, kTricks };
constexpr const char *trick_names[] = {"honest", "shrunk", "grown", "tiny", "giant", "level"};
static_assert(std::size(trick_names) == kTricks);

// Makes the places that are sampled misleading: a little or far too small, too large, or all alike.
void mislead(Random &random, Trick trick, const std::vector<cddp_quota> &quotas,
             const std::vector<Integers> &positions, Floats &residual, Floats &gradient) {
  const auto gentle = static_cast<float>(0.5 + 0.5 * random.unit());
  for (const cddp_quota &quota : quotas) {
    for (const int64_t at : sample_positions(quota.stop - quota.start)) {
      const int64_t i = positions[quota.shard][quota.start + at];
      switch (trick) {
      case kShrunk: residual[i] *= gentle, gradient[i] *= gentle; break;
      case kGrown: residual[i] /= gentle, gradient[i] /= gentle; break;
      case kTiny: residual[i] = 0.0f, gradient[i] *= 1e-6f; break;
      case kGiant: residual[i] = 0.0f, gradient[i] *= 1e6f; break;
      case kLevel: residual[i] = 0.0f, gradient[i] = 100.0f; break;
      default: break;
      }
    }
  }
}

void spoil(Random &random, Floats &residual, Floats &gradient) {
  static constexpr float bad[] = {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity(),
                                  -std::numeric_limits<float>::infinity(), std::numeric_limits<float>::max()};
  if (gradient.empty()) return;
  for (int64_t i = 1 + random.below(3 + std::ssize(gradient) / 1000); i > 0; --i) { // two largest numbers overflow
    const int64_t at = random.below(std::ssize(gradient));
    residual[at] = gradient[at] = random.pick(bad);
  }
}

// The residual is not there, a buffer of its own, or what `out` holds before.
enum Place { kNone, kSeparate, kInPlace, kPlaces };
constexpr const char *place_names[] = {"none", "separate", "in place"};
static_assert(std::size(place_names) == kPlaces);

void check_take(Random &random, int64_t numel, Place place, int threads, bool spoilt) {
  const int64_t shards = random.chance(50) ? 1 : 1 + random.below(7);
  const auto kind = static_cast<Kind>(random.below(kKinds));
  const auto trick = random.chance(40) ? kHonest : static_cast<Trick>(random.below(kTricks));
  const bool exact = random.chance(60);
  const Case test("take_topk numel=%lld shards=%lld %s data, sample %s%s, residual %s, exact=%d threads=%d",
                  ll(numel), ll(shards), kind_names[kind], trick_names[trick], spoilt ? ", not finite" : "",
                  place_names[place], exact, threads);

  const std::vector<Integers> positions = deal(numel, shards);
  const std::vector<cddp_quota> quotas = any_quotas(random, positions);
  Floats r = draw(random, kind, numel), g = draw(random, kind, numel);
  if (kind == kHuge) // so that sums are huge, and finite
    for (Floats *x : {&r, &g})
      for (float &value : *x) value *= 0.5f;
  mislead(random, trick, quotas, positions, r, g);
  if (spoilt) spoil(random, r, g);

  // What must come out.
  Floats left(g);
  if (place != kNone)
    for (size_t i = 0; i < left.size(); ++i) left[i] = r[i] + g[i];
  const bool finite = std::all_of(left.begin(), left.end(), [](float x) { return std::isfinite(x); });
  std::vector<Integers> wanted_indices;
  std::vector<Floats> wanted_values;
  int64_t total = 0;
  for (const cddp_quota &quota : quotas) {
    total += quota.k;
    if (!finite) continue;
    const Integers &mine = positions[quota.shard];
    Floats x;
    for (int64_t i = quota.start; i < quota.stop; ++i) x.push_back(left[mine[i]]);
    wanted_indices.push_back(exact ? largest(x, quota.k) : roughly_largest(x, quota.k));
    wanted_values.emplace_back();
    for (int64_t &index : wanted_indices.back()) {
      wanted_values.back().push_back(x[index]);
      index += quota.start;
      left[mine[index]] = 0.0f;
    }
  }

  Buffer<float> gradient(random, g), residual(random, place == kSeparate ? r : Floats());
  Buffer<float> out(random, numel, random.chance(50) ? 0 : 128), values(random, total);
  Buffer<int64_t> indices(random, total), taken(random, std::ssize(quotas));
  Buffer<cddp_quota> table(random, quotas);
  if (place == kInPlace) std::copy(r.begin(), r.end(), out.data());
  const float *first = place == kNone ? nullptr : place == kSeparate ? residual.data() : out.data();

  test.must(cddp_finite(first, gradient.data(), numel) == finite, "cddp_finite is wrong: it should say %d", finite);
  const int status = cddp_take_topk(first, gradient.data(), out.data(), numel, shards, table.data(),
                                    std::ssize(quotas), values.data(), indices.data(), taken.data(), exact, threads);
  test.must(status == (finite ? CDDP_OK : CDDP_NOT_FINITE), "status %d", status);
  test.must(gradient.differs(g) < 0, "the gradient was written to");
  test.must(place != kSeparate || residual.differs(r) < 0, "the residual was written to");
  test.must(out.intact(), "written beside out");
  if (!finite) return;
  int64_t room = 0;
  for (size_t q = 0; q < quotas.size(); room += quotas[q++].k) {
    const cddp_quota &quota = quotas[q];
    const auto must = [&](bool holds, const char *what) {
      test.must(holds, "quota %zu (shard %lld, %lld to %lld, k=%lld): %s", q, ll(quota.shard), ll(quota.start),
                ll(quota.stop), ll(quota.k), what);
    };
    must(taken[static_cast<int64_t>(q)] == std::ssize(wanted_indices[q]), "wrong number taken");
    must(indices.differs(wanted_indices[q], room) < 0, "wrong indices");
    must(values.differs(wanted_values[q], room) < 0, "wrong values");
  }
  test.must(out.differs(left) < 0, "out[%lld] is wrong", ll(out.differs(left)));
}

// --- sums -------------------------------------------------------------------------------------

void check_sums(Random &random, int64_t numel, int threads) {
  static constexpr int64_t many[] = {63, 64, 65, 100}; // a round of blocks as long as a tile, and longer
  static constexpr float scales[] = {1.0f, 0.25f, 1.0f / 3.0f, 0.0f, -1e-3f};
  const int64_t shards = random.chance(40) ? 1 : random.chance(80) ? 1 + random.below(7) : random.pick(many);
  const float scale = random.pick(scales);
  const int64_t n_pieces = random.below(9);
  const Case test("accumulate and add numel=%lld shards=%lld pieces=%lld scale=%g threads=%d", ll(numel), ll(shards),
                  ll(n_pieces), static_cast<double>(scale), threads);

  const std::vector<Integers> positions = deal(numel, shards);
  const Floats before = draw(random, kGaussian, numel);
  Floats fresh(before.size(), 0.0f), onto(before);
  std::vector<std::unique_ptr<Buffer<float>>> values;
  std::vector<std::unique_ptr<Buffer<int64_t>>> indices;
  Buffer<cddp_entries> pieces(random, n_pieces);
  for (int64_t p = 0; p < n_pieces; ++p) {
    const int64_t shard = random.below(shards);
    const Integers &mine = positions[shard];
    const int64_t size = std::ssize(mine), count = std::min(any_k(random, size), numel > 100000 ? size / 20 : size);
    const Integers chosen = choose(random, size, count);
    const Floats x = draw(random, random.chance(80) ? kGaussian : kFew, count);
    for (int64_t i = 0; i < count; ++i) {
      const float product = x[i] * scale;
      fresh[mine[chosen[i]]] += product;
      onto[mine[chosen[i]]] += product;
    }
    values.push_back(std::make_unique<Buffer<float>>(random, x));
    indices.push_back(std::make_unique<Buffer<int64_t>>(random, chosen));
    pieces[p] = {values.back()->data(), indices.back()->data(), count, shard};
  }
  Buffer<float> out(random, numel, random.chance(50) ? 0 : 128), sum(random, before);
  const int status = cddp_accumulate(out.data(), numel, shards, pieces.data(), n_pieces, scale, threads);
  test.must(status == CDDP_OK, "status %d", status);
  test.must(out.differs(fresh) < 0, "accumulate: out[%lld] is wrong", ll(out.differs(fresh)));
  test.must(out.intact(), "accumulate: written beside out");
  // Indices that no decoder lets through: a status, and nothing touched outside.
  for (int64_t p = 0; p < n_pieces; ++p) {
    if (pieces[p].count == 0) continue;
    static constexpr int64_t wrong[] = {-1, INT64_MIN, INT64_MAX, int64_t{1} << 31};
    int64_t &one = (*indices[p])[random.below(pieces[p].count)];
    one = random.chance(30) ? numel + random.below(100) : random.pick(wrong);
    const int refused = cddp_accumulate(out.data(), numel, shards, pieces.data(), n_pieces, scale, threads);
    test.must(refused == CDDP_OUT_OF_RANGE, "accumulate: status %d for index %lld", refused, ll(one));
    test.must(out.intact(), "accumulate: written beside out");
    break;
  }
}

void check_put_difference(Random &random) {
  const int64_t numel = any_size(random), shards = 1 + random.below(7), shard = random.below(shards);
  const Case test("put_difference numel=%lld shards=%lld shard=%lld", ll(numel), ll(shards), ll(shard));
  const std::vector<Integers> positions = deal(numel, shards);
  const Integers &mine = positions[shard];
  const int64_t count = any_k(random, std::ssize(mine));
  const Integers chosen = choose(random, std::ssize(mine), count);
  const Floats a = draw(random, kGaussian, count), b = draw(random, kGaussian, count);
  Floats wanted = draw(random, kAnyBits, numel);
  Buffer<float> out(random, wanted), as(random, a), bs(random, b);
  Buffer<int64_t> indices(random, chosen);
  for (size_t i = 0; i < chosen.size(); ++i)
    wanted[mine[chosen[i]]] = a[i] - b[i];
  const int status =
      cddp_put_difference(out.data(), numel, shards, shard, indices.data(), as.data(), bs.data(), count);
  test.must(status == CDDP_OK, "status %d", status);
  test.must(out.differs(wanted) < 0, "out[%lld] is wrong", ll(out.differs(wanted)));
}

// --- Elias-Fano -------------------------------------------------------------------------------

bool bit_at(const Bytes &data, int64_t bit) { return data[bit / 8] >> (bit % 8) & 1; }

void flip(Bytes &data, int64_t bit) {
  data[bit / 8] = static_cast<uint8_t>(data[bit / 8] ^ 1 << (bit % 8));
}

// The sizes in docs/wire-format.md.
struct EliasFano {
  int64_t numel, capacity, low_bytes = 0, bitmap_bytes = 0;
  int low_bits = 0;

  EliasFano(int64_t n, int64_t room) : numel(n), capacity(room) {
    if (room == 0) return;
    while (int64_t{2} << low_bits <= n / room) ++low_bits;
    low_bytes = (low_bits * room + 7) / 8;
    bitmap_bytes = (room + (n >> low_bits) + 1 + 7) / 8;
  }
  int64_t size() const { return low_bytes + bitmap_bytes; }

  int encode(const Integers &indices, Bytes &data) const {
    if (std::ssize(indices) > capacity) return CDDP_WRONG_COUNT;
    data.assign(static_cast<size_t>(size()), 0);
    for (int64_t i = 0, last = -1; i < std::ssize(indices); ++i) {
      const int64_t index = indices[i];
      if (index <= last) return CDDP_NOT_INCREASING;
      if (index >= numel) return CDDP_OUT_OF_RANGE;
      last = index;
      for (int bit = 0; bit < low_bits; ++bit)
        if (index >> bit & 1) flip(data, i * low_bits + bit);
      flip(data, low_bytes * 8 + (index >> low_bits) + i);
    }
    return CDDP_OK;
  }

  int64_t ones(const Bytes &data) const {
    int64_t count = 0;
    for (int64_t bit = 0; bit < bitmap_bytes * 8; ++bit) count += bit_at(data, low_bytes * 8 + bit);
    return count;
  }

  // For at most `capacity` entries.
  int decode(const Bytes &data, int64_t count, Integers &indices) const {
    if (ones(data) != count) return CDDP_WRONG_COUNT;
    for (int64_t bit = 0; bit < bitmap_bytes * 8; ++bit) {
      if (!bit_at(data, low_bytes * 8 + bit)) continue;
      const int64_t i = std::ssize(indices);
      int64_t index = (bit - i) << low_bits;
      for (int low = 0; low < low_bits; ++low) index |= int64_t{bit_at(data, i * low_bits + low)} << low;
      indices.push_back(index);
    }
    if (!indices.empty() && indices.back() >= numel) return CDDP_OUT_OF_RANGE;
    for (size_t i = 1; i < indices.size(); ++i)
      if (indices[i] <= indices[i - 1]) return CDDP_NOT_INCREASING;
    return CDDP_OK;
  }
};

EliasFano any_elias_fano(Random &random) {
  if (random.chance(20)) return {std::numeric_limits<int32_t>::max() - random.below(3), 1 + random.below(9)};
  if (random.chance(20)) return {1 + random.below(int64_t{1} << (1 + random.below(26))), 1};
  const int64_t numel = any_size(random), capacity = any_k(random, numel);
  return {numel, capacity};
}

void check_ef_encode(Random &random) {
  const EliasFano code = any_elias_fano(random);
  const int64_t count = random.chance(60) ? code.capacity : random.below(code.capacity + 1);
  Integers chosen = choose(random, code.numel, count);
  const int64_t damage = random.below(12); // for each of the first five, one thing that no message holds
  const auto any = [&]() -> int64_t & { return chosen[random.below(count)]; };
  if (damage == 0) chosen.push_back(code.numel);
  if (damage == 1 && count > 0) any() = code.numel + random.below(3);
  if (damage == 2 && count > 0) any() = -1 - random.below(3);
  if (damage == 3 && count > 1) any() = any();
  if (damage == 4) chosen.resize(static_cast<size_t>(code.capacity + 1 + random.below(3)), code.numel);
  const Case test("ef_encode numel=%lld capacity=%lld count=%zu damage=%lld", ll(code.numel), ll(code.capacity),
                  chosen.size(), ll(damage));
  Bytes wanted;
  const int wanted_status = code.encode(chosen, wanted);
  Buffer<int64_t> indices(random, chosen);
  Buffer<uint8_t> data(random, code.size());
  const int status = cddp_ef_encode(indices.data(), std::ssize(chosen), code.numel, code.capacity, code.low_bits,
                                    code.bitmap_bytes, data.data());
  // An index that is too large may be followed by one that is smaller: either is a reason.
  const auto order = [](int s) { return s == CDDP_NOT_INCREASING || s == CDDP_OUT_OF_RANGE; };
  test.must(status == wanted_status || (order(status) && order(wanted_status)), "status %d, not %d", status,
            wanted_status);
  if (status == CDDP_OK) test.must(data.differs(wanted) < 0, "byte %lld is wrong", ll(data.differs(wanted)));
}

void check_ef_decode(Random &random) {
  const EliasFano code = any_elias_fano(random);
  int64_t count = random.chance(60) ? code.capacity : random.below(code.capacity + 1);
  Bytes sent;
  code.encode(choose(random, code.numel, count), sent);
  sent.resize(static_cast<size_t>(code.size()));
  const int64_t damage = random.below(8);
  const int64_t bits = 8 * code.size();
  if (damage == 0 && bits > 0) // anywhere
    for (int64_t i = 1 + random.below(3); i > 0; --i) flip(sent, random.below(bits));
  if (damage == 1 && code.low_bytes > 0) // the count stays right
    for (int64_t i = 1 + random.below(3); i > 0; --i) flip(sent, random.below(8 * code.low_bytes));
  if (damage == 2)
    for (uint8_t &byte : sent) byte = static_cast<uint8_t>(random.next());
  if (damage == 3)
    std::fill(sent.begin(), sent.end(), random.chance(50) ? 0 : 255);
  if (damage == 4) count = std::max<int64_t>(0, count + random.below(5) - 2);
  if (damage == 5 && code.bitmap_bytes > 0) { // a one moves
    for (int64_t i = 0; i < 2; ++i) flip(sent, 8 * code.low_bytes + random.below(8 * code.bitmap_bytes));
  }
  if (damage < 6 && random.chance(70)) count = code.ones(sent); // a header that agrees with the damage
  const Case test("ef_decode numel=%lld capacity=%lld count=%lld damage=%lld", ll(code.numel), ll(code.capacity),
                  ll(count), ll(damage));
  Buffer<uint8_t> data(random, sent);
  Buffer<int64_t> indices(random, count);
  int64_t found = -7;
  const int status = cddp_ef_decode(data.data(), code.capacity, code.low_bits, code.bitmap_bytes, code.numel, count,
                                    indices.data(), &found);
  if (count > code.capacity) { // nobody says what their low bits are; what is let through must be good
    int64_t last = -1;
    for (int64_t i = 0; status == CDDP_OK && i < count; last = indices[i++])
      test.must(indices[i] > last && indices[i] < code.numel, "index %lld is %lld", ll(i), ll(indices[i]));
    return;
  }
  Integers wanted;
  const int wanted_status = code.decode(sent, count, wanted);
  test.must(status == wanted_status, "status %d, not %d", status, wanted_status);
  if (status == CDDP_OK) test.must(indices.differs(wanted) < 0, "index %lld is wrong", ll(indices.differs(wanted)));
  if (status == CDDP_WRONG_COUNT) test.must(found == code.ones(sent), "found %lld ones", ll(found));
  if (status == CDDP_OUT_OF_RANGE) test.must(found == wanted.back(), "found index %lld", ll(found));
}

// --- logarithmic codes ------------------------------------------------------------------------

int64_t floor_div(int64_t a, int64_t b) { return a / b - (a % b < 0 ? 1 : 0); }

int64_t log_size(int64_t count, int bits) { return 4 * ((count + 63) / 64) + (count * bits + 7) / 8; }

struct Steps {
  int64_t base, step, top;
  Steps(int64_t low16, int64_t high16, int bits)
      : base(low16 << 16), step(0), top((int64_t{1} << (bits - 1)) - 1) {
    step = std::max<int64_t>(1, ((high16 - low16) << 16) / (top - 1));
  }
};

void put_code(Bytes &data, int64_t bit, int64_t code, int bits) {
  for (int i = 0; i < bits; ++i)
    if (code >> i & 1) flip(data, bit + i);
}

Bytes log_encoded(const Floats &values, int bits) {
  const int64_t count = std::ssize(values), scales = 4 * ((count + 63) / 64);
  Bytes data(static_cast<size_t>(log_size(count, bits)), 0);
  for (int64_t block = 0; block * 64 < count; ++block) {
    const int64_t from = block * 64, to = std::min(count, from + 64);
    int64_t highest = 0, lowest = int64_t{1} << 40;
    for (int64_t i = from; i < to; ++i) {
      const int64_t key = key_of(values[i]);
      highest = std::max(highest, key);
      if (key > 0) lowest = std::min(lowest, key);
    }
    lowest = std::min(std::max(lowest, highest - (bits == 8 ? 15 : 4) * (int64_t{1} << 23)), highest);
    const int64_t low16 = lowest >> 16, high16 = std::min<int64_t>((highest + 0xffff) >> 16, 0x7f7f);
    const Steps s(low16, high16, bits);
    put_code(data, block * 32, low16, 16);
    put_code(data, block * 32 + 16, high16, 16);
    for (int64_t i = from; i < to; ++i) {
      const float value = values[i];
      const int64_t key = key_of(value);
      if (key == 0 || key < s.base - (1 << 23)) continue;
      const int64_t level = std::clamp<int64_t>(floor_div(key - s.base + s.step / 2, s.step) + 1, 1, s.top);
      put_code(data, scales * 8 + i * bits, level | (std::signbit(value) ? int64_t{1} << (bits - 1) : 0), bits);
    }
  }
  return data;
}

int log_decoded(const Bytes &data, int64_t count, int bits, Floats &values) {
  const int64_t scales = 4 * ((count + 63) / 64);
  const auto number = [&](int64_t bit, int width) {
    int64_t x = 0;
    for (int i = 0; i < width; ++i) x |= int64_t{bit_at(data, bit + i)} << i;
    return x;
  };
  for (int64_t i = 0; i < count; ++i) {
    const int64_t low16 = number(i / 64 * 32, 16), high16 = number(i / 64 * 32 + 16, 16);
    if (low16 > high16 || high16 > 0x7f7f) return CDDP_BAD_SCALE;
    const Steps s(low16, high16, bits);
    const int64_t code = number(scales * 8 + i * bits, bits), level = code & s.top;
    const int64_t key = level == 0 ? 0 : s.base + (level - 1) * s.step;
    values.push_back(std::bit_cast<float>(static_cast<uint32_t>(key | (code >> (bits - 1)) << 31)));
  }
  return CDDP_OK;
}

void check_log(Random &random) {
  const int bits = random.chance(50) ? 8 : 4;
  const auto kind = static_cast<Kind>(random.below(kKinds));
  const int64_t count = any_size(random) / 4;
  const int64_t damage = random.below(5);
  const Case test("log codes bits=%d count=%lld %s data damage=%lld", bits, ll(count), kind_names[kind], ll(damage));
  const Floats x = draw(random, kind, count);
  Bytes sent = log_encoded(x, bits);
  Buffer<float> values(random, x), seen(random, count);
  Buffer<uint8_t> data(random, log_size(count, bits));
  cddp_log_encode(values.data(), count, bits, data.data());
  test.must(data.differs(sent) < 0, "encoded byte %lld is wrong", ll(data.differs(sent)));

  if (damage == 0)
    for (uint8_t &byte : sent) byte = static_cast<uint8_t>(random.next());
  if (damage == 1 && !sent.empty())
    for (int64_t i = 1 + random.below(3); i > 0; --i) flip(sent, random.below(8 * std::ssize(sent)));
  if (damage == 2) // any scales that may be
    for (int64_t block = 0; block * 64 < count; ++block) {
      const int64_t high16 = random.below(0x7f80), low16 = random.below(high16 + 1);
      std::fill_n(sent.begin() + 4 * block, 4, uint8_t{0});
      put_code(sent, block * 32, low16, 16);
      put_code(sent, block * 32 + 16, high16, 16);
    }
  Floats wanted;
  const int wanted_status = log_decoded(sent, count, bits, wanted);
  Buffer<uint8_t> received(random, sent);
  const int status = cddp_log_decode(received.data(), count, bits, seen.data());
  test.must(status == wanted_status, "status %d, not %d", status, wanted_status);
  if (status != CDDP_OK) return;
  test.must(seen.differs(wanted) < 0, "decoded value %lld is wrong", ll(seen.differs(wanted)));
  for (int64_t i = 0; i < count; ++i) test.must(std::isfinite(seen[i]), "decoded value %lld is not finite", ll(i));
}

// --- checksum ---------------------------------------------------------------------------------

// --- sums of messages as they travel ----------------------------------------------------------

// A value part, and the values that it stands for.
Bytes value_part(const Floats &x, int format, Floats &seen) {
  if (format == CDDP_LOG8 || format == CDDP_LOG4) {
    const int bits = format == CDDP_LOG8 ? 8 : 4;
    Bytes data = log_encoded(x, bits);
    seen.clear();
    log_decoded(data, std::ssize(x), bits, seen);
    return data;
  }
  Bytes data;
  seen = x;
  for (float &value : seen) {
    uint32_t word;
    memcpy(&word, &value, 4);
    if (format == CDDP_BF16) word &= 0xffff0000u; // cut off, which is good enough for a test
    if (format == CDDP_FP16) { // sixteen small integers and their signs: exact in every half
      value = static_cast<float>(static_cast<int>(word & 15)) * (word >> 31 ? -1.0f : 1.0f);
      const uint32_t n = word & 15;
      const int top = n ? 31 - __builtin_clz(n) : 0;
      const uint32_t half = n ? static_cast<uint32_t>(15 + top) << 10 | (n << (10 - top) & 0x3ff) : 0;
      word = (half | (word >> 31) << 15) << 16;
    } else {
      memcpy(&value, &word, 4);
    }
    for (int byte = format == CDDP_FP32 ? 0 : 2; byte < 4; ++byte)
      data.push_back(static_cast<uint8_t>(word >> 8 * byte));
  }
  return data;
}

void check_sum_messages(Random &random, int64_t numel, int threads) {
  const int64_t shards = random.chance(40) ? 1 : 1 + random.below(7), n = random.below(6);
  const int format = static_cast<int>(random.below(5));
  const int64_t damaged = n > 0 && random.chance(40) ? random.below(n) : -1;
  const Case test("sum_messages numel=%lld shards=%lld messages=%lld format=%d damaged=%lld threads=%d",
                  ll(numel), ll(shards), ll(n), format, ll(damaged), threads);
  const std::vector<Integers> positions = deal(numel, shards);
  const Floats before = draw(random, kGaussian, numel);
  Floats wanted(before.size(), 0.0f);
  std::vector<std::unique_ptr<Buffer<uint8_t>>> parts;
  Buffer<cddp_message> messages(random, n);
  for (int64_t m = 0; m < n; ++m) {
    const int64_t shard = random.below(shards);
    const Integers &mine = positions[shard];
    const int64_t size = std::ssize(mine), most = numel > 100000 ? size / 20 : size;
    const EliasFano code(size, std::min(any_k(random, size), most));
    const int64_t count = random.chance(60) ? code.capacity : random.below(code.capacity + 1);
    const Integers chosen = choose(random, size, count);
    Floats seen;
    Bytes values = value_part(draw(random, kGaussian, count), format, seen), indices;
    code.encode(chosen, indices);
    indices.resize(static_cast<size_t>(code.size()));
    for (int64_t i = 0; i < count; ++i) {
      const float product = seen[i] * 0.3f;
      wanted[mine[chosen[i]]] += product;
    }
    if (m == damaged) {
      Bytes &part = random.chance(50) ? indices : values;
      for (int64_t i = random.below(4); i > 0 && !part.empty(); --i) flip(part, random.below(8 * std::ssize(part)));
    }
    parts.push_back(std::make_unique<Buffer<uint8_t>>(random, indices));
    parts.push_back(std::make_unique<Buffer<uint8_t>>(random, values));
    messages[m] = {parts[2 * m]->data(), parts[2 * m + 1]->data(), count, shard, size, code.capacity,
                   code.low_bits,        code.bitmap_bytes};
  }
  Buffer<float> out(random, before);
  int64_t which = -1, found = -1;
  const int status = cddp_sum_messages(out.data(), numel, shards, messages.data(), n, format, 0.3f, threads, &which, &found);
  if (status != CDDP_OK) {
    test.must(damaged >= 0 && which == damaged, "status %d about message %lld", status, ll(which));
    test.must(out.differs(before) < 0, "out[%lld] was written to", ll(out.differs(before)));
  } else if (damaged < 0) {
    test.must(out.differs(wanted) < 0, "out[%lld] is wrong", ll(out.differs(wanted)));
  }
  test.must(out.intact(), "written beside out");
}

void check_checksum(Random &random) {
  const int64_t n_words = any_size(random) / 4, skip = random.chance(30) ? -1 : random.below(n_words);
  const Case test("checksum words=%lld skip=%lld", ll(n_words), ll(skip));
  Bytes message(static_cast<size_t>(4 * n_words));
  for (uint8_t &byte : message) byte = static_cast<uint8_t>(random.next());
  uint64_t total = 0;
  for (int64_t i = 0; i < std::ssize(message); ++i) { // byte by byte
    if (i / 4 == skip) continue;
    const uint64_t weight = (static_cast<uint64_t>(i / 4) * 0x9E3779B1u + 0x85EBCA6Bu) | 1u;
    total += (uint64_t{message[i]} << 8 * (i % 4)) * weight;
  }
  const auto wanted = static_cast<uint32_t>((total ^ total >> 32) & 0xffffffffu);
  Buffer<uint8_t> data(random, message);
  const uint32_t got = cddp_checksum(data.data(), n_words, skip);
  test.must(got == wanted, "%08x, not %08x", got, wanted);
}

// --- what runs --------------------------------------------------------------------------------

void small_cases(Random &random) {
  for (int i = 0; i < 2; ++i) {
    const auto place = static_cast<Place>(random.below(kPlaces));
    const int64_t numel = i == 0 ? any_size(random) : 2049 + random.below(20000); // above 2048 a sample is drawn
    const auto threads = static_cast<int>(random.below(5));
    check_take(random, numel, place, threads, random.chance(8));
  }
  const int64_t numel = any_size(random);
  check_sums(random, numel, static_cast<int>(random.below(5)));
  check_put_difference(random);
  check_sum_messages(random, any_size(random), 1);
  check_ef_encode(random);
  check_ef_decode(random);
  check_ef_decode(random);
  check_log(random);
  check_checksum(random);
}

// One thread works on 512K elements at least; from as many on, results are written past the caches.
void large_cases(Random &random, int64_t round) {
  const int64_t numel = (4 - round % 4) * (512 * 1024) + random.below(5000);
  const int threads = round % 3 == 2 ? static_cast<int>(round % 5) : 4;
  check_take(random, numel, static_cast<Place>(round % kPlaces), threads, false);
  if (round % 3 == 0) check_take(random, numel, kNone, threads, true); // several threads may find out
  check_sums(random, numel, threads);
  check_sum_messages(random, numel, threads);
}

void check_isa() {
  const Case test("cddp_isa");
  const auto wide = [](const std::string &name) { return name == "avx2" || name == "avx512"; };
  const auto known = [&](const std::string &name) { return name == "baseline" || name == "neon" || wide(name); };
  cddp_allow_simd(0);
  const std::string plain = cddp_isa();
  cddp_allow_simd(2);
  const std::string best = cddp_isa();
  test.must(known(plain) && known(best), "%s, and %s without SIMD", best.c_str(), plain.c_str());
  test.must(best == plain || wide(best), "%s where there is %s", plain.c_str(), best.c_str());
}

} // namespace

int main(int argc, char **argv) {
  const std::string what = argc == 4 ? argv[3] : "";
  if (what != "short" && what != "long" && what != "callers") {
    fprintf(stderr, "usage: selftest SEED ROUNDS short|long|callers\n");
    return 2;
  }
  const uint64_t seed = strtoull(argv[1], nullptr, 10);
  const int64_t rounds = strtoll(argv[2], nullptr, 10);
  check_isa();
  const auto run = [&](uint64_t stream) {
    Random random(seed * 1000 + stream);
    for (int64_t round = 0; round < rounds; ++round) {
      if (what != "callers") cddp_allow_simd(static_cast<int>(what == "long" ? (round / 2 + 2) % 3 : random.below(3)));
      if (what == "long")
        large_cases(random, round);
      else
        small_cases(random);
    }
  };
  if (what == "callers") {
    std::vector<std::thread> callers;
    for (uint64_t stream = 0; stream < 4; ++stream) callers.emplace_back(run, stream);
    for (std::thread &caller : callers) caller.join();
  } else {
    run(0);
  }
  cddp_allow_simd(2);
  printf("selftest: %lld cases as they should be (%s, seed %llu, %s)\n", ll(Case::n_cases), what.c_str(),
         static_cast<unsigned long long>(seed), cddp_isa());
  return 0;
}
