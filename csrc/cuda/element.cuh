// Elements of tensors: float, and the 16-bit types as bits, with conversions to and from float, and loads of 16 bytes.
#pragma once
#include "cuda_problem.h"
#include "simt.h"

namespace txl_cuda {

struct Bf16 {
  uint16_t bits;
};
struct F16 {
  uint16_t bits;
};

TXL_DEVICE float to_float(float x) { return x; }
TXL_DEVICE float to_float(Bf16 x) { return bits_to_float(static_cast<uint32_t>(x.bits) << 16); }
TXL_DEVICE float to_float(F16 x) { return half_to_float(x.bits); }

TXL_DEVICE void put(float* to, float x) { *to = x; }
TXL_DEVICE void put(F16* to, float x) { to->bits = float_to_half(x); }
TXL_DEVICE void put(Bf16* to, float x) {
  uint32_t bits = float_to_bits(x);
  if (x == x) bits += 0x7FFFu + ((bits >> 16) & 1);  // rounds to nearest even
  to->bits = static_cast<uint16_t>(bits >> 16 | (x == x ? 0 : 0x40));
}

// The n-th element of a chunk.
template <class T>
TXL_DEVICE float element(const Chunk& c, int n);
template <>
TXL_DEVICE float element<float>(const Chunk& c, int n) {
  return bits_to_float(c.word[n]);
}
template <>
TXL_DEVICE float element<Bf16>(const Chunk& c, int n) {
  return bits_to_float(n % 2 ? c.word[n / 2] & 0xFFFF0000u : c.word[n / 2] << 16);
}
template <>
TXL_DEVICE float element<F16>(const Chunk& c, int n) {
  return half_to_float(static_cast<uint16_t>(c.word[n / 2] >> (n % 2 * 16)));
}

// The address of a row of a tensor, which need not exist.
template <class T>
TXL_DEVICE const T* row_of(const View& x, int64_t n0, int64_t n1, int64_t n2) {
  return static_cast<const T*>(x.data) + n0 * x.s0 + n1 * x.s1 + n2 * x.s2;
}

// Four floats of global or shared memory, at a multiple of 16 bytes.
struct alignas(16) Float4 {
  float x[4];
};
TXL_DEVICE Float4 load_float4(const float* from) { return *reinterpret_cast<const Float4*>(from); }

// Loads 16 bytes of a row; unless ALIGNED, from the address of any element.
template <bool ALIGNED, class T>
TXL_DEVICE Chunk load_chunk(const T* from) {
  if constexpr (ALIGNED) {
    return load_16_bytes(from);
  } else if constexpr (sizeof(T) == 4) {
    const uint32_t* const words = reinterpret_cast<const uint32_t*>(from);
    return {{words[0], words[1], words[2], words[3]}};
  } else {
    const uint16_t* const halves = reinterpret_cast<const uint16_t*>(from);
    Chunk c;
    TXL_UNROLL
    for (int n = 0; n < 4; ++n) c.word[n] = halves[2 * n] | static_cast<uint32_t>(halves[2 * n + 1]) << 16;
    return c;
  }
}

}  // namespace txl_cuda
