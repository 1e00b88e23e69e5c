// Blocks of memory that end where an array ends, so that the address sanitizer sees a step too
// far, and that know which of their bytes a call may write.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#if defined(__has_include)
#if __has_include(<sanitizer/asan_interface.h>)
#include <sanitizer/asan_interface.h>
#endif
#endif
#ifndef ASAN_POISON_MEMORY_REGION
#define ASAN_POISON_MEMORY_REGION(address, size) (static_cast<void>(address))
#define ASAN_UNPOISON_MEMORY_REGION(address, size) (static_cast<void>(address))
#endif

#include "flashattn.h"

// A fault of the library: the fuzzer saves the input.
#define FUZZ_CHECK(condition, ...)                                                          \
  do {                                                                                      \
    if (!(condition)) {                                                                     \
      std::fprintf(stderr, "%s:%d: %s does not hold: ", __FILE__, __LINE__, #condition);    \
      std::fprintf(stderr, __VA_ARGS__);                                                    \
      std::fprintf(stderr, "\n  last error: %s\n", flashattn_last_error(nullptr, nullptr)); \
      std::abort();                                                                         \
    }                                                                                       \
  } while (0)

namespace fuzz {

struct Free {
  void operator()(void* memory) const { std::free(memory); }
};

struct Block {
  explicit Block(size_t bytes, const char* its_name)
      : name(its_name),
        size(bytes),
        data(static_cast<uint8_t*>(std::malloc(bytes))),
        writable(bytes) {
    if (bytes > 0) std::memset(data.get(), 0, bytes);
  }

  const char* name;
  size_t size;
  std::unique_ptr<uint8_t, Free> data;
  std::vector<uint8_t> writable;
  std::vector<uint8_t> before;
};

class Memory {
 public:
  Block& make(size_t bytes, const char* name) {
    blocks_.emplace_back(new Block(bytes, name));
    return *blocks_.back();
  }

  void forbid_writing() {
    for (const auto& block : blocks_) {
      std::fill(block->writable.begin(), block->writable.end(), uint8_t{0});
    }
  }

  void remember() {
    for (const auto& block : blocks_) {
      block->before.assign(block->data.get(), block->data.get() + block->size);
    }
  }

  // Nothing changed since remember() but what may. No block was made in between.
  void check(const char* function, bool refused) const {
    for (const auto& block : blocks_) {
      const size_t size = block->size;
      const uint8_t *const now = block->data.get(), *const then = block->before.data();
      if (size == 0 || std::memcmp(now, then, size) == 0) continue;
      const uint8_t* const writable = block->writable.data();
      for (size_t i = 0; i < size; ++i) {
        if (now[i] == then[i]) continue;
        FUZZ_CHECK(!refused && writable[i], "%s, which %s, wrote byte %zu of the %zu of %s",
                   function, refused ? "failed" : "succeeded", i, size, block->name);
      }
    }
  }

 private:
  std::vector<std::unique_ptr<Block>> blocks_;
};

// A workspace: megabytes where arrays have kilobytes, so that all calls have the same memory. It
// ends where the sanitizer forbids to go on.
class Workspace {
 public:
  // size bytes, all `fill`, that begin `off` bytes behind an aligned address.
  uint8_t* make(size_t size, size_t off, uint8_t fill) {
    static std::vector<uint8_t> memory;
    ASAN_UNPOISON_MEMORY_REGION(memory.data(), memory.size());
    if (memory.size() < size + off + 64) memory.assign(size + off + 4096, 0);
    first_ = memory.data();
    begin_ = first_ + off;
    size_ = size;
    fill_ = fill;
    std::memset(first_, fill, off + size);
    ASAN_POISON_MEMORY_REGION(begin_ + size, memory.size() - off - size);
    return begin_;
  }

  // No call writes the bytes before it, and a refused call writes none.
  void check(const char* function, bool refused) const {
    const size_t size = static_cast<size_t>(begin_ - first_) + (refused ? size_ : 0);
    const bool same =
        size == 0 || (*first_ == fill_ && std::memcmp(first_, first_ + 1, size - 1) == 0);
    FUZZ_CHECK(same, "%s, which %s, wrote some of %zu bytes at its workspace", function,
               refused ? "failed" : "succeeded", size);
  }

 private:
  uint8_t *first_ = nullptr, *begin_ = nullptr;
  size_t size_ = 0;
  uint8_t fill_ = 0;
};

// A structure in a block of as many bytes as it says it has.
template <typename Struct>
class Sized {
 public:
  // size: of a header older or newer than this one; tail: what lies behind what this one knows.
  Sized(const Struct& value, size_t size, uint8_t tail, Memory* memory, const char* name)
      : block_(memory->make(size, name)) {
    std::memset(block_.data.get(), tail, size);
    std::memcpy(block_.data.get(), &value, std::min(size, sizeof value));
    const uint32_t struct_size = static_cast<uint32_t>(size);
    std::memcpy(block_.data.get(), &struct_size, sizeof struct_size);
  }

  // Of a size that no version has: only that can be read.
  Sized(uint32_t struct_size, Memory* memory, const char* name)
      : block_(memory->make(sizeof struct_size, name)) {
    std::memcpy(block_.data.get(), &struct_size, sizeof struct_size);
  }

  Struct* get() const { return reinterpret_cast<Struct*>(block_.data.get()); }
  Block& block() const { return block_; }

 private:
  Block& block_;
};

}  // namespace fuzz
