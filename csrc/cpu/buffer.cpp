#include "buffer.h"

#include <cstdlib>
#include <cstring>
#include <limits>
#include <new>

namespace txl {
namespace {

constexpr size_t kAlign = 64;

float* allocate(int64_t floats) {
  if (floats < 0 || static_cast<uint64_t>(floats) > std::numeric_limits<size_t>::max() / 8) throw std::bad_alloc();
  const size_t bytes = (static_cast<size_t>(floats) * sizeof(float) + kAlign) / kAlign * kAlign;
  void* p = std::aligned_alloc(kAlign, bytes);
  if (!p) throw std::bad_alloc();
#ifdef TXL_POISON
  std::memset(p, 0xFF, bytes);  // NaN: what is read before it is written shows
#endif
  return static_cast<float*>(p);
}

}  // namespace

Buffer::Buffer(int64_t floats) : data(allocate(floats)) {}
Buffer::~Buffer() { std::free(data); }

}  // namespace txl
