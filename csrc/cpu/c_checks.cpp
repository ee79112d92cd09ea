#include "c_checks.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <iterator>
#include <limits>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "../call_fields.h"

namespace txl {
namespace {

using Sizes = std::vector<int64_t>;

// An input: the letters of its axes, and where it lies in both structs.
struct InputField {
  const char *name, *axes;
  bool is_float, any_strides;
  txl_tensor txl_call::* tensor;
  txl_tensor txl_gradients::* gradient;
};

#define TXL_ROW(name, axes, is_float, any_strides) \
  {#name, axes, is_float, any_strides, &txl_call::name, &txl_gradients::name},
constexpr InputField INPUT_FIELDS[] = {TXL_INPUT_SHAPES(TXL_ROW)};
#undef TXL_ROW

const char* const NEEDED[] = {"q", "k", "v", "k_mem", "v_mem"};  // where they have elements

constexpr int64_t MAX_SIZE = std::numeric_limits<int32_t>::max();

std::string text(int64_t x) { return std::to_string(x); }

std::string text(double x) {
  char digits[32];
  std::snprintf(digits, sizeof digits, "%g", x);
  return digits;
}

// Throws unless `holds`.
template <class T>
void require(bool holds, const std::string& name, const char* accepted, T got) {
  if (!holds) throw std::invalid_argument(name + " must be " + accepted + ", got " + text(got));
}

int64_t size_of(const txl_call& c, const std::string& letter) {
#define TXL_SIZE(name) \
  if (letter == #name) return c.name;
  TXL_SIZES(TXL_SIZE)
#undef TXL_SIZE
  throw std::invalid_argument("no size is called " + letter);
}

// The sizes of axes, as in "B H L D".
Sizes sizes_of(const txl_call& c, const char* axes) {
  Sizes sizes;
  for (const char* from = axes; *from;) {
    const char* const to = std::strchr(from, ' ');
    const std::string letter = to ? std::string(from, to) : std::string(from);
    sizes.push_back(size_of(c, letter));
    from += letter.size() + (to ? 1 : 0);
  }
  return sizes;
}

bool has_elements(const Sizes& sizes) { return std::find(sizes.begin(), sizes.end(), 0) == sizes.end(); }

int64_t element_bytes(const txl_call& c, bool is_float) { return is_float || c.type == TXL_FLOAT32 ? 4 : 2; }

// Checks the alignment and the strides of a tensor that is given.
void check_tensor(const std::string& name, const txl_tensor& x, const Sizes& sizes, int64_t bytes, bool any_strides) {
  const size_t axes = sizes.size();
  require(reinterpret_cast<uintptr_t>(x.data) % static_cast<size_t>(bytes) == 0, name + ".data",
          "at a multiple of its element's size", static_cast<int64_t>(reinterpret_cast<uintptr_t>(x.data)));
  int64_t last = 0;  // the offset of the last element
  for (size_t n = 0; n < axes; ++n) {
    const int64_t stride = x.stride[n];
    if (sizes[n] <= 1) continue;
    const std::string which = name + ".stride[" + std::to_string(n) + "]";
    require(stride >= 0, which, "at least 0", stride);
    if (n == axes - 1 && !any_strides) require(stride == 1, which, "1, its last axis contiguous", stride);
    int64_t step = 0;
    require(
        !__builtin_mul_overflow(stride, (sizes[n] - 1) * bytes, &step) && !__builtin_add_overflow(last, step, &last),
        which, "such that the tensor fits in memory", stride);
  }
}

// Checks a tensor that is written: its last axis is contiguous, and no two elements share memory.
void check_written(const std::string& name, const txl_tensor& x, const Sizes& sizes, int64_t bytes) {
  if (!has_elements(sizes)) return;
  check_tensor(name, x, sizes, bytes, false);
  std::vector<std::pair<int64_t, int64_t>> axes;  // stride and size
  for (size_t n = 0; n < sizes.size(); ++n)
    if (sizes[n] > 1) axes.emplace_back(x.stride[n], sizes[n]);
  std::sort(axes.begin(), axes.end());
  int64_t extent = 1;
  for (const auto& [stride, size] : axes) {
    require(stride >= extent, name + ".stride", "such that no elements share memory", stride);
    extent += (size - 1) * stride;
  }
}

void check_given(const std::string& name, const void* data, const Sizes& sizes) {
  if (!data && has_elements(sizes)) throw std::invalid_argument(name + " must be given, got NULL");
}

void check_sizes(const txl_call& c) {
#define TXL_CHECK_SIZE(name) require(c.name >= 0 && c.name <= MAX_SIZE, #name, "from 0 to 2147483647", c.name);
  TXL_SIZES(TXL_CHECK_SIZE)
#undef TXL_CHECK_SIZE
  require(c.D >= 1, "D", "at least 1", c.D);
  require(c.Dv >= 1, "Dv", "at least 1", c.Dv);
  require(c.Dp >= 1, "Dp", "at least 1", c.Dp);
  require(c.Hkv == c.H || (c.Hkv && c.H % c.Hkv == 0), "Hkv", ("H = " + text(c.H) + " or a divisor of it").c_str(),
          c.Hkv);
  if (!c.q_pos.data) require(c.Dp == c.D, "Dp", ("D = " + text(c.D) + " without q_pos").c_str(), c.Dp);
}

void check_settings(const txl_call& c) {
  constexpr double MAX_SCALE = 3.4028234e38;
  require(c.left >= 0, "left", "at least 0, or TXL_ALL", c.left);
  require(c.right >= 0, "right", "at least 0, or TXL_ALL", c.right);
  require(c.zero_row >= 0 && c.zero_row <= MAX_SIZE, "zero_row", "from 0 to 2147483647", c.zero_row);
  require(std::abs(c.scale) <= MAX_SCALE, "scale", "finite as a float", c.scale);
  require(std::abs(c.position_scale) <= MAX_SCALE, "position_scale", "finite as a float", c.position_scale);
  if (!c.q_pos.data && c.r.data)
    require(c.position_scale == c.scale, "position_scale",
            ("scale = " + text(c.scale) + " beside r without q_pos").c_str(), c.position_scale);
  require(c.dropout_p >= 0 && c.dropout_p < 1, "dropout_p", "in [0, 1)", c.dropout_p);
  require(c.softcap == 0 || (c.softcap >= 1e-30 && c.softcap <= 1e30), "softcap", "0 for none, or from 1e-30 to 1e30",
          c.softcap);
  require(c.zero_outside == 0 || c.zero_outside == 1, "zero_outside", "0 or 1", int64_t{c.zero_outside});
}

void check_tensors(const txl_call& c) {
  for (const InputField& field : INPUT_FIELDS) {
    const txl_tensor& x = c.*field.tensor;
    const Sizes sizes = sizes_of(c, field.axes);
    const std::string name = field.name;
    if (std::find(std::begin(NEEDED), std::end(NEEDED), name) != std::end(NEEDED)) check_given(name, x.data, sizes);
    if (x.data) check_tensor(name, x, sizes, element_bytes(c, field.is_float), field.any_strides);
  }
  if (!c.r.data && !c.r_bias.data) throw std::invalid_argument("r must be given, or r_bias, got NULL for both");
  if (c.zero_outside) require(c.T >= 1, "T", "at least 1 where zero_outside is 1", c.T);
  check_given("out", c.out.data, {c.B, c.H, c.L, c.Dv});
  check_written("out", c.out, {c.B, c.H, c.L, c.Dv}, element_bytes(c, false));
  require(reinterpret_cast<uintptr_t>(c.lse) % sizeof(float) == 0, "lse", "at a multiple of 4 bytes",
          static_cast<int64_t>(reinterpret_cast<uintptr_t>(c.lse)));
}

// Checks the values of start and end, and that the table has a row for each distance that a query sees.
void check_visible(const txl_call& c) {
  const int64_t keys = c.M + c.L;
  for (const auto& [name, x] : {std::pair{"start", &c.start}, std::pair{"end", &c.end}})
    if (x->data) check_tensor(name, *x, {c.B, c.L}, 4, true);
  const auto bound = [&](const char* name, const txl_tensor& x, int64_t b, int64_t i, int64_t absent) -> int64_t {
    if (!x.data) return absent;
    const int64_t value = static_cast<const int32_t*>(x.data)[b * x.stride[0] + i * x.stride[1]];
    if (value < 0 || value > keys)
      throw std::invalid_argument(std::string(name) + " must hold key indices in [0, M + L] = [0, " + text(keys) +
                                  "], got " + text(value));
    return value;
  };
  int64_t nearest = 0, farthest = -1;
  for (int64_t b = 0; b < (c.start.data || c.end.data ? c.B : std::min<int64_t>(c.B, 1)); ++b)
    for (int64_t i = 0; i < c.L; ++i) {
      const int64_t at = c.M + i;
      const int64_t low = std::max(bound("start", c.start, b, i, 0), c.left < at ? at - c.left : 0);
      const int64_t high = std::min(bound("end", c.end, b, i, keys), c.right < keys - at ? at + c.right + 1 : keys);
      if (low >= high) continue;
      if (nearest > farthest) nearest = at - high + 1, farthest = at - low;
      nearest = std::min(nearest, at - high + 1), farthest = std::max(farthest, at - low);
    }
  if (c.zero_outside || nearest > farthest || (nearest + c.zero_row >= 0 && farthest + c.zero_row < c.T)) return;
  throw std::invalid_argument("T must be enough for the distances " + text(nearest) + " to " + text(farthest) +
                              " that queries see, whose rows are zero_row + distance, got T " + text(c.T) +
                              " and zero_row " + text(c.zero_row));
}

}  // namespace

void check_call(const txl_call* call) {
  if (!call) throw std::invalid_argument("call must be given, got NULL");
  require(call->struct_size == sizeof(txl_call), "struct_size",
          ("sizeof(txl_call) = " + std::to_string(sizeof(txl_call)) + ", that of this library's header").c_str(),
          static_cast<int64_t>(call->struct_size));
  require(call->type == TXL_FLOAT32 || call->type == TXL_BFLOAT16, "type", "TXL_FLOAT32 (0) or TXL_BFLOAT16 (1)",
          int64_t{call->type});
  check_sizes(*call);
  check_settings(*call);
  check_tensors(*call);
  check_visible(*call);
}

void check_gradients(const txl_call& call, const txl_gradients* gradients) {
  if (!gradients) throw std::invalid_argument("gradients must be given, got NULL");
  require(
      gradients->struct_size == sizeof(txl_gradients), "gradients.struct_size",
      ("sizeof(txl_gradients) = " + std::to_string(sizeof(txl_gradients)) + ", that of this library's header").c_str(),
      static_cast<int64_t>(gradients->struct_size));
  const Sizes out = {call.B, call.H, call.L, call.Dv}, rows = {call.B, call.H, call.L};
  check_given("lse", call.lse, rows);
  check_given("gradients.out", gradients->out.data, out);
  check_tensor("gradients.out", gradients->out, out, element_bytes(call, false), false);
  require(reinterpret_cast<uintptr_t>(gradients->lse) % sizeof(float) == 0, "gradients.lse", "at a multiple of 4 bytes",
          static_cast<int64_t>(reinterpret_cast<uintptr_t>(gradients->lse)));
  for (const InputField& field : INPUT_FIELDS) {
    const txl_tensor& x = gradients->*field.gradient;
    const std::string name = std::string("gradients.") + field.name;
    if (!x.data) continue;
    if (!(call.*field.tensor).data)
      throw std::invalid_argument(name + " must be NULL where " + field.name + " is NULL");
    check_written(name, x, sizes_of(call, field.axes), element_bytes(call, field.is_float));
  }
}

}  // namespace txl
