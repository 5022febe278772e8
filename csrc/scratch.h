// Memory that a calling thread keeps from call to call, so that pages are not fetched anew each time.

#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

namespace cddp {

class Scratch {
public:
  static Scratch &mine() {
    thread_local Scratch scratch;
    return scratch;
  }

  // Makes room, and forgets all that was taken before.
  void reserve(size_t bytes) {
    used_ = 0;
    if (bytes > size_) {
      memory_.reset();
      size_ = 0;
      memory_.reset(new std::byte[bytes]); // not set to anything: untouched pages cost nothing
      size_ = bytes;
    }
  }

  // `count` elements; they take up whole cache lines.
  template <typename T> T *take(int64_t count) {
    std::byte *at = memory_.get() + used_;
    used_ += (static_cast<size_t>(count) * sizeof(T) + 63) & ~size_t{63};
    return reinterpret_cast<T *>(at);
  }

private:
  std::unique_ptr<std::byte[]> memory_;
  size_t size_ = 0, used_ = 0;
};

} // namespace cddp
