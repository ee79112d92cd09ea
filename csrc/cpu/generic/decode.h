// Decode, forward of up to DECODE_L queries. Keys, values and r are read once where they lie, nothing is packed. The
// keys are split into parts, which are merged by their log-sum-exp in order, so results have the same bits at any
// number of threads.
#pragma once
#include "decode_group.h"

namespace txl::TXL_ISA {
namespace {

template <class T>
static void run_decode(const Problem& p) {
  const int64_t BH = p.B * p.H, Dv = p.Dv, queries = BH * p.L, parts = div_up(p.M + p.L, DECODE_PART);
  const int64_t result_floats = Dv + 2, group = group_size(p), groups = p.B * p.Hkv;
  Buffer partial(queries * parts * result_floats), qu(queries * p.D), qw(queries * p.Dr), sums(Dv);
  auto qu_of = [&](int64_t bh, int64_t i) { return reinterpret_cast<Packed*>(qu.data) + (bh * p.L + i) * p.D; };
  auto qw_of = [&](int64_t bh, int64_t i) { return reinterpret_cast<Packed*>(qw.data) + (bh * p.L + i) * p.Dr; };
  for (int64_t bh = 0; bh < BH; ++bh) {
    auto sees = [&](int64_t i) { return visible(p, bh / p.H, i).any(); };
    pack_queries<T>(p, bh / p.H, bh % p.H, 0, p.L, sees, p.D, p.Dr, qu_of(bh, 0), qw_of(bh, 0));
  }
  Buffer qu_float(group > 1 ? queries * p.D : 0), scores(group > 1 ? p.threads * group * p.L * SCORES_LD : 0);
  for (int64_t x = 0; group > 1 && x < queries * p.D; ++x) qu_float.data[x] = to_float(qu_of(0, 0)[x]);
  auto part_of = [&](Range seen, int64_t part) -> Range {
    return {max_of(seen.low, part * DECODE_PART), min_of(seen.high, (part + 1) * DECODE_PART)};
  };
  // An item has a batch row, a key-value head and a part of the keys. The keys stay in the cache for all queries that
  // read them, the rows of r for the next batch row.
  parallel_for(p.threads, groups * parts, [&](int64_t item, int thread) {
    const int64_t b = item % p.B, hk = item / p.B / parts, part = item / p.B % parts;
    const int64_t bh = b * p.H + hk * group;  // the group's first head
    auto out_of = [&](int64_t i) { return partial.data + ((bh * p.L + i) * parts + part) * result_floats; };
    if (group > 1) {
      auto qw_of_head = [&](int64_t g, int64_t i) { return qw_of(bh + g, i); };
      decode_group_part<T>(p, b, hk, {part * DECODE_PART, min_of((part + 1) * DECODE_PART, p.M + p.L)},
                           qu_float.data + bh * p.L * p.D, qu_of(bh, 0), qw_of_head,
                           scores.data + thread * group * p.L * SCORES_LD, out_of(0), parts * result_floats);
      return;
    }
    for (int64_t i = 0; i < p.L; ++i) {
      const Range keys = part_of(visible(p, b, i), part);
      if (keys.any()) decode_part<T>(p, bh, i, keys, qu_of(bh, i), qw_of(bh, i), out_of(i));
    }
  });
  for (int64_t x = 0; x < queries; ++x) {
    const int64_t bh = x / p.L, i = x % p.L;
    const Range seen = visible(p, bh / p.H, i);
    T* out = const_cast<T*>(row_of<T>(p.out, bh / p.H, bh % p.H, i));
    float* sum = sums.data;
    float max = -INF, weights = 0;
    for (int64_t d = 0; d < Dv; ++d) sum[d] = 0;
    for (int64_t part = 0; part < parts; ++part) {
      const Range keys = part_of(seen, part);
      if (!keys.any()) continue;
      const float* from = partial.data + (x * parts + part) * result_floats;
      if (from[Dv + 1] == 0) continue;  // all scores are -inf
      const float new_max = from[Dv] > max ? from[Dv] : max;
      const float old_factor = exp_of(max - new_max), new_factor = exp_of(from[Dv] - new_max);
      for (int64_t d = 0; d < Dv; ++d) sum[d] = sum[d] * old_factor + from[d] * new_factor;
      weights = weights * old_factor + from[Dv + 1] * new_factor;
      max = new_max;
    }
    const bool empty = !seen.any();
    if (p.sink.data) {
      write_row(out, sum, empty ? 0.f : output_scale(p, bh, i, max, weights), Dv);
    } else {
      for (int64_t d = 0; d < Dv; ++d) put(out + d, empty ? 0.f : sum[d] / weights);
    }
    if (p.lse) p.lse[x] = empty ? -INF : max + log_of(weights);
  }
}

}  // namespace
}  // namespace txl::TXL_ISA
