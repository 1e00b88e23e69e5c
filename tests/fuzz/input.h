// The bytes of a fuzzer's input, as choices. Zero bytes, which also follow the end, choose what is
// usual, so that a short input is a plain call.
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <limits>

namespace fuzz {

class Input {
 public:
  Input(const uint8_t* data, size_t size) : data_(data), end_(data + size) {}

  uint32_t byte() { return data_ < end_ ? *data_++ : 0; }

  uint64_t word() {
    uint64_t word = 0;
    for (int i = 0; i < 8; ++i) word = word << 8 | byte();
    return word;
  }

  // 0 to n - 1, n up to 65536.
  int32_t below(uint32_t n) {
    const uint32_t value = n <= 256 ? byte() : byte() << 8 | byte();
    return static_cast<int32_t>(value % n);
  }

  bool one_in(uint32_t n) { return byte() % n == n - 1; }

  template <typename T>
  T pick(std::initializer_list<T> choices) {
    return choices.begin()[below(static_cast<uint32_t>(choices.size()))];
  }

  // All of these bits, or some, or none: the first choice.
  uint32_t bits(uint32_t known) {
    const uint32_t kind = byte();
    return kind % 2 == 0 ? 0 : kind % 16 == 15 ? known : byte() & byte() & known;
  }

  // What a caller's fault or an attack would put there.
  int64_t wild() {
    using Limits = std::numeric_limits<int64_t>;
    using Limits32 = std::numeric_limits<int32_t>;
    const int64_t choice = pick<int64_t>({0,
                                          -1,
                                          1,
                                          -2,
                                          2,
                                          3,
                                          17,
                                          255,
                                          65536,
                                          Limits32::max(),
                                          Limits32::min(),
                                          Limits32::max() - 65535,
                                          int64_t{1} << 31,
                                          int64_t{1} << 32,
                                          int64_t{1} << 40,
                                          int64_t{1} << 46,
                                          int64_t{1} << 62,
                                          Limits::max(),
                                          Limits::min(),
                                          Limits::max() / 2});
    return one_in(4) ? static_cast<int64_t>(word()) : choice;
  }

  // Whether the caller makes mistakes. Others must be served.
  bool careless = false;
  bool mistake(uint32_t n) { return careless && one_in(n); }

 private:
  const uint8_t *data_, *end_;
};

// Contents of arrays: a stream of numbers from one word of the input.
class Numbers {
 public:
  explicit Numbers(uint64_t seed) : state_(seed * 0x9e3779b97f4a7c15u + 0x632be59bd9b4e019u) {}

  uint64_t next() {
    state_ += 0x9e3779b97f4a7c15u;
    uint64_t x = state_;  // splitmix64 (Steele et al. 2014)
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return x ^ x >> 31;
  }

 private:
  uint64_t state_;
};

}  // namespace fuzz
