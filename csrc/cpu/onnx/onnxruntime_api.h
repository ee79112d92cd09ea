// The part of ONNX Runtime's C API that the operator uses, from version 1.17 on, so that no header of ONNX Runtime is
// needed to build it. A function keeps its slot in all later versions; tests/txl_kernels/onnx/test_library.py
// compares this file with the official header.
#pragma once
#include <cstddef>
#include <cstdint>

struct OrtCustomOpDomain;
struct OrtKernelContext;
struct OrtKernelInfo;
struct OrtSessionOptions;
struct OrtShapeInferContext;
struct OrtStatus;
struct OrtTensorTypeAndShapeInfo;
struct OrtValue;

namespace txl::onnx {

constexpr uint32_t API_VERSION = 17;

enum ErrorCode : int { FAIL = 1, INVALID_ARGUMENT = 2 };
enum ElementType : int { UNDEFINED = 0, FLOAT = 1, INT32 = 6, INT64 = 7 };  // UNDEFINED: an input of any type
enum Characteristic : int { REQUIRED = 0, OPTIONAL = 1 };

// X(slot, name, parameters): functions that return OrtStatus*, which is null for success. TXL_ORT_ENUMS: the same, with
// integers in place of the API's enumerations.
#define TXL_ORT_FUNCTIONS(X)                                                                                     \
  X(26, CreateCustomOpDomain, (const char* name, OrtCustomOpDomain** domain))                                    \
  X(28, AddCustomOpDomain, (OrtSessionOptions * options, OrtCustomOpDomain * domain))                            \
  X(51, GetTensorMutableData, (OrtValue * value, void** data))                                                   \
  X(57, CreateTensorTypeAndShapeInfo, (OrtTensorTypeAndShapeInfo * *info))                                       \
  X(59, SetDimensions, (OrtTensorTypeAndShapeInfo * info, const int64_t* sizes, size_t count))                   \
  X(61, GetDimensionsCount, (const OrtTensorTypeAndShapeInfo* info, size_t* count))                              \
  X(62, GetDimensions, (const OrtTensorTypeAndShapeInfo* info, int64_t* sizes, size_t count))                    \
  X(63, GetSymbolicDimensions, (const OrtTensorTypeAndShapeInfo* info, const char** names, size_t count))        \
  X(65, GetTensorTypeAndShape, (const OrtValue* value, OrtTensorTypeAndShapeInfo** info))                        \
  X(85, KernelInfoGetAttribute_float, (const OrtKernelInfo* info, const char* name, float* value))               \
  X(86, KernelInfoGetAttribute_int64, (const OrtKernelInfo* info, const char* name, int64_t* value))             \
  X(87, KernelInfoGetAttribute_string, (const OrtKernelInfo* info, const char* name, char* value, size_t* size)) \
  X(88, KernelContext_GetInputCount, (const OrtKernelContext* context, size_t* count))                           \
  X(90, KernelContext_GetInput, (const OrtKernelContext* context, size_t index, const OrtValue** value))         \
  X(91, KernelContext_GetOutput,                                                                                 \
    (OrtKernelContext * context, size_t index, const int64_t* sizes, size_t count, OrtValue** value))            \
  X(162, KernelInfoGetAttributeArray_float,                                                                      \
    (const OrtKernelInfo* info, const char* name, float* values, size_t* size))                                  \
  X(163, KernelInfoGetAttributeArray_int64,                                                                      \
    (const OrtKernelInfo* info, const char* name, int64_t* values, size_t* size))                                \
  X(268, ShapeInferContext_GetInputTypeShape,                                                                    \
    (const OrtShapeInferContext* context, size_t index, OrtTensorTypeAndShapeInfo** info))                       \
  X(270, ShapeInferContext_SetOutputTypeShape,                                                                   \
    (const OrtShapeInferContext* context, size_t index, const OrtTensorTypeAndShapeInfo* info))                  \
  X(271, SetSymbolicDimensions, (OrtTensorTypeAndShapeInfo * info, const char** names, size_t count))            \
  X(274, KernelContext_ParallelFor,                                                                              \
    (const OrtKernelContext* context, void (*task)(void*, size_t), size_t tasks, size_t batches, void* data))

#define TXL_ORT_ENUMS(X)                                                             \
  X(0, CreateStatus, (int code, const char* message))                                \
  X(27, CustomOpDomain_Add, (OrtCustomOpDomain * domain, const struct CustomOp* op)) \
  X(58, SetTensorElementType, (OrtTensorTypeAndShapeInfo * info, int type))          \
  X(60, GetTensorElementType, (const OrtTensorTypeAndShapeInfo* info, int* type))

// X(slot, name, parameters): functions without a result.
#define TXL_ORT_RELEASES(X)                  \
  X(93, ReleaseStatus, (OrtStatus * status)) \
  X(99, ReleaseTensorTypeAndShapeInfo, (OrtTensorTypeAndShapeInfo * info))

// The description of an operator: OrtCustomOp of version 17.
struct CustomOp {
  uint32_t version = API_VERSION;
  void* (*CreateKernel)(const CustomOp*, const void* api, const OrtKernelInfo*) = nullptr;
  const char* (*GetName)(const CustomOp*) = nullptr;
  const char* (*GetExecutionProviderType)(const CustomOp*) = nullptr;
  int (*GetInputType)(const CustomOp*, size_t index) = nullptr;
  size_t (*GetInputTypeCount)(const CustomOp*) = nullptr;
  int (*GetOutputType)(const CustomOp*, size_t index) = nullptr;
  size_t (*GetOutputTypeCount)(const CustomOp*) = nullptr;
  void (*KernelCompute)(void* kernel, OrtKernelContext*) = nullptr;
  void (*KernelDestroy)(void* kernel) = nullptr;
  int (*GetInputCharacteristic)(const CustomOp*, size_t index) = nullptr;
  int (*GetOutputCharacteristic)(const CustomOp*, size_t index) = nullptr;
  int (*GetInputMemoryType)(const CustomOp*, size_t index) = nullptr;
  int (*GetVariadicInputMinArity)(const CustomOp*) = nullptr;
  int (*GetVariadicInputHomogeneity)(const CustomOp*) = nullptr;
  int (*GetVariadicOutputMinArity)(const CustomOp*) = nullptr;
  int (*GetVariadicOutputHomogeneity)(const CustomOp*) = nullptr;
  OrtStatus* (*CreateKernelV2)(const CustomOp*, const void* api, const OrtKernelInfo*, void** kernel) = nullptr;
  OrtStatus* (*KernelComputeV2)(void* kernel, OrtKernelContext*) = nullptr;
  OrtStatus* (*InferOutputShapeFn)(const CustomOp*, OrtShapeInferContext*) = nullptr;
  int (*GetStartVersion)(const CustomOp*) = nullptr;
  int (*GetEndVersion)(const CustomOp*) = nullptr;
};

struct ApiBase {
  const void* (*GetApi)(uint32_t version);  // null where the runtime is older
  const char* (*GetVersionString)();
};

// The functions of one runtime, copied from its OrtApi.
struct Api {
#define TXL_MEMBER(slot, name, parameters) OrtStatus*(*name)parameters;
  TXL_ORT_FUNCTIONS(TXL_MEMBER)
  TXL_ORT_ENUMS(TXL_MEMBER)
#undef TXL_MEMBER
#define TXL_MEMBER(slot, name, parameters) void(*name) parameters;
  TXL_ORT_RELEASES(TXL_MEMBER)
#undef TXL_MEMBER

  explicit Api(const void* ort_api) {
    const auto* const slots = static_cast<void* const*>(ort_api);
#define TXL_READ(slot, name, parameters) name = reinterpret_cast<decltype(name)>(slots[slot]);
    TXL_ORT_FUNCTIONS(TXL_READ)
    TXL_ORT_ENUMS(TXL_READ)
    TXL_ORT_RELEASES(TXL_READ)
#undef TXL_READ
  }
};

}  // namespace txl::onnx
