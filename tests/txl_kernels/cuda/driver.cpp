// One call of the kernels without Python around it: 5 queries, 155 keys, a window that leaves 124
// of them in parts of 64, dropout. Prints "right" or "wrong", by the definition in double.
// Emulated, for ThreadSanitizer and planted faults; by nvcc, for compute-sanitizer.
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "decode/decode_launch.cuh"

namespace txl_cuda {

// The one instance that the call needs, for the compiler's time.
void forward_decode_f32(const DecodeProblem& p, void* stream) {
  launch_decode<Shape<float, 16, 1, MAX_DECODE_QUERIES, true>>(p, stream);
}
void forward_decode_bf16(const DecodeProblem&, void*) { std::abort(); }
void forward_decode_f16(const DecodeProblem&, void*) { std::abort(); }
void load_decode_f32(const DecodeProblem&) { std::abort(); }
void load_decode_bf16(const DecodeProblem&) { std::abort(); }
void load_decode_f16(const DecodeProblem&) { std::abort(); }

}  // namespace txl_cuda

namespace {

constexpr int64_t L = 5, M = 150, D = 24, S = M + L, WINDOW = 140;

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
  txl_cuda::View view() const { return {there, 0, 0, D}; }
};

Array<float> random_floats(int64_t n) {
  static uint32_t state = 1;
  std::vector<float> x(static_cast<size_t>(n));
  for (float& y : x) y = static_cast<float>(static_cast<int32_t>(state = state * 1664525u + 1013904223u)) * 0x1p-31f;
  return Array<float>(x);
}

// For compute-sanitizer's initcheck a GPU's own are left as they are.
Array<float> unwritten(int64_t n) { return Array<float>(std::vector<float>(static_cast<size_t>(n), NAN), false); }

}  // namespace

int main() {
  const auto q = random_floats(L * D), k = random_floats(L * D), v = random_floats(L * D), k_mem = random_floats(M * D),
             v_mem = random_floats(M * D), r = random_floats(S * D), u = random_floats(D), w = random_floats(D);
  auto out = unwritten(L * D), lse = unwritten(L);
  Array<int64_t> seed({7});
  txl_cuda::DecodeProblem p = {};
  p.B = p.H = 1, p.L = L, p.M = M, p.D = p.Dv = D, p.T = S, p.left = WINDOW - 1, p.right = 0, p.aligned = 1,
  p.scale = 0.5f;
  p.drop_below = 0x4000u, p.keep_scale = 4.f / 3, p.seed = seed.there;
  p.q = q.view(), p.k = k.view(), p.v = v.view(), p.k_mem = k_mem.view(), p.v_mem = v_mem.view(), p.out = out.view();
  p.r = {r.there, 0, D, 0}, p.u = u.view(), p.w = w.view(), p.lse = lse.there;
  const auto partial = unwritten(txl_cuda::split_decode(p, 2));
  p.partial = partial.there;
  txl_cuda::forward_decode(p, nullptr);
  out.fetch(), lse.fetch();
  p.seed = seed.x.data();

  double error = 0;
  for (int64_t i = 0; i < L; ++i) {
    double sum = 0, total[D] = {};
    for (int64_t j = i + M - WINDOW + 1; j <= i + M; ++j) {
      double score = 0;
      for (int64_t d = 0; d < D; ++d) {
        const double x = q.x[i * D + d], key = j < M ? k_mem.x[j * D + d] : k.x[(j - M) * D + d];
        score += (x + u.x[d]) * key + (x + w.x[d]) * r.x[(M + i - j) * D + d];
      }
      const double weight = std::exp(p.scale * score);
      sum += weight;
      for (int64_t d = 0; d < D; ++d)
        total[d] += weight * txl_cuda::dropout_factor(p, 0, i, j) * (j < M ? v_mem.x[j * D + d] : v.x[(j - M) * D + d]);
    }
    error = std::fmax(error, std::fabs(lse.x[i] - std::log(sum)));
    for (int64_t d = 0; d < D; ++d) {
      const double off = std::fabs(out.x[i * D + d] - total[d] / sum);
      error = off <= error ? error : off;  // NaN stays
    }
  }
  const bool right = error < 1e-5 && p.parts == 3;
  std::puts(right ? "right" : "wrong");
  return right ? 0 : 2;
}
