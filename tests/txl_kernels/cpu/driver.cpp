// Runs the kernels of csrc/cpu once, without Python: for processors that are emulated and
// sanitizers that want to see every thread. Reads one call from standard input and writes its
// results to standard output; test_driver.py speaks the other side. Memory is of the native byte
// order; all tensors are contiguous.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "cpu/dispatch.h"

namespace {

template <class T>
std::vector<T> take(size_t count) {
  std::vector<T> x(count);
  if (count && std::fread(x.data(), sizeof(T), count, stdin) != count) {
    std::fprintf(stderr, "input ends early\n");
    std::exit(2);
  }
  return x;
}

template <class T>
void give(const std::vector<T>& x) {
  std::fwrite(x.data(), sizeof(T), x.size(), stdout);
}

}  // namespace

int main() {
  const std::vector<int64_t> n = take<int64_t>(15);
  const std::vector<float> f = take<float>(2);
  txl::Problem p;
  p.B = n[0], p.H = n[1], p.L = n[2], p.M = n[3], p.D = p.Dv = n[4], p.Dr = p.D, p.Hkv = p.H;
  p.T = n[5], p.zero_row = n[6], p.left = n[8], p.right = n[7];
  p.type = n[9] ? txl::Type::bf16 : txl::Type::f32, p.threads = static_cast<int>(n[10]);
  p.drop_below = static_cast<uint32_t>(n[11]), p.seed = static_cast<uint64_t>(n[12]);
  p.scale = p.position_scale = f[0], p.keep_scale = f[1];
  const size_t element = n[9] ? 2 : 4;
  const int64_t heads = p.B * p.H, D = p.D;

  std::vector<std::vector<char>> memory;
  memory.reserve(32);
  auto tensor = [&](int64_t rows, int64_t s0, int64_t s1, int64_t s2, bool given) {
    const size_t bytes = static_cast<size_t>(rows * D) * element;
    memory.push_back(given ? take<char>(bytes) : std::vector<char>(bytes, static_cast<char>(0xFF)));
    return txl::View{memory.back().data(), s0, s1, s2};
  };
  auto rows = [&](int64_t count, bool given) { return tensor(heads * count, p.H * count * D, count * D, D, given); };
  p.q = rows(p.L, true), p.k = rows(p.L, true), p.v = rows(p.L, true);
  p.k_mem = rows(p.M, true), p.v_mem = rows(p.M, true);
  p.r = tensor(p.H * p.T, p.T * D, D, 0, true);
  p.u = tensor(p.H, D, 0, 0, true), p.w = tensor(p.H, D, 0, 0, true);
  txl::Gradients g;
  g.dout = rows(p.L, true);
  const std::vector<float> dlse = take<float>(static_cast<size_t>(heads * p.L));
  g.dlse = dlse.data();
  const std::vector<int32_t> start = take<int32_t>(n[13] ? static_cast<size_t>(p.B * p.L) : 0);
  const std::vector<int32_t> end = take<int32_t>(n[14] ? static_cast<size_t>(p.B * p.L) : 0);
  if (n[13]) p.start = {start.data(), p.L, 1};
  if (n[14]) p.end = {end.data(), p.L, 1};

  const size_t first_output = memory.size();
  std::vector<float> lse(static_cast<size_t>(heads * p.L));
  p.lse = lse.data();
  p.out = rows(p.L, false);
  g.dq = rows(p.L, false), g.dk = rows(p.L, false), g.dv = rows(p.L, false);
  g.dr = tensor(p.H * p.T, p.T * D, D, 0, false);
  g.du = tensor(p.H, D, 0, 0, false), g.dw = tensor(p.H, D, 0, 0, false);
  g.dk_mem = rows(p.M, false), g.dv_mem = rows(p.M, false);

  const txl::Kernels& kernels = txl::kernels();
  kernels.entry_points(p).forward(p);
  kernels.entry_points(p).backward(p, g);
  std::fprintf(stderr, "%s\n", kernels.isa);
  give(lse);
  for (size_t x = first_output; x < memory.size(); ++x) give(memory[x]);
  return 0;
}
