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
#define TXL_PROBES_OF(name)                              \
  if (isa == #name) return {                             \
      isa_##name::fma, isa_##name::read, isa_##name::exp \
    }

TXL_DECLARE_PROBES(baseline)
#if defined(__x86_64__)
TXL_DECLARE_PROBES(avx2)
TXL_DECLARE_PROBES(avx512)
#elif defined(__aarch64__)
TXL_DECLARE_PROBES(neon)
#endif

Probes probes() {
  const std::string isa = kernels().isa;
  TXL_PROBES_OF(baseline);
#if defined(__x86_64__)
  TXL_PROBES_OF(avx2);
  TXL_PROBES_OF(avx512);
#elif defined(__aarch64__)
  TXL_PROBES_OF(neon);
#endif
  throw std::logic_error("no probes for " + isa);
}

}  // namespace txl
