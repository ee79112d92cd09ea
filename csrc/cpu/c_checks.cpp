#include "c_checks.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdio>
#include <cstring>
#include <initializer_list>
#include <iterator>
#include <limits>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "../call_fields.h"
#include "seen.h"

namespace txl {
namespace {

// The sizes of a tensor's axes.
struct Sizes {
  Sizes(std::initializer_list<int64_t> sizes) {
    for (const int64_t size : sizes) add(size);
  }
  void add(int64_t size) { sizes_[axes++] = size; }
  int64_t operator[](int n) const { return sizes_[n]; }
  bool has_elements() const { return std::find(sizes_, sizes_ + axes, 0) == sizes_ + axes; }

  int axes = 0;

 private:
  int64_t sizes_[4];
};

// The name of a tensor, in the struct `group` or, if this is "", in txl_call. Texts of messages are functions where
// they are not literals, since most calls need none.
struct Name {
  const char *group, *field;
  std::string operator()() const { return std::string(group) + field; }
  bool is(const char* other) const { return !*group && std::strcmp(field, other) == 0; }
};

// An input: the letters of its axes, and where it lies in both structs.
struct InputField {
  const char *name, *axes;
  bool is_float, any_strides;
  txl_tensor txl_call::* tensor;
  txl_tensor txl_gradients::* gradient;
};

#define TXL_ROW(name, member, axes, is_float, any_strides) \
  {#name, axes, is_float, any_strides, &txl_call::name, &txl_gradients::name},
constexpr InputField INPUT_FIELDS[] = {TXL_C_INPUTS(TXL_ROW)};
#undef TXL_ROW

constexpr const char* NEEDED[] = {"q", "k", "v", "k_mem", "v_mem"};  // where they have elements

constexpr int64_t MAX_SIZE = std::numeric_limits<int32_t>::max();
constexpr int64_t MAX_BYTES = int64_t{1} << 60;  // of a tensor: sums and differences of addresses do not overflow

std::string text(int64_t x) { return std::to_string(x); }

std::string text(double x) {
  char digits[32];
  std::snprintf(digits, sizeof digits, "%g", x);
  return digits;
}

// Returns a text, or that which a function returns.
template <class T>
std::string as_text(const T& x) {
  if constexpr (std::is_invocable_v<T>)
    return x();
  else
    return x;
}

// Throws unless `holds`. name, accepted: texts, or functions that return them.
template <class N, class A, class T>
void require(bool holds, const N& name, const A& accepted, T got) {
  if (!holds) throw std::invalid_argument(as_text(name) + " must be " + as_text(accepted) + ", got " + text(got));
}

int64_t size_of(const txl_call& c, const char* letter, size_t length) {
#define TXL_SIZE(name) \
  if (length == sizeof #name - 1 && std::memcmp(letter, #name, length) == 0) return c.name;
  TXL_SIZES(TXL_SIZE)
#undef TXL_SIZE
  throw std::invalid_argument("no size is called " + std::string(letter, length));
}

// The sizes of axes, as in "B H L D".
Sizes sizes_of(const txl_call& c, const char* axes) {
  Sizes sizes = {};
  while (*axes) {
    const size_t length = std::strcspn(axes, " ");
    sizes.add(size_of(c, axes, length));
    axes += length + (axes[length] == ' ');
  }
  return sizes;
}

// The strides of contiguous elements.
txl_tensor contiguous(const void* data, const Sizes& sizes) {
  txl_tensor x = {const_cast<void*>(data), {}};
  int64_t stride = 1;
  for (int n = sizes.axes; n--; stride *= sizes[n]) x.stride[n] = stride;
  return x;
}

int64_t element_bytes(const txl_call& c, bool is_float) { return is_float || c.type == TXL_FLOAT32 ? 4 : 2; }

void check_alignment(const Name& name, const char* member, const void* data, int64_t bytes, const char* accepted) {
  const auto address = static_cast<int64_t>(reinterpret_cast<uintptr_t>(data));
  require(address % bytes == 0, [&] { return name() + member; }, accepted, address);
}

// Checks the alignment and the strides of a tensor that is given.
void check_tensor(const Name& name, const txl_tensor& x, const Sizes& sizes, int64_t bytes, bool any_strides) {
  check_alignment(name, ".data", x.data, bytes, "at a multiple of its element's size");
  int64_t last = 0;  // the offset of the last element
  for (int n = 0; n < sizes.axes; ++n) {
    const int64_t stride = x.stride[n];
    if (sizes[n] <= 1) continue;
    const auto which = [&] { return name() + ".stride[" + std::to_string(n) + "]"; };
    require(stride >= 0, which, "at least 0", stride);
    if (n == sizes.axes - 1 && !any_strides) require(stride == 1, which, "1, its last axis contiguous", stride);
    int64_t step = 0;
    const bool fits = !__builtin_mul_overflow(stride, (sizes[n] - 1) * bytes, &step) &&
                      !__builtin_add_overflow(last, step, &last) && last <= MAX_BYTES;
    require(fits, which, "such that the tensor fits in memory", stride);
  }
}

// Checks a tensor that is written: its last axis is contiguous, and no two elements share memory.
void check_written(const Name& name, const txl_tensor& x, const Sizes& sizes, int64_t bytes) {
  if (!sizes.has_elements()) return;
  check_tensor(name, x, sizes, bytes, false);
  std::pair<int64_t, int64_t> axes[4];  // stride and size, sorted
  int count = 0;
  for (int n = 0; n < sizes.axes; ++n) {
    if (sizes[n] == 1) continue;
    axes[count] = {x.stride[n], sizes[n]};
    std::rotate(std::upper_bound(axes, axes + count, axes[count]), axes + count, axes + count + 1);
    ++count;
  }
  int64_t extent = 1;
  for (int n = 0; n < count; ++n) {
    const auto [stride, size] = axes[n];
    require(stride >= extent, [&] { return name() + ".stride"; }, "such that no elements share memory", stride);
    extent += (size - 1) * stride;
  }
}

void check_given(const Name& name, const void* data, const Sizes& sizes) {
  if (!data && sizes.has_elements()) throw std::invalid_argument(name() + " must be given, got NULL");
}

void check_sizes(const txl_call& c) {
#define TXL_CHECK_SIZE(name) require(c.name >= 0 && c.name <= MAX_SIZE, #name, "from 0 to 2147483647", c.name);
  TXL_SIZES(TXL_CHECK_SIZE)
#undef TXL_CHECK_SIZE
  require(c.D >= 1, "D", "at least 1", c.D);
  require(c.Dv >= 1, "Dv", "at least 1", c.Dv);
  require(c.Dp >= 1, "Dp", "at least 1", c.Dp);
  require(
      c.Hkv == c.H || (c.Hkv && c.H % c.Hkv == 0), "Hkv", [&] { return "H = " + text(c.H) + " or a divisor of it"; },
      c.Hkv);
  if (!c.q_pos.data) require(c.Dp == c.D, "Dp", [&] { return "D = " + text(c.D) + " without q_pos"; }, c.Dp);
}

void check_settings(const txl_call& c) {
  constexpr double MAX_SCALE = 3.4028234e38;
  require(c.left >= 0, "left", "at least 0, or TXL_ALL", c.left);
  require(c.right >= 0, "right", "at least 0, or TXL_ALL", c.right);
  require(c.zero_row >= 0 && c.zero_row <= MAX_SIZE, "zero_row", "from 0 to 2147483647", c.zero_row);
  require(std::abs(c.scale) <= MAX_SCALE, "scale", "finite as a float", c.scale);
  require(std::abs(c.position_scale) <= MAX_SCALE, "position_scale", "finite as a float", c.position_scale);
  if (!c.q_pos.data && c.r.data)
    require(
        c.position_scale == c.scale, "position_scale",
        [&] { return "scale = " + text(c.scale) + " beside r without q_pos"; }, c.position_scale);
  require(c.dropout_p >= 0 && c.dropout_p < 1, "dropout_p", "in [0, 1)", c.dropout_p);
  require(c.softcap == 0 || (c.softcap >= 1e-30 && c.softcap <= 1e30), "softcap", "0 for none, or from 1e-30 to 1e30",
          c.softcap);
  require(c.zero_outside == 0 || c.zero_outside == 1, "zero_outside", "0 or 1", int64_t{c.zero_outside});
}

void check_tensors(const txl_call& c) {
  for (const InputField& field : INPUT_FIELDS) {
    const txl_tensor& x = c.*field.tensor;
    const Sizes sizes = sizes_of(c, field.axes);
    const Name name = {"", field.name};
    for (const char* needed : NEEDED)
      if (!x.data && name.is(needed)) check_given(name, x.data, sizes);
    if (x.data) check_tensor(name, x, sizes, element_bytes(c, field.is_float), field.any_strides);
  }
  if (!c.r.data && !c.r_bias.data) throw std::invalid_argument("r must be given, or r_bias, got NULL for both");
  if (c.zero_outside) require(c.T >= 1, "T", "at least 1 where zero_outside is 1", c.T);
  check_given({"", "out"}, c.out.data, {c.B, c.H, c.L, c.Dv});
  check_written({"", "out"}, c.out, {c.B, c.H, c.L, c.Dv}, element_bytes(c, false));
  check_alignment({"", "lse"}, "", c.lse, sizeof(float), "at a multiple of 4 bytes");
}

// Checks the values of start and end, and that the table has a row for each distance that a query sees.
void check_visible(const txl_call& c) {
  for (const auto& [name, x] : {std::pair{"start", &c.start}, std::pair{"end", &c.end}})
    if (x->data) check_tensor({"", name}, *x, {c.B, c.L}, 4, true);
  const auto bounds = [](const txl_tensor& x) {
    return Bounds{static_cast<const int32_t*>(x.data), x.stride[0], x.stride[1]};
  };
  const Bounds start = bounds(c.start), end = bounds(c.end);
  const Seen seen = find_seen(start, end, c.B, c.L, c.M, c.left, c.right);
  if (seen.wrong)
    throw std::invalid_argument(std::string(seen.wrong == &start ? "start" : "end") +
                                " must hold key indices in [0, M + L] = [0, " + text(c.M + c.L) + "], got " +
                                text(seen.value));
  if (c.zero_outside || has_rows(seen, c.T, c.zero_row)) return;
  throw std::invalid_argument("T must be enough for the distances " + text(seen.nearest) + " to " +
                              text(seen.farthest) + " that queries see, whose rows are zero_row + distance, got T " +
                              text(c.T) + " and zero_row " + text(c.zero_row));
}

// The memory of a tensor that has elements: the bytes [begin, end), and those of its elements among them.
struct Memory {
  Memory(const Name& name, const txl_tensor& x, const Sizes& sizes, int64_t bytes)
      : name(name), begin(reinterpret_cast<uintptr_t>(x.data)), end(begin), bytes(bytes) {
    for (int n = 0; n < sizes.axes; ++n) {
      if (sizes[n] == 1 || x.stride[n] == 0) continue;
      stride[axes] = x.stride[n] * bytes, size[axes] = sizes[n];
      end += static_cast<uintptr_t>(stride[axes] * (size[axes] - 1));
      ++axes;
    }
    end += static_cast<uintptr_t>(bytes);
  }

  Name name;
  uintptr_t begin, end;
  int64_t bytes;               // of an element
  int axes = 0;                // with several elements, at different addresses
  int64_t stride[4], size[4];  // in bytes; in elements
};

// The sums of multiples x * stride, one for each of up to nine strides, with low <= x <= high.
class Sums {
 public:
  void add(int64_t stride, int64_t low, int64_t high) {
    int n = count_;
    for (int same = 0; same < count_; ++same)
      if (term_[same].stride == stride) {
        term_[same].low += low, term_[same].high += high;
        return;
      }
    for (; n > 0 && term_[n - 1].stride > stride; --n) term_[n] = term_[n - 1];
    term_[n] = {stride, low, high};
    ++count_;
  }

  // Whether a sum equals `wanted`, exactly. Strides are tried from the largest down, each with those multiples alone
  // from which the smaller ones can reach the rest: at most two where both tensors have one set of strides.
  bool contain(int64_t wanted) {
    for (int n = 0; n < count_; ++n) {
      const Term& t = term_[n];
      const Reach& smaller = reach_[n];
      reach_[n + 1] = {smaller.low + t.low * t.stride, smaller.high + t.high * t.stride,
                       smaller.dense && t.stride <= smaller.high - smaller.low + 1};
    }
    return contain(count_, wanted);
  }

 private:
  struct Term {
    int64_t stride, low, high;
  };
  struct Reach {  // of the sums of the smallest strides
    int64_t low = 0, high = 0;
    bool dense = true;  // whether they are all integers in [low, high]
  };

  bool contain(int terms, int64_t wanted) const {
    const Reach& all = reach_[terms];
    if (wanted < all.low || wanted > all.high) return false;
    if (all.dense) return true;
    const Term& t = term_[terms - 1];
    const Reach& smaller = reach_[terms - 1];
    int64_t x = std::max(t.low, floor_div(wanted - smaller.high + t.stride - 1, t.stride));
    const int64_t last = std::min(t.high, floor_div(wanted - smaller.low, t.stride));
    for (; x <= last; ++x)
      if (contain(terms - 1, wanted - x * t.stride)) return true;
    return false;
  }

  static int64_t floor_div(int64_t x, int64_t y) { return x / y - (x % y < 0); }

  int count_ = 0;
  Term term_[9];
  Reach reach_[10];
};

// Whether an element of one tensor shares memory with an element of the other.
bool share_elements(const Memory& x, const Memory& y) {
  if (x.end <= y.begin || y.end <= x.begin) return false;
  Sums differences;  // of the addresses of their bytes, each counted from its tensor's first
  differences.add(1, 1 - y.bytes, x.bytes - 1);
  for (int n = 0; n < x.axes; ++n) differences.add(x.stride[n], 0, x.size[n] - 1);
  for (int n = 0; n < y.axes; ++n) differences.add(y.stride[n], 1 - y.size[n], 0);
  return differences.contain(static_cast<int64_t>(y.begin - x.begin));
}

// Whether the elements of two tensors are at the same addresses, in the same order.
bool same_elements(const Memory& x, const Memory& y) {
  return x.begin == y.begin && x.bytes == y.bytes && x.axes == y.axes &&
         std::equal(x.stride, x.stride + x.axes, y.stride) && std::equal(x.size, x.size + x.axes, y.size);
}

// Checks that no element that is written is one of another tensor. gradients: null for forward, which may write out
// over the queries, since each of its items reads all of its queries before it writes. For backward, out and lse must
// not be an input's either: forward has then overwritten it.
void check_overlap(const txl_call& c, const txl_gradients* gradients) {
  std::vector<Memory> tensors;
  tensors.reserve(2 * std::size(INPUT_FIELDS) + 6);
  const auto add = [&](const Name& name, const txl_tensor& x, const Sizes& sizes, bool is_float) {
    if (x.data && sizes.has_elements()) tensors.emplace_back(name, x, sizes, element_bytes(c, is_float));
  };
  const auto check_against_earlier = [&](size_t n) {
    for (size_t other = 0; other < n; ++other) {
      const Memory &x = tensors[n], &y = tensors[other];
      if (!share_elements(x, y)) continue;
      const bool in_place = !gradients && x.name.is("out") && (y.name.is("q") || y.name.is("q_pos"));
      if (in_place && same_elements(x, y)) continue;
      throw std::invalid_argument(x.name() + " must have memory of its own" +
                                  (in_place ? " or that of " + y.name() + ", element by element" : "") +
                                  ", got elements in the memory of " + y.name());
    }
  };
  const Sizes out = {c.B, c.H, c.L, c.Dv}, rows = {c.B, c.H, c.L}, bounds = {c.B, c.L};
  for (const InputField& field : INPUT_FIELDS)
    if ((c.*field.tensor).data) add({"", field.name}, c.*field.tensor, sizes_of(c, field.axes), field.is_float);
  add({"", "start"}, c.start, bounds, true);
  add({"", "end"}, c.end, bounds, true);
  size_t n = tensors.size();
  add({"", "out"}, c.out, out, false);
  add({"", "lse"}, contiguous(c.lse, rows), rows, true);
  for (; n < tensors.size(); ++n) check_against_earlier(n);
  if (!gradients) return;
  add({"gradients.", "out"}, gradients->out, out, false);
  add({"gradients.", "lse"}, contiguous(gradients->lse, rows), rows, true);
  n = tensors.size();
  for (const InputField& field : INPUT_FIELDS) {
    const txl_tensor& x = gradients->*field.gradient;
    if (x.data) add({"gradients.", field.name}, x, sizes_of(c, field.axes), field.is_float);
  }
  for (; n < tensors.size(); ++n) check_against_earlier(n);
}

// The sizes of the structs in each version of the header, whose last fields are given.
template <class T>
constexpr size_t size_to(size_t end) {
  return (end + alignof(T) - 1) / alignof(T) * alignof(T);
}
#define TXL_CALL(last, last_gradient) size_to<txl_call>(offsetof(txl_call, last) + sizeof(txl_call::last)),
#define TXL_GRADIENTS(last_call, last) \
  size_to<txl_gradients>(offsetof(txl_gradients, last) + sizeof(txl_gradients::last)),
constexpr size_t CALL_SIZES[] = {TXL_C_VERSIONS(TXL_CALL)};
constexpr size_t GRADIENTS_SIZES[] = {TXL_C_VERSIONS(TXL_GRADIENTS)};
#undef TXL_CALL
#undef TXL_GRADIENTS

// Returns a copy of a caller's struct, with zeros for the fields that its header does not have yet. A larger struct is
// refused without a look at its other bytes: a size that was never set would be read past the struct's end.
template <class T, size_t N>
T copy_of(const T* given, const char* name, const char* member, const char* type, const size_t (&sizes)[N]) {
  if (!given) throw std::invalid_argument(std::string(name) + " must be given, got NULL");
  const size_t size = given->struct_size;
  require(
      std::find(sizes, sizes + N, size) != sizes + N, member,
      [&] {
        return std::string("sizeof(") + type + ") = " + std::to_string(sizeof(T)) +
               ", that of this library's header, or that of an older one";
      },
      static_cast<int64_t>(size));
  T x = {};
  std::memcpy(&x, given, size);
  return x;
}

void check_call(const txl_call& call) {
  require(call.type == TXL_FLOAT32 || call.type == TXL_BFLOAT16, "type", "TXL_FLOAT32 (0) or TXL_BFLOAT16 (1)",
          int64_t{call.type});
  check_sizes(call);
  check_settings(call);
  check_tensors(call);
  check_visible(call);
}

void check_gradients(const txl_call& call, const txl_gradients& gradients) {
  const Sizes out = {call.B, call.H, call.L, call.Dv}, rows = {call.B, call.H, call.L};
  check_given({"", "lse"}, call.lse, rows);
  check_given({"gradients.", "out"}, gradients.out.data, out);
  check_tensor({"gradients.", "out"}, gradients.out, out, element_bytes(call, false), false);
  check_alignment({"gradients.", "lse"}, "", gradients.lse, sizeof(float), "at a multiple of 4 bytes");
  for (const InputField& field : INPUT_FIELDS) {
    const txl_tensor& x = gradients.*field.gradient;
    const Name name = {"gradients.", field.name};
    if (!x.data) continue;
    if (!(call.*field.tensor).data)
      throw std::invalid_argument(name() + " must be NULL where " + field.name + " is NULL");
    check_written(name, x, sizes_of(call, field.axes), element_bytes(call, field.is_float));
  }
}

}  // namespace

txl_call read_call(const txl_call* given) { return copy_of(given, "call", "struct_size", "txl_call", CALL_SIZES); }

txl_gradients read_gradients(const txl_gradients* given) {
  return copy_of(given, "gradients", "gradients.struct_size", "txl_gradients", GRADIENTS_SIZES);
}

void check_forward(const txl_call& call) {
  check_call(call);
  check_overlap(call, nullptr);
}

void check_backward(const txl_call& call, const txl_gradients& gradients) {
  check_call(call);
  check_gradients(call, gradients);
  check_overlap(call, &gradients);
}

}  // namespace txl
