// One call of the emulated kernels without Python around it, for ThreadSanitizer and for planted faults: 5 queries, 155
// keys in parts of 64, a window, dropout. Prints "right" or "wrong", by the definition in double.
#include <cstdio>
#include <cstdlib>

#include "launch.cuh"

namespace txl_cuda {

// The one instance that the call needs, for the compiler's time.
void forward_f32(const Problem& p, void* stream) { launch<Shape<float, 16, 1, MOST_QUERIES, true>>(p, stream); }
void forward_bf16(const Problem&, void*) { std::abort(); }
void forward_f16(const Problem&, void*) { std::abort(); }

}  // namespace txl_cuda

namespace {

constexpr int64_t L = 5, M = 150, D = 24, S = M + L, WINDOW = 120;

struct alignas(16) Floats {
  std::vector<float> x;
  explicit Floats(int64_t n) : x(static_cast<size_t>(n)) {
    static uint32_t state = 1;
    for (float& y : x) y = static_cast<float>(static_cast<int32_t>(state = state * 1664525u + 1013904223u)) * 0x1p-31f;
  }
  txl_cuda::View view() const { return {x.data(), 0, 0, D}; }
};

}  // namespace

int main() {
  const Floats q(L * D), k(L * D), v(L * D), k_mem(M * D), v_mem(M * D), r(S * D), u(D), w(D);
  Floats out(L * D), lse(L);
  const int64_t seed = 7;
  txl_cuda::Problem p = {};
  p.B = p.H = 1, p.L = L, p.M = M, p.D = D, p.T = S, p.causal = 1, p.aligned = 1, p.window = WINDOW, p.scale = 0.5f;
  p.drop_below = 0x40000000u, p.keep_scale = 4.f / 3, p.seed = &seed;
  p.q = q.view(), p.k = k.view(), p.v = v.view(), p.k_mem = k_mem.view(), p.v_mem = v_mem.view(), p.out = out.view();
  p.r = {r.x.data(), 0, D, 0}, p.u = u.view(), p.w = w.view(), p.lse = lse.x.data();
  const txl_cuda::Split split = txl_cuda::split(p, 1);
  Floats partial(split.partial_floats);
  p.parts = split.parts, p.part_keys = split.part_keys, p.partial = partial.x.data();
  txl_cuda::forward(txl_cuda::Type::f32, p, nullptr);

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
        total[d] += weight * txl_cuda::kept(p, 0, i, j) * (j < M ? v_mem.x[j * D + d] : v.x[(j - M) * D + d]);
    }
    error = std::fmax(error, std::fabs(lse.x[i] - std::log(sum)));
    for (int64_t d = 0; d < D; ++d) {
      const double off = std::fabs(out.x[i * D + d] - total[d] / sum);
      error = off <= error ? error : off;  // NaN stays
    }
  }
  std::puts(error < 1e-5 && split.parts == 3 ? "right" : "wrong");
}
