// How fast the L2 takes float32 additions: red by one and by four, and the copy engine's bulk
// reduction. Prints one JSON object a line: GB of operands a second.
#include <cstdint>
#include <cstdio>
#include <cstdlib>

namespace {

constexpr int THREADS = 256, TILE = 4096;  // floats of a tile, 16 KB
constexpr int TILES = 2048, ROUNDS = 16;   // 32 MB of sums, which an L2 holds; visits of each
constexpr int BLOCKS = 132 * 4;

void must(cudaError_t error) {
  if (error != cudaSuccess) {
    std::fprintf(stderr, "%s\n", cudaGetErrorString(error));
    std::exit(1);
  }
}

__global__ void by_one(float* sums) {
  for (int n = blockIdx.x; n < TILES * ROUNDS; n += gridDim.x)
    for (int i = threadIdx.x; i < TILE; i += THREADS)
      asm volatile("red.global.add.f32 [%0], %1;" ::"l"(sums + int64_t(n % TILES) * TILE + i), "f"(1.0f) : "memory");
}

__global__ void by_four(float* sums) {
  for (int n = blockIdx.x; n < TILES * ROUNDS; n += gridDim.x)
    for (int i = 4 * threadIdx.x; i < TILE; i += 4 * THREADS)
      asm volatile("red.global.add.v4.f32 [%0], {%1, %1, %1, %1};" ::"l"(sums + int64_t(n % TILES) * TILE + i),
                   "f"(1.0f)
                   : "memory");
}

__global__ void in_bulk(float* sums) {
  __shared__ alignas(128) float tile[TILE];
  for (int i = threadIdx.x; i < TILE; i += THREADS) tile[i] = 1.0f;
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  __syncthreads();
  if (threadIdx.x != 0) return;
  uint32_t from = static_cast<uint32_t>(__cvta_generic_to_shared(tile));
  for (int n = blockIdx.x; n < TILES * ROUNDS; n += gridDim.x) {
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(
                     sums + int64_t(n % TILES) * TILE),
                 "r"(from), "r"(TILE * 4)
                 : "memory");
    asm volatile("cp.async.bulk.commit_group;\ncp.async.bulk.wait_group.read 4;" ::: "memory");
  }
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

void time(const char* name, void (*kernel)(float*), float* sums) {
  cudaEvent_t begin, end;
  must(cudaEventCreate(&begin));
  must(cudaEventCreate(&end));
  must(cudaMemset(sums, 0, int64_t(TILES) * TILE * 4));
  float best = 1e30f;
  for (int again = 0; again < 6; ++again) {
    must(cudaEventRecord(begin));
    kernel<<<BLOCKS, THREADS>>>(sums);
    must(cudaEventRecord(end));
    must(cudaEventSynchronize(end));
    must(cudaGetLastError());
    float ms;
    must(cudaEventElapsedTime(&ms, begin, end));
    if (again > 0 && ms < best) best = ms;
  }
  float last;
  must(cudaMemcpy(&last, sums + int64_t(TILES) * TILE - 1, 4, cudaMemcpyDeviceToHost));
  double bytes = double(TILES) * TILE * 4 * ROUNDS;
  std::printf("{\"item\": \"%s\", \"gb_per_s\": %.1f, \"sum\": %.0f, \"expected\": %d}\n", name, bytes / best / 1e6,
              last, 6 * ROUNDS);
}

}  // namespace

int main() {
  float* sums;
  must(cudaMalloc(&sums, int64_t(TILES) * TILE * 4));
  time("red.f32", by_one, sums);
  time("red.v4.f32", by_four, sums);
  time("cp.reduce.async.bulk", in_bulk, sums);
  return 0;
}
