#include "buffer.h"

#include <cstdlib>
#include <cstring>
#include <limits>
#include <new>

namespace txl {
namespace {

constexpr size_t kAlign = 64;

#ifndef TXL_POISON
// Small blocks wait for the thread's next call: the C library would give their pages back and fault
// them in again, which costs more than a small kernel.
constexpr size_t kSpares = 4, kLargest = size_t{1} << 23;

struct Spares {
  void* block[kSpares] = {};
  size_t bytes[kSpares] = {};

  ~Spares() {
    for (void* p : block) std::free(p);
  }
};

thread_local Spares g_spares;

void* take(size_t& bytes) {
  for (size_t i = 0; i < kSpares; ++i)
    if (g_spares.block[i] && g_spares.bytes[i] >= bytes && g_spares.bytes[i] <= 4 * bytes + kLargest / 16) {
      void* p = g_spares.block[i];
      bytes = g_spares.bytes[i];
      g_spares.block[i] = nullptr;
      return p;
    }
  return nullptr;
}

// Puts a block in a free place, or in that of a smaller one.
void give_back(void* p, size_t bytes) {
  size_t place = 0;
  for (size_t i = 0; i < kSpares && g_spares.block[place]; ++i)
    if (!g_spares.block[i] || g_spares.bytes[i] < g_spares.bytes[place]) place = i;
  if (bytes > kLargest || (g_spares.block[place] && g_spares.bytes[place] >= bytes)) return std::free(p);
  std::free(g_spares.block[place]);
  g_spares.block[place] = p;
  g_spares.bytes[place] = bytes;
}
#else  // every block new, so that a sanitizer sees its ends
void* take(size_t&) { return nullptr; }
void give_back(void* p, size_t) { std::free(p); }
#endif

size_t bytes_of(int64_t floats) {
  if (floats < 0 || static_cast<uint64_t>(floats) > std::numeric_limits<size_t>::max() / 8) throw std::bad_alloc();
  return (static_cast<size_t>(floats) * sizeof(float) + kAlign) / kAlign * kAlign;
}

float* allocate(size_t& bytes) {
  void* p = take(bytes);
  if (!p) p = std::aligned_alloc(kAlign, bytes);
  if (!p) throw std::bad_alloc();
#ifdef TXL_POISON
  std::memset(p, 0xFF, bytes);  // NaN: what is read before it is written shows
#endif
  return static_cast<float*>(p);
}

}  // namespace

Buffer::Buffer(int64_t floats) : bytes_(bytes_of(floats)), data(allocate(bytes_)) {}
Buffer::~Buffer() { give_back(data, bytes_); }

}  // namespace txl
