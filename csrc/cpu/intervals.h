// Conversion of a bool mask to one interval of keys for each query.
#pragma once
#include <cstdint>

namespace txl {

// A bool mask [B, L, S] of one byte for each element. s0, s1: strides of its first two axes, in bytes.
struct Mask {
  const uint8_t* data;
  int64_t B, L, S, s0, s1;
  bool visible;  // the value of the pairs where the query sees the key
};

// Writes each query's first visible key to start and the key after its last one to end, both contiguous [B, L]; 0 and 0
// if it sees none. Returns the first row b * L + i that has a hidden key between the two; -1 if none has.
int64_t intervals(const Mask& mask, int32_t* start, int32_t* end, int threads);

}  // namespace txl
