// See ../probes.h. Included after kernels.inl, whose unit it uses.
namespace txl {
namespace TXL_ISA {

double pairs(int64_t iterations, int threads) {
  parallel_for(threads, threads, [&](int64_t, int) {
    [[maybe_unused]] const Unit unit;
    busy(iterations);
  });
  return operations_of(iterations) * threads;
}

}  // namespace TXL_ISA
}  // namespace txl
