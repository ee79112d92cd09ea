#include "dispatch.h"

#include <atomic>
#include <cstdlib>
#include <stdexcept>

namespace txl {

#define TXL_DECLARE_ISA(name)                        \
  namespace isa_##name {                             \
    void forward(const Problem&);                    \
    void backward(const Problem&, const Gradients&); \
  }

TXL_DECLARE_ISA(baseline)
#if defined(__x86_64__)
TXL_DECLARE_ISA(avx2)
TXL_DECLARE_ISA(avx512)
#elif defined(__aarch64__)
TXL_DECLARE_ISA(neon)
#endif

namespace {

bool always() { return true; }

#if defined(__x86_64__)
bool has_avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }
bool has_avx512() { return has_avx2() && __builtin_cpu_supports("avx512f"); }
#endif

const Kernels* find(const std::string& name) {
  std::string known;
  for (const Kernels& k : all_kernels()) {
    if (name.empty() ? k.supported() : name == k.isa) {
      if (!k.supported()) throw std::runtime_error("TXL_KERNELS_ISA=" + name + ": this processor does not have it");
      return &k;
    }
    known += (known.empty() ? "" : ", ") + std::string(k.isa);
  }
  throw std::runtime_error("TXL_KERNELS_ISA=" + name + " is not known; this build has " + known);
}

std::atomic<const Kernels*> g_chosen{nullptr};

}  // namespace

const std::vector<Kernels>& all_kernels() {
  static const std::vector<Kernels> all = {
#if defined(__x86_64__)
      {"avx512", has_avx512, isa_avx512::forward, isa_avx512::backward},
      {"avx2", has_avx2, isa_avx2::forward, isa_avx2::backward},
#elif defined(__aarch64__)
      {"neon", always, isa_neon::forward, isa_neon::backward},
#endif
      {"baseline", always, isa_baseline::forward, isa_baseline::backward},
  };
  return all;
}

const Kernels& kernels() {
  const Kernels* chosen = g_chosen.load(std::memory_order_acquire);
  if (!chosen) {
    const char* name = std::getenv("TXL_KERNELS_ISA");
    chosen = find(name ? name : "");
    g_chosen.store(chosen, std::memory_order_release);
  }
  return *chosen;
}

void force_isa(const std::string& name) { g_chosen.store(find(name), std::memory_order_release); }

}  // namespace txl
