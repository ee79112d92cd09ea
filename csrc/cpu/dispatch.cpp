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

#define TXL_KERNELS_OF(name, supported) {#name, supported, isa_##name::forward, isa_##name::backward}

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
      TXL_KERNELS_OF(avx512, has_avx512),
      TXL_KERNELS_OF(avx2, has_avx2),
#elif defined(__aarch64__)
      TXL_KERNELS_OF(neon, always),
#endif
      TXL_KERNELS_OF(baseline, always),
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
