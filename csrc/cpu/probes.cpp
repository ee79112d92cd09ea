#include "probes.h"

#include <stdexcept>
#include <string>

#include "dispatch.h"

namespace txl {

#define TXL_DECLARE_PROBES(name)             \
  namespace isa_##name {                     \
    double fma(int64_t, int);                \
    void read(const float*, int64_t, int);   \
    void exp(const float*, float*, int64_t); \
  }
// `pairs`: the function of the unit for bfloat16.
#define TXL_PROBES_OF(name, kernels, pairs)                              \
  if (isa == #name) return {                                             \
      isa_##kernels::fma, pairs, isa_##kernels::read, isa_##kernels::exp \
    }
#define TXL_DECLARE_PAIRS(name) \
  namespace isa_##name {        \
    double pairs(int64_t, int); \
  }

TXL_DECLARE_PROBES(baseline)
TXL_DECLARE_PAIRS(emulated_bf16)
TXL_DECLARE_PAIRS(emulated_amx)
#if defined(__x86_64__)
TXL_DECLARE_PROBES(avx2)
TXL_DECLARE_PROBES(avx512)
TXL_DECLARE_PAIRS(avx512_bf16)
TXL_DECLARE_PAIRS(amx)
#elif defined(__aarch64__)
TXL_DECLARE_PROBES(neon)
#endif

Probes probes() {
  const std::string isa = kernels().isa;
  TXL_PROBES_OF(baseline, baseline, isa_baseline::fma);
  TXL_PROBES_OF(emulated_bf16, baseline, isa_emulated_bf16::pairs);
  TXL_PROBES_OF(emulated_amx, baseline, isa_emulated_amx::pairs);
#if defined(__x86_64__)
  TXL_PROBES_OF(avx2, avx2, isa_avx2::fma);
  TXL_PROBES_OF(avx512, avx512, isa_avx512::fma);
  TXL_PROBES_OF(avx512_bf16, avx512, isa_avx512_bf16::pairs);
  TXL_PROBES_OF(amx, avx512, isa_amx::pairs);
#elif defined(__aarch64__)
  TXL_PROBES_OF(neon, neon, isa_neon::fma);
#endif
  throw std::logic_error("no probes for " + isa);
}

}  // namespace txl
