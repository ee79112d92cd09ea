// Aligned float storage. Never inline: an inline function compiled for one instruction set could be
// linked into another.
#pragma once
#include <cstddef>
#include <cstdint>

namespace txl {

class Buffer {
 public:
  // Uninitialised. Throws std::bad_alloc.
  explicit Buffer(int64_t floats);
  ~Buffer();
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

 private:
  size_t bytes_;  // before data, which is allocated with it

 public:
  float* const data;
};

}  // namespace txl
