#include "rel_attention.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "../../include/txl_attention.h"

namespace txl::onnx {
namespace {

using Sizes = std::vector<int64_t>;

constexpr int64_t UNKNOWN = -1;  // a size that no input has set yet
constexpr size_t NO_AXIS = SIZE_MAX;

struct Axis {
  const char* name;
  int64_t txl_call::* size;
};

constexpr Axis B{"B", &txl_call::B}, H{"H", &txl_call::H}, L{"L", &txl_call::L}, D{"D", &txl_call::D},
    Hkv{"Hkv", &txl_call::Hkv}, Dv{"Dv", &txl_call::Dv}, M{"M", &txl_call::M}, Dp{"Dp", &txl_call::Dp},
    T{"T", &txl_call::T};
constexpr Axis ALL_AXES[] = {B, H, L, D, Hkv, Dv, M, Dp, T};

// An input's axes, those of them whose size may be 1 instead, and its tensor in the call.
struct Shape {
  std::vector<Axis> axes;
  const char* may_be_1;
  txl_tensor txl_call::* tensor;
  const char* accepted;
  size_t heads = NO_AXIS;  // the axis that layout BLHD puts behind the next one
  const char* accepted_blhd = accepted;

  // The axis of the call's tensor that axis n of an input is.
  size_t axis(size_t n, Layout layout) const {
    if (layout == Layout::bhld || heads == NO_AXIS) return n;
    return n == heads ? heads + 1 : n == heads + 1 ? heads : n;
  }
};

const Shape& shape_of(size_t input) {
  static const Shape shapes[INPUT_COUNT] = {
      {{B, H, L, D}, "", &txl_call::q, "[B, H, L, D]", 1, "[B, L, H, D]"},
      {{B, Hkv, L, D}, "", &txl_call::k, "[B, Hkv, L, D]", 1, "[B, L, Hkv, D]"},
      {{B, Hkv, L, Dv}, "", &txl_call::v, "[B, Hkv, L, Dv]", 1, "[B, L, Hkv, Dv]"},
      {{H, T, Dp}, "H", &txl_call::r, "[H, T, Dp] or [1, T, Dp]", 0, "[T, H, Dp] or [T, 1, Dp]"},
      {{H, D}, "", &txl_call::content_bias, "[H, D]"},
      {{H, Dp}, "", &txl_call::position_bias, "[H, Dp]"},
      {{B, Hkv, M, D}, "", &txl_call::k_mem, "[B, Hkv, M, D]", 1, "[B, M, Hkv, D]"},
      {{B, Hkv, M, Dv}, "", &txl_call::v_mem, "[B, Hkv, M, Dv]", 1, "[B, M, Hkv, Dv]"},
      {{B, L}, "BL", &txl_call::start, "[B or 1, L or 1]"},
      {{B, L}, "BL", &txl_call::end, "[B or 1, L or 1]"},
      {{B, H, L, Dp}, "", &txl_call::q_pos, "[B, H, L, Dp]", 1, "[B, L, H, Dp]"},
      {{H, T}, "H", &txl_call::r_bias, "[H, T] or [1, T]"},
      {{B, H, L}, "", &txl_call::sink, "[H] or [B, H, L]"},
  };
  return shapes[input];
}

struct Tensor {
  void* data = nullptr;
  Sizes sizes;
  int type = UNDEFINED;
  bool given = false;
};

std::string text(const Sizes& sizes) {
  std::string joined;
  for (const int64_t size : sizes) joined += (joined.empty() ? "" : ", ") + std::to_string(size);
  return "[" + joined + "]";
}

Tensor tensor_of(const Api& api, const OrtValue* value) {
  Tensor x;
  if (!value) return x;
  OrtTensorTypeAndShapeInfo* info = nullptr;
  require_ok(api.GetTensorTypeAndShape(value, &info));
  const auto release = [&](OrtTensorTypeAndShapeInfo* p) { api.ReleaseTensorTypeAndShapeInfo(p); };
  const std::unique_ptr<OrtTensorTypeAndShapeInfo, decltype(release)> owner(info, release);
  size_t axes = 0;
  require_ok(api.GetDimensionsCount(info, &axes));
  x.sizes.resize(axes);
  require_ok(api.GetDimensions(info, x.sizes.data(), axes));
  require_ok(api.GetTensorElementType(info, &x.type));
  require_ok(api.GetTensorMutableData(const_cast<OrtValue*>(value), &x.data));
  x.given = true;
  return x;
}

// One run of a node: the call that its inputs and attributes make.
class Run {
 public:
  Run(const Api& api, const Attributes& attributes, OrtKernelContext* context)
      : api_(api), attributes_(attributes), context_(context) {
    size_t count = 0;
    require_ok(api.KernelContext_GetInputCount(context, &count));
    for (size_t n = 0; n < std::min(count, INPUT_COUNT); ++n) {
      const OrtValue* value = nullptr;
      require_ok(api.KernelContext_GetInput(context, n, &value));
      inputs_[n] = tensor_of(api, value);
    }
    call_.struct_size = sizeof call_;
    call_.type = TXL_FLOAT32;
    set_tensors();
    set_settings();
    set_tables();
  }

  void forward() {
    const int64_t row = call_.H * call_.Dv, head = call_.L * call_.Dv;
    const bool is_bhld = attributes_.layout == Layout::bhld;
    const int64_t sizes[] = {call_.B, is_bhld ? call_.H : call_.L, is_bhld ? call_.L : call_.H, call_.Dv};
    OrtValue* out = nullptr;
    require_ok(api_.KernelContext_GetOutput(context_, 0, sizes, 4, &out));
    if (!out) return;  // a graph that names no output
    void* data = nullptr;
    require_ok(api_.GetTensorMutableData(out, &data));
    call_.out = {data, {call_.L * row, is_bhld ? head : call_.Dv, is_bhld ? call_.Dv : row, 1}};
    const int code = txl_forward_on(&call_, parallel_for, this);
    if (code == TXL_INVALID_ARGUMENT) throw std::invalid_argument(txl_last_error());
    if (code != TXL_OK) throw std::runtime_error(txl_last_error());
  }

 private:
  static void parallel_for(void* run, void (*task)(void*, size_t), void* data, size_t tasks) {
    const Run& self = *static_cast<const Run*>(run);
    OrtStatus* const status = self.api_.KernelContext_ParallelFor(self.context_, task, tasks, 0, data);
    if (status) self.api_.ReleaseStatus(status);  // txl_forward_on does itself what was not done
  }

  bool given(Input input) const { return inputs_[input].given; }

  // Sets sizes and tensors. Each axis gets its size from the first input that has it.
  void set_tensors() {
    for (const Axis& axis : ALL_AXES) call_.*axis.size = UNKNOWN;
    for (const Input input : {POSITION_BIAS, Q_POS})
      if (given(input) && !given(R))
        throw std::invalid_argument(std::string(INPUTS[input]) +
                                    " must not be given without r: it multiplies rows of r");
    if (given(K_MEM) != given(V_MEM))
      throw std::invalid_argument(std::string(given(K_MEM) ? "v_mem" : "k_mem") + " must be given beside " +
                                  (given(K_MEM) ? "k_mem" : "v_mem"));
    for (size_t n = 0; n < INPUT_COUNT; ++n) {
      if (inputs_[n].given) set_tensor(n);
      if (n == Q && !given(Q_POS)) call_.Dp = call_.D;
    }
    if (call_.M == UNKNOWN) call_.M = 0;
    if (call_.T == UNKNOWN) throw std::invalid_argument("r must be given, or r_bias");
    set_bounds(START, &txl_call::start), set_bounds(END, &txl_call::end);
  }

  void set_tensor(size_t n) {
    const Shape& shape = shape_of(n);
    const txl_call before = call_;
    const Sizes& sizes = inputs_[n].sizes;
    txl_tensor& tensor = call_.*shape.tensor;
    tensor.data = inputs_[n].data;
    if (n == SINK && sizes.size() == 1 && sizes[0] == call_.H) {
      tensor.stride[1] = 1;
      return;
    }
    bool fits = sizes.size() == shape.axes.size();
    int64_t stride = 1;
    for (size_t axis = shape.axes.size(); fits && axis-- > 0;) {
      const size_t place = shape.axis(axis, attributes_.layout);
      const Axis& of = shape.axes[place];
      int64_t& size = call_.*of.size;
      if (size == UNKNOWN) size = sizes[axis];
      const bool for_all = sizes[axis] == 1 && std::strstr(shape.may_be_1, of.name);
      fits = sizes[axis] == size || for_all;
      tensor.stride[place] = for_all ? 0 : stride;
      stride *= sizes[axis];
    }
    if (!fits)
      throw std::invalid_argument(std::string(INPUTS[n]) + " must be " + accepted(shape, before) + ", got " +
                                  text(sizes));
  }

  // As in "[B, H, L, D] with B = 2, L = 6", of the sizes that earlier inputs have set.
  std::string accepted(const Shape& shape, const txl_call& call) const {
    std::string with;
    for (size_t n = 0; n < shape.axes.size(); ++n) {
      const Axis& axis = shape.axes[shape.axis(n, attributes_.layout)];
      if (call.*axis.size != UNKNOWN)
        with += std::string(with.empty() ? " with " : ", ") + axis.name + " = " + std::to_string(call.*axis.size);
    }
    return (attributes_.layout == Layout::bhld ? shape.accepted : shape.accepted_blhd) + with;
  }

  // Bounds are int32 in the call.
  void set_bounds(Input input, txl_tensor txl_call::* tensor) {
    const Tensor& x = inputs_[input];
    if (!x.given || x.type == INT32) return;
    if (x.type != INT64)
      throw std::invalid_argument(std::string(INPUTS[input]) + " must be int32 or int64, got ONNX's element type " +
                                  std::to_string(x.type));
    const int64_t keys = call_.M + call_.L;
    std::vector<int32_t>& narrow = bounds_[input == END];
    const int64_t count = x.sizes[0] * x.sizes[1];
    narrow.reserve(static_cast<size_t>(std::max<int64_t>(count, 1)));
    for (int64_t n = 0; n < count; ++n) {
      const int64_t value = static_cast<const int64_t*>(x.data)[n];
      if (value < 0 || value > keys)
        throw std::invalid_argument(std::string(INPUTS[input]) + " must hold key indices in [0, M + L] = [0, " +
                                    std::to_string(keys) + "], got " + std::to_string(value));
      narrow.push_back(static_cast<int32_t>(value));
    }
    (call_.*tensor).data = narrow.data();
  }

  void set_settings() {
    const Attributes& a = attributes_;
    call_.left = a.left < 0 ? TXL_ALL : a.left;
    call_.right = a.causal ? 0 : a.right < 0 ? TXL_ALL : a.right;
    call_.scale = a.scale != 0 ? a.scale : 1 / std::sqrt(static_cast<double>(std::max<int64_t>(call_.D, 1)));
    call_.position_scale = a.position_scale != 0 ? a.position_scale : call_.scale;
    if (given(R) && !given(Q_POS) && call_.position_scale != call_.scale) call_.q_pos = call_.q;
    call_.softcap = a.softcap;
    call_.zero_outside = a.outside == Outside::zero;
    call_.zero_row = a.zero_row;
    if (a.zero_row >= 0) return;
    int64_t nearest = 0;  // of the table's distances
    if (call_.right != 0) {
      const int64_t rows = call_.M + 2 * call_.L - 1;
      if (call_.T != rows)
        throw std::invalid_argument("zero_row must be given where causal is 0 and r or r_bias has not M + 2 L - 1 = " +
                                    std::to_string(rows) + " rows, got " + std::to_string(call_.T) + " rows");
      nearest = 1 - call_.L;
    }
    call_.zero_row = a.r_descending ? call_.T - 1 + nearest : -nearest;
  }

  // Copies tables in descending order, and those whose first and last rows serve all distances before and after them:
  // the kernels take ascending tables with a row for each distance.
  void set_tables() {
    const bool reversed = attributes_.r_descending, clamped = attributes_.outside == Outside::clamp;
    if (!reversed && !clamped) return;
    const int64_t rows = call_.T;
    if (call_.zero_row < 0 || call_.zero_row >= rows)
      throw std::invalid_argument(std::string("zero_row must be a row of ") + (given(R) ? "r" : "r_bias") + " (0 to " +
                                  std::to_string(rows - 1) + ") where " +
                                  (reversed ? "r_descending is 1" : "outside is \"clamp\"") + ", got " +
                                  std::to_string(call_.zero_row));
    if (reversed) call_.zero_row = rows - 1 - call_.zero_row;
    int64_t before = 0, after = 0;
    if (clamped) {
      const int64_t past = std::min(call_.left, call_.M + call_.L - 1), future = std::min(call_.right, call_.L - 1);
      before = std::max<int64_t>(future - call_.zero_row, 0);
      after = std::max<int64_t>(call_.zero_row + past + 1 - rows, 0);
    }
    const bool is_bhld = attributes_.layout == Layout::bhld;
    const Sizes& r = inputs_[R].sizes;
    if (given(R) && is_bhld) call_.r.data = copy_table(tables_[0], R, r[0], call_.Dp, reversed, before, after);
    if (given(R) && !is_bhld) call_.r.data = copy_table(tables_[0], R, 1, r[1] * call_.Dp, reversed, before, after);
    if (given(R_BIAS))
      call_.r_bias.data = copy_table(tables_[1], R_BIAS, inputs_[R_BIAS].sizes[0], 1, reversed, before, after);
    call_.zero_row += before, call_.T = before + rows + after;
    if (is_bhld && call_.r.stride[0]) call_.r.stride[0] = call_.T * call_.Dp;
    if (call_.r_bias.stride[0]) call_.r_bias.stride[0] = call_.T;
  }

  // Returns a copy of a table [heads, T, width].
  float* copy_table(std::unique_ptr<float[]>& copy, Input input, int64_t heads, int64_t width, bool reversed,
                    int64_t before, int64_t after) const {
    const int64_t rows = call_.T, all = before + rows + after;
    copy.reset(new float[static_cast<size_t>(heads * all * width)]);
    for (int64_t h = 0; h < heads; ++h)
      for (int64_t n = 0; n < all; ++n) {
        const int64_t ascending = std::clamp<int64_t>(n - before, 0, rows - 1);
        const int64_t row = reversed ? rows - 1 - ascending : ascending;
        std::copy_n(static_cast<const float*>(inputs_[input].data) + (h * rows + row) * width, width,
                    copy.get() + (h * all + n) * width);
      }
    return copy.get();
  }

  const Api& api_;
  const Attributes& attributes_;
  OrtKernelContext* const context_;
  std::array<Tensor, INPUT_COUNT> inputs_;
  txl_call call_ = {};
  std::vector<int32_t> bounds_[2];
  std::unique_ptr<float[]> tables_[2];
};

}  // namespace

void compute(const Api& api, const Attributes& attributes, OrtKernelContext* context) {
  Run(api, attributes, context).forward();
}

}  // namespace txl::onnx
