// From a mask to one interval of keys a query.
#pragma once
#include <cstdint>

namespace txl {

// A bool mask [B, L, S], a byte each; s0, s1: strides of its first two axes, in bytes.
struct Mask {
  const uint8_t* data;
  int64_t B, L, S, s0, s1;
  bool visible;  // what says that a query sees a key
};

// start, end: contiguous [B, L], from the first key that a query sees to one past the last; 0, 0 if
// it sees none. Returns the first row b * L + i that has a hidden key between; -1 if none has.
int64_t intervals(const Mask& mask, int32_t* start, int32_t* end, int threads);

}  // namespace txl
