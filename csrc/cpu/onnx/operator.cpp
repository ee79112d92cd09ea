// Registers txl::RelAttention in ONNX Runtime: RegisterCustomOps, and the functions by which a session asks for types,
// shapes and kernels.
#include <cmath>
#include <cstdio>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "../library.h"
#include "rel_attention.h"

namespace txl::onnx {
namespace {

// The operator in one runtime. A process may have loaded several.
struct Operator : CustomOp {
  Operator(const void* ort_api, bool infers_shapes);

  Api api;
  OrtCustomOpDomain* domain = nullptr;
};

struct Kernel {
  const Api& api;
  Attributes attributes;
};

// Reads a node's attributes.
class Reader {
 public:
  Reader(const Api& api, const OrtKernelInfo* info) : api_(api), info_(info) {}

  int64_t integer(const char* name, int64_t absent, int64_t low, int64_t high, const char* accepted) {
    int64_t value = 0;
    if (!succeeds(api_.KernelInfoGetAttribute_int64(info_, name, &value))) {
      refuse_other_type(name, "an integer");
      return absent;
    }
    if (value < low || value > high) refuse(name, accepted, std::to_string(value));
    return value;
  }

  bool flag(const char* name, bool absent) { return integer(name, absent, 0, 1, "0 or 1") != 0; }

  float real(const char* name, bool (*is_accepted)(double), const char* accepted) {
    float value = 0;
    if (!succeeds(api_.KernelInfoGetAttribute_float(info_, name, &value))) refuse_other_type(name, "a float");
    char given[32];
    std::snprintf(given, sizeof given, "%g", value);
    if (!is_accepted(value)) refuse(name, accepted, given);
    return value;
  }

  std::string text(const char* name, const char* absent) {
    size_t size = 0;  // with the null at its end
    if (!succeeds(api_.KernelInfoGetAttribute_string(info_, name, nullptr, &size))) {
      refuse_other_type(name, "a string");
      return absent;
    }
    std::string value(size, '\0');
    require_ok(api_.KernelInfoGetAttribute_string(info_, name, value.data(), &size));
    return value.c_str();
  }

  [[noreturn]] static void refuse(const std::string& name, const std::string& accepted, const std::string& given) {
    throw std::invalid_argument(name + " must be " + accepted + ", got " + given);
  }

 private:
  bool succeeds(OrtStatus* status) {
    if (status) api_.ReleaseStatus(status);
    return !status;
  }

  // The runtime says in one way that an attribute is absent or of another type: try the other types.
  void refuse_other_type(const char* name, const char* accepted) {
    int64_t integer = 0;
    float real = 0;
    size_t text = 0, reals = 0, integers = 0;
    if (succeeds(api_.KernelInfoGetAttribute_int64(info_, name, &integer))) refuse(name, accepted, "an integer");
    if (succeeds(api_.KernelInfoGetAttribute_float(info_, name, &real))) refuse(name, accepted, "a float");
    if (succeeds(api_.KernelInfoGetAttribute_string(info_, name, nullptr, &text))) refuse(name, accepted, "a string");
    if (succeeds(api_.KernelInfoGetAttributeArray_float(info_, name, nullptr, &reals)) ||
        succeeds(api_.KernelInfoGetAttributeArray_int64(info_, name, nullptr, &integers)))
      refuse(name, accepted, "a list");
  }

  const Api& api_;
  const OrtKernelInfo* const info_;
};

Attributes read_attributes(const Api& api, const OrtKernelInfo* info) {
  constexpr int64_t MAX = INT64_MAX;
  constexpr const char* SIDE = "at least 0, or -1 for all keys";
  Reader reader(api, info);
  Attributes a;
  a.causal = reader.flag("causal", true), a.r_descending = reader.flag("r_descending", false);
  a.left = reader.integer("left", -1, -1, MAX, SIDE), a.right = reader.integer("right", -1, -1, MAX, SIDE);
  a.zero_row = reader.integer("zero_row", -1, -1, INT32_MAX, "a row of r, or -1 for the default");
  const auto is_finite = [](double x) { return std::isfinite(x); };
  const auto is_cap = [](double x) { return x == 0 || (x >= 1e-30 && x <= 1e30); };
  a.scale = reader.real("scale", is_finite, "finite as a float");
  a.position_scale = reader.real("position_scale", is_finite, "finite as a float");
  a.softcap = reader.real("softcap", is_cap, "0 for none, or from 1e-30 to 1e30");
  const std::string outside = reader.text("outside", "refuse");
  if (outside == "clamp")
    a.outside = Outside::clamp;
  else if (outside == "zero")
    a.outside = Outside::zero;
  else if (outside != "refuse")
    Reader::refuse("outside", "\"refuse\", \"clamp\" or \"zero\"", '"' + outside + '"');
  const std::string layout = reader.text("layout", "BHLD");
  if (layout == "BLHD")
    a.layout = Layout::blhd;
  else if (layout != "BHLD")
    Reader::refuse("layout", "\"BHLD\" or \"BLHD\"", '"' + layout + '"');
  return a;
}

OrtStatus* create_kernel(const CustomOp* op, const void*, const OrtKernelInfo* info, void** kernel) {
  const Api& api = static_cast<const Operator*>(op)->api;
  return status_of(api, [&] { *kernel = new Kernel{api, read_attributes(api, info)}; });
}

OrtStatus* compute_kernel(void* given, OrtKernelContext* context) {
  const Kernel& kernel = *static_cast<const Kernel*>(given);
  return status_of(kernel.api, [&] { compute(kernel.api, kernel.attributes, context); });
}

// The sizes of an input's axes while a graph is loaded, each a number or a name.
struct SymbolicShape {
  SymbolicShape(const Api& api, OrtShapeInferContext* context, size_t index) {
    OrtTensorTypeAndShapeInfo* info = nullptr;  // the context's
    require_ok(api.ShapeInferContext_GetInputTypeShape(context, index, &info));
    size_t count = 0;
    require_ok(api.GetDimensionsCount(info, &count));
    sizes.resize(count), names.resize(count);
    require_ok(api.GetDimensions(info, sizes.data(), count));
    require_ok(api.GetSymbolicDimensions(info, names.data(), count));
  }

  std::vector<int64_t> sizes;      // -1 for an axis without a number
  std::vector<const char*> names;  // "" for an axis without a name
};

// The output's shape is that of q but for its last axis, which is that of v, in either layout. It stays unknown where
// one of its sizes has neither number nor name.
OrtStatus* infer_output_shape(const CustomOp* op, OrtShapeInferContext* context) {
  const Api& api = static_cast<const Operator*>(op)->api;
  return status_of(api, [&] {
    SymbolicShape out(api, context, Q);
    const SymbolicShape v(api, context, V);
    if (out.sizes.size() != 4 || v.sizes.size() != 4) return;  // compute refuses them
    out.sizes[3] = v.sizes[3], out.names[3] = v.names[3];
    for (size_t n = 0; n < 4; ++n)
      if (out.sizes[n] < 0 && !*out.names[n]) return;
    OrtTensorTypeAndShapeInfo* info = nullptr;
    require_ok(api.CreateTensorTypeAndShapeInfo(&info));
    const auto release = [&](OrtTensorTypeAndShapeInfo* x) { api.ReleaseTensorTypeAndShapeInfo(x); };
    const std::unique_ptr<OrtTensorTypeAndShapeInfo, decltype(release)> owner(info, release);
    require_ok(api.SetTensorElementType(info, FLOAT));
    require_ok(api.SetDimensions(info, out.sizes.data(), 4));
    require_ok(api.SetSymbolicDimensions(info, out.names.data(), 4));
    require_ok(api.ShapeInferContext_SetOutputTypeShape(context, 0, info));
  });
}

Operator::Operator(const void* ort_api, bool infers_shapes) : api(ort_api) {
  GetName = [](const CustomOp*) { return "RelAttention"; };
  GetExecutionProviderType = [](const CustomOp*) -> const char* { return nullptr; };  // the CPU's
  GetInputTypeCount = [](const CustomOp*) { return INPUT_COUNT; };
  GetInputType = [](const CustomOp*, size_t n) -> int { return n == START || n == END ? UNDEFINED : FLOAT; };
  GetInputCharacteristic = [](const CustomOp*, size_t n) -> int { return n < NEEDED_INPUTS ? REQUIRED : OPTIONAL; };
  GetInputMemoryType = [](const CustomOp*, size_t) { return 0; };
  GetOutputTypeCount = [](const CustomOp*) -> size_t { return 1; };
  GetOutputType = [](const CustomOp*, size_t) -> int { return FLOAT; };
  GetOutputCharacteristic = [](const CustomOp*, size_t) -> int { return REQUIRED; };
  GetVariadicInputMinArity = GetVariadicInputHomogeneity = [](const CustomOp*) { return 1; };
  GetVariadicOutputMinArity = GetVariadicOutputHomogeneity = GetVariadicInputMinArity;
  GetStartVersion = [](const CustomOp*) { return 1; };
  GetEndVersion = [](const CustomOp*) { return INT32_MAX; };
  CreateKernelV2 = create_kernel, KernelComputeV2 = compute_kernel;
  if (infers_shapes) InferOutputShapeFn = infer_output_shape;
  KernelDestroy = [](void* kernel) { delete static_cast<Kernel*>(kernel); };
}

// Returns the operator in the runtime of this OrtApi, in its domain. It lives as long as the process, since sessions
// use it and nobody says when the last one has ended.
Operator& operator_of(const void* ort_api, bool infers_shapes) {
  static std::mutex mutex;
  static auto& operators = *new std::map<const void*, std::unique_ptr<Operator>>;
  const std::lock_guard<std::mutex> lock(mutex);
  std::unique_ptr<Operator>& found = operators[ort_api];
  if (!found) {
    auto made = std::make_unique<Operator>(ort_api, infers_shapes);
    require_ok(made->api.CreateCustomOpDomain("txl", &made->domain));
    require_ok(made->api.CustomOpDomain_Add(made->domain, made.get()));
    found = std::move(made);
  }
  return *found;
}

// Whether a runtime of this version, as in "1.24.1", can infer shapes of a node that leaves out an input before its
// last one. Older runtimes read a null pointer there, before they call the operator. They get no shapes, which a
// session can do without.
bool can_infer_shapes(const char* version) {
  int major = 0, minor = 0;
  return std::sscanf(version, "%d.%d", &major, &minor) == 2 && (major > 1 || minor >= 24);
}

}  // namespace
}  // namespace txl::onnx

// What SessionOptions.register_custom_ops_library calls. base: OrtApiBase.
extern "C" __attribute__((visibility("default"))) OrtStatus* RegisterCustomOps(OrtSessionOptions* options,
                                                                               const txl::onnx::ApiBase* base) {
  using namespace txl::onnx;
  const void* const ort_api = base->GetApi(API_VERSION);
  // CreateStatus has had its slot from version 1 on.
  const auto create_status =
      reinterpret_cast<decltype(Api::CreateStatus)>(static_cast<void* const*>(ort_api ? ort_api : base->GetApi(1))[0]);
  if (!ort_api)
    return create_status(
        FAIL,
        (std::string("txl::RelAttention needs ONNX Runtime 1.17 or newer, got ") + base->GetVersionString()).c_str());
  if (std::string(txl_cpu_library()->source_hash) != TXL_SOURCE_HASH)
    return create_status(FAIL, "libtxl_onnx was built from other sources than the libtxl_cpu that is loaded");
  return status_of(Api(ort_api), [&] {
    Operator& op = operator_of(ort_api, can_infer_shapes(base->GetVersionString()));
    require_ok(op.api.AddCustomOpDomain(options, op.domain));
  });
}
