// wgmma on a CPU: products of 128 threads together, whose results come when they are waited for.
#pragma once

namespace txl_cuda {

namespace emulated {

constexpr uint32_t NONE = ~0u;

inline int64_t products = 0;  // of warpgroups, since the start: fibers run one at a time

inline uint32_t address_of(uint64_t descriptor) { return static_cast<uint32_t>(descriptor & 0x3FFF) << 4; }

inline bool is_narrow(uint64_t descriptor) { return descriptor >> 62 == 3; }
// Bytes of an operand of so many elements.
inline size_t bytes_of(uint64_t descriptor, int count, int depth) {
  return static_cast<size_t>(is_narrow(descriptor) ? count * depth * 2 : count * depth / SIDE / SIDE * SUBTILE_BYTES);
}

// [count, depth] of an operand in shared memory.
template <class E, Major MAJOR>
void read_tile(uint64_t descriptor, int count, int depth, std::vector<float>& to) {
  const uint32_t tile = address_of(descriptor);
  const int row_bytes = is_narrow(descriptor) ? NARROW_ROW_BYTES : ROW_BYTES;
  if (is_narrow(descriptor) && (MAJOR == Major::K ? depth : count) != NARROW)
    simt::die("a narrow operand of any width");
  to.resize(static_cast<size_t>(count * depth));
  for (int n = 0; n < count; ++n)
    for (int k = 0; k < depth; ++k) {
      const int row = MAJOR == Major::K ? n : k, column = MAJOR == Major::K ? k : n;
      const uint32_t at =
          tile + static_cast<uint32_t>(column / SIDE * SUBTILE_BYTES + row * row_bytes + column % SIDE * 2);
      E x;
      std::memcpy(&x, simt::shared_at(simt::swizzled(at, row_bytes)), 2);
      to[static_cast<size_t>(n * depth + k)] = to_float(x);
    }
}

inline int row_of_thread(int h) { return thread() % WARPGROUP / WARP * 16 + thread() % WARP / 4 + 8 * h; }

// The operands are in the group's a and b: the sums of this thread, kept until the group is waited for.
template <int N>
void finish(float (&d)[N], int depth, bool add, uint32_t left, size_t left_bytes, uint32_t right, size_t right_bytes) {
  simt::Group& group = simt::units().groups[thread() / WARPGROUP];
  simt::Product product{d, {}, {left, right}, {left_bytes, right_bytes}, {}};
  for (int n = 0; n < N; ++n) {
    const float* const a = &group.a[static_cast<size_t>(row_of_thread(n / 2 % 2) * depth)];
    const float* const b = &group.b[static_cast<size_t>((n / 4 * 8 + thread() % 4 * 2 + n % 2) * depth)];
    float sum = 0;
    for (int k = 0; k < depth; ++k) sum += a[k] * b[k];
    product.values.push_back(sum);
  }
  if (thread() % WARPGROUP == 0)  // one thread watches
    for (int f = 0; f < 2; ++f)
      if (product.tiles[f] != NONE) {
        const char* const at = simt::shared_at(product.tiles[f]);
        product.bytes[f].assign(at, at + product.sizes[f]);
      }
  if (!add)
    for (float& x : d) x = NAN;  // not read before it is written
  product.values.push_back(add);
  simt::units().products[thread()].push_back(std::move(product));
  if (thread() % WARPGROUP == 0) ++products;
  group.meeting.wait();
}

}  // namespace emulated

extern "C" __attribute__((visibility("default"), used)) inline int64_t txl_products() { return emulated::products; }

template <Major B, ScaleOut SCALE, class E, int N, int K>
void issue_rs(E, float (&d)[N], const uint32_t (&a)[K], uint64_t b) {
  simt::Group& group = simt::units().groups[thread() / WARPGROUP];
  constexpr int DEPTH = 4 * K;
  group.a.resize(SIDE * DEPTH);
  for (int n = 0; n < K; ++n)
    for (int e = 0; e < 2; ++e) {
      const int column = n / 4 * 16 + n / 2 % 2 * 8 + thread() % 4 * 2 + e;
      group.a[static_cast<size_t>(emulated::row_of_thread(n % 2) * DEPTH + column)] =
          to_float(E{static_cast<uint16_t>(a[n] >> (16 * e))});
    }
  if (thread() % WARPGROUP == 0) emulated::read_tile<E, B>(b, 2 * N, DEPTH, group.b);
  group.meeting.wait();
  emulated::finish(d, DEPTH, SCALE == ScaleOut::One, emulated::NONE, 0, emulated::address_of(b),
                   emulated::bytes_of(b, 2 * N, DEPTH));
}

template <int DEPTH, Major A, Major B, ScaleOut SCALE, Swizzle, Swizzle, class E, int N>
void issue_ss(E, float (&d)[N], uint64_t a, uint64_t b) {
  simt::Group& group = simt::units().groups[thread() / WARPGROUP];
  if (thread() % WARPGROUP == 0)
    emulated::read_tile<E, A>(a, SIDE, DEPTH, group.a), emulated::read_tile<E, B>(b, 2 * N, DEPTH, group.b);
  group.meeting.wait();
  emulated::finish(d, DEPTH, SCALE == ScaleOut::One, emulated::address_of(a), emulated::bytes_of(a, SIDE, DEPTH),
                   emulated::address_of(b), emulated::bytes_of(b, 2 * N, DEPTH));
}
template <int LEFT>
void warpgroup_wait() {
  auto& products = simt::units().products[thread()];
  while (products.size() > LEFT) {
    const simt::Product& product = products.front();
    for (int f = 0; f < 2; ++f)
      if (!product.bytes[f].empty() &&
          std::memcmp(product.bytes[f].data(), simt::shared_at(product.tiles[f]), product.sizes[f]))
        simt::die("shared memory is written that a product still reads");
    const bool add = product.values.back() != 0;
    for (size_t n = 0; n + 1 < product.values.size(); ++n)
      product.to[n] = (add ? product.to[n] : 0) + product.values[n];
    products.erase(products.begin());
  }
}
template <int N>
void fence_operand(float (&)[N]) {}

}  // namespace txl_cuda
