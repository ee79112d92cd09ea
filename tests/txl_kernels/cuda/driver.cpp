// Calls of the kernels without Python around them, with dropout: 5 queries, 155 keys, a window that
// leaves 124 of them in parts of 64; the same keys with Inkling's terms, in parts; and in one part a
// table for each head. Prints "right" or "wrong", by the definition in double.
// Emulated, for ThreadSanitizer and planted faults; by nvcc, for compute-sanitizer.
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "decode/decode_launch.cuh"

namespace txl_cuda {

// The instances that the calls need, for the compiler's time.
void forward_decode_f32(const DecodeProblem& p, void* stream) {
  if (p.with_terms) return launch_decode<Shape<float, 16, 1, MAX_DECODE_QUERIES, true, true>>(p, stream);
  launch_decode<Shape<float, 16, 1, MAX_DECODE_QUERIES, true>>(p, stream);
}
void forward_decode_bf16(const DecodeProblem&, void*) { std::abort(); }
void forward_decode_f16(const DecodeProblem&, void*) { std::abort(); }
void load_decode_f32(const DecodeProblem&) { std::abort(); }
void load_decode_bf16(const DecodeProblem&) { std::abort(); }
void load_decode_f16(const DecodeProblem&) { std::abort(); }

}  // namespace txl_cuda

namespace {

constexpr int64_t D = 24;

#ifdef __CUDACC__
void must(cudaError_t error) {
  if (error != cudaSuccess) {
    std::puts(cudaGetErrorString(error));
    std::exit(1);
  }
}
#endif

// An array here and, for a GPU, there.
template <class T>
struct Array {
  std::vector<T> x;
  T* there;
  explicit Array(std::vector<T> values, bool send = true) : x(std::move(values)), there(x.data()) {
#ifdef __CUDACC__
    must(cudaMalloc(&there, x.size() * sizeof(T)));
    if (send) must(cudaMemcpy(there, x.data(), x.size() * sizeof(T), cudaMemcpyHostToDevice));
#endif
    (void)send;
  }
  void fetch() {
#ifdef __CUDACC__
    must(cudaMemcpy(x.data(), there, x.size() * sizeof(T), cudaMemcpyDeviceToHost));
#endif
  }
};

Array<float> random_floats(int64_t n) {
  static uint32_t state = 1;
  std::vector<float> x(static_cast<size_t>(n));
  for (float& y : x) y = static_cast<float>(static_cast<int32_t>(state = state * 1664525u + 1013904223u)) * 0x1p-31f;
  return Array<float>(x);
}

// For compute-sanitizer's initcheck a GPU's own are left as they are.
Array<float> unwritten(int64_t n) { return Array<float>(std::vector<float>(static_cast<size_t>(n), NAN), false); }

struct Sizes {
  int64_t H, Hkv, L, M, Dr, T, tables, zero_row, left, right;
  bool with_terms;
  int64_t parts;
};

// Whether a call's results are those of the definition.
bool is_right(const Sizes& n) {
  const int64_t L = n.L, M = n.M, S = M + L, Dr = n.Dr, group = n.H / n.Hkv;
  // The rows before and after the tables are not of any distance.
  const int64_t table = n.T * Dr, margin = Dr;
  const auto q = random_floats(n.H * L * D), q_pos = random_floats(n.H * L * Dr), k = random_floats(n.Hkv * L * D),
             v = random_floats(n.Hkv * L * D), k_mem = random_floats(n.Hkv * M * D),
             v_mem = random_floats(n.Hkv * M * D), r = random_floats(n.tables * table + 2 * margin),
             u = random_floats(n.H * D), w = random_floats(n.H * Dr), sink = random_floats(n.H * L);
  auto out = unwritten(n.H * L * D), lse = unwritten(n.H * L);
  Array<int64_t> seed({7});
  txl_cuda::DecodeProblem p = {};
  p.B = 1, p.H = n.H, p.Hkv = n.Hkv, p.L = L, p.M = M, p.D = p.Dv = D, p.Dr = Dr, p.T = n.T, p.zero_row = n.zero_row;
  p.left = n.left, p.right = n.right, p.aligned = true, p.scale = 0.5f, p.position_scale = 0.5f;
  p.drop_below = 0x4000u, p.keep_scale = 4.f / 3, p.seed = seed.there;
  const auto rows = [&](const auto& x, int64_t count, int64_t width) {
    return txl_cuda::View{x.there, 0, count * width, width};
  };
  p.q = rows(q, L, D), p.k = rows(k, L, D), p.v = rows(v, L, D), p.k_mem = rows(k_mem, M, D);
  p.v_mem = rows(v_mem, M, D), p.out = rows(out, L, D);
  p.r = {r.there + margin, n.tables == 1 ? 0 : table, Dr, 0}, p.u = {u.there, D, 0, 0}, p.w = {w.there, Dr, 0, 0};
  p.lse = lse.there;
  if (n.with_terms) {
    p.with_terms = p.zero_outside = true, p.position_scale = 0.75f;
    p.q_pos = rows(q_pos, L, Dr), p.sink = {sink.there, 0, L, 1};
  }
  const auto partial = unwritten(txl_cuda::split_decode(p, 2));
  p.partial = partial.there;
  txl_cuda::forward_decode(p, nullptr);
  out.fetch(), lse.fetch();
  p.seed = seed.x.data();

  double error = 0;
  for (int64_t h = 0; h < n.H; ++h)
    for (int64_t i = 0; i < L; ++i) {
      const int64_t x = h * L + i, at = M + i, first = at > n.left ? at - n.left : 0;
      double sum = 0, total[D] = {};
      for (int64_t j = first; j <= at + n.right && j < S; ++j) {
        const int64_t keys = h / group, row = n.zero_row + at - j;
        const auto key = [&](const auto& memory, const auto& segment, int64_t d) {
          return j < M ? memory.x[(keys * M + j) * D + d] : segment.x[(keys * L + j - M) * D + d];
        };
        double content = 0, position = 0;
        for (int64_t d = 0; d < D; ++d) content += (q.x[x * D + d] + u.x[h * D + d]) * key(k_mem, k, d);
        for (int64_t d = 0; d < Dr && 0 <= row && row < n.T; ++d)
          position += ((n.with_terms ? q_pos : q).x[x * Dr + d] + w.x[h * Dr + d]) *
                      r.x[margin + (n.tables == 1 ? 0 : h * table) + row * Dr + d];
        const double weight = std::exp(p.scale * content + p.position_scale * position);
        sum += weight;
        for (int64_t d = 0; d < D; ++d) total[d] += weight * txl_cuda::dropout_factor(p, h, i, j) * key(v_mem, v, d);
      }
      error = std::fmax(error, std::fabs(lse.x[x] - std::log(sum)));
      if (n.with_terms) sum += std::exp(sink.x[x]);
      for (int64_t d = 0; d < D; ++d) {
        const double off = std::fabs(out.x[x * D + d] - total[d] / sum);
        error = off <= error ? error : off;  // NaN stays
      }
    }
  return error < 1e-5 && p.parts == n.parts;
}

}  // namespace

int main() {
  const bool right = is_right({1, 1, 5, 150, D, 155, 1, 0, 139, 0, false, 3}) &&
                     is_right({6, 2, 4, 150, 16, 100, 1, 1, 139, 2, true, 2}) &&
                     is_right({3, 1, 3, 40, 8, 20, 3, 1, 139, 2, true, 1});
  std::puts(right ? "right" : "wrong");
  return right ? 0 : 2;
}
