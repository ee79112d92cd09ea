#include "library.h"

#include <algorithm>
#include <cstdio>
#include <string>

#include "../errors.h"
#include "runtime.h"

namespace txl {
namespace {

// Calls run(p) with a row of zeros, for all heads, in place of each bias that is not given; they are zeros in bf16,
// too.
template <class F>
void with_biases(const Problem& given, const F& run) {
  if (given.u.data && given.w.data) return run(given);
  Problem p = given;
  const Buffer zeros(std::max(p.D, p.Dr));
  std::fill_n(zeros.data, std::max(p.D, p.Dr), 0.f);
  for (View* bias : {&p.u, &p.w})
    if (!bias->data) *bias = {zeros.data};
  run(p);
}

int forward(const Problem& given) {
  return guard([&] { with_biases(given, [](const Problem& p) { kernels().entry_points(p).forward(p); }); });
}

int backward(const Problem& given, const Gradients& g) {
  return guard([&] { with_biases(given, [&](const Problem& p) { kernels().entry_points(p).backward(p, g); }); });
}

int find_intervals(const Mask& mask, int32_t* start, int32_t* end, int threads, int64_t* hole) {
  return guard([&] { *hole = intervals(mask, start, end, threads); });
}

int find_kernels(const Kernels** in_use) {
  return guard([&] { *in_use = &kernels(); });
}

const Kernels* list_kernels(size_t* count) {
  *count = all_kernels().size();
  return all_kernels().data();
}

int say_why_not_amx(const char** reason) {
  static thread_local char text[256];
  return guard([&] {
    std::snprintf(text, sizeof text, "%s", why_not_amx().c_str());
    *reason = text;
  });
}

}  // namespace
}  // namespace txl

const txl::CpuLibrary* txl_cpu_library() {
  static const txl::CpuLibrary library = {
      TXL_SOURCE_HASH,      txl_last_error,
      txl::forward,         txl::backward,
      txl::find_intervals,  txl::find_kernels,
      txl::list_kernels,    txl_set_instruction_set,
      txl::say_why_not_amx, txl::emulated_multiplications,
      txl::set_openmp,      txl::threading,
  };
  return &library;
}
