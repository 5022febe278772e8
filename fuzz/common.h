// What the native fuzz targets share: reading choices from the input, and failing with a reason.

#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

namespace fuzz {

// The input, byte by byte; zeros when it is used up, so that every input means something.
class Input {
public:
  Input(const uint8_t *data, size_t size) : data_(data), size_(size) {}
  uint8_t byte() { return at_ < size_ ? data_[at_++] : 0; }
  int64_t word() {
    const int64_t low = byte();
    return low | static_cast<int64_t>(byte()) << 8;
  }
  size_t left() const { return size_ - at_; }
  const uint8_t *rest() const { return data_ + at_; }

private:
  const uint8_t *data_;
  size_t size_, at_ = 0;
};

// An array that ends where its allocation ends, so that AddressSanitizer sees a byte too many.
template <typename T> class Exact {
public:
  explicit Exact(int64_t size, T value = T{}) : data_(new T[static_cast<size_t>(size)]), size_(size) {
    for (int64_t i = 0; i < size; ++i) data_[static_cast<size_t>(i)] = value;
  }
  T *data() { return data_.get(); }
  const T *data() const { return data_.get(); }
  int64_t size() const { return size_; }
  T &operator[](int64_t i) { return data_[static_cast<size_t>(i)]; }
  const T &operator[](int64_t i) const { return data_[static_cast<size_t>(i)]; }

private:
  std::unique_ptr<T[]> data_;
  int64_t size_;
};

inline void must(bool holds, const char *what) {
  if (holds) return;
  fprintf(stderr, "fuzz: %s\n", what);
  abort();
}

inline uint32_t bits_of(float x) { return std::bit_cast<uint32_t>(x); }
inline float float_of(uint32_t bits) { return std::bit_cast<float>(bits); }
inline bool finite(float x) { return (bits_of(x) & 0x7f800000u) != 0x7f800000u; }

// Equal to the bit; one NaN is as good as another.
inline bool same(float a, float b) { return bits_of(a) == bits_of(b) || (std::isnan(a) && std::isnan(b)); }

} // namespace fuzz
