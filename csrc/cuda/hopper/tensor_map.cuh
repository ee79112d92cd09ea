// Tensor maps: descriptions of tensors for TMA.
#pragma once
#include <cstdint>
#include <cstring>
#include <functional>
#include <map>
#include <mutex>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "prefill_problem.h"
#include "products.cuh"

namespace txl_cuda {

// All that a tensor map depends on: a tensor [n, h, rows, columns] at an address, the bytes from an entry of each axis
// to the next, innermost axis first; and boxes of so many rows of row_bytes bytes, 128 or 32, with the swizzle of that
// width.
struct MapKey {
  const void* data;
  int64_t sizes[4], steps[4];
  Type type;
  int rows;
  int64_t row_bytes;
};

inline void encode(TensorMap& map, const MapKey& x) {
  const int item = x.type == Type::f32 ? 4 : 2, columns = static_cast<int>(x.row_bytes) / item;
#ifdef __CUDACC__
  static const auto encode_tiled = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found;
    const cudaError_t error =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found);
    if (error != cudaSuccess || found != cudaDriverEntryPointSuccess) function = nullptr;
    return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function);
  }();
  if (!encode_tiled) throw std::runtime_error("CUDA: the driver has no cuTensorMapEncodeTiled");
  cuuint64_t dims[4], strides[3];
  for (int n = 0; n < 4; ++n) dims[n] = static_cast<cuuint64_t>(x.sizes[n]);
  for (int n = 0; n < 3; ++n) strides[n] = static_cast<cuuint64_t>(x.steps[n + 1]);
  const cuuint32_t box[4] = {static_cast<cuuint32_t>(columns), static_cast<cuuint32_t>(x.rows), 1, 1},
                   every[4] = {1, 1, 1, 1};
  const auto element = x.type == Type::f32    ? CU_TENSOR_MAP_DATA_TYPE_FLOAT32
                       : x.type == Type::bf16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                              : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  const CUresult result = encode_tiled(
      &map, element, 4, const_cast<void*>(x.data), dims, strides, box, every, CU_TENSOR_MAP_INTERLEAVE_NONE,
      x.row_bytes == ROW_BYTES ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_32B,
      CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS)
    throw std::runtime_error("CUDA: cuTensorMapEncodeTiled failed with error " + std::to_string(result));
#else
  count_encoding();
  map = TensorMap();
  map.data = x.data, map.item = item, map.swizzle = static_cast<int32_t>(x.row_bytes);
  for (int n = 0; n < 4; ++n) map.sizes[n] = x.sizes[n], map.steps[n] = x.steps[n], map.box[n] = 1;
  map.box[0] = columns, map.box[1] = x.rows;
#endif
}

// Returns the map of a key. Maps are kept, since the driver takes longer for one than a look-up does, and addresses
// come back: those of tables and caches at each call, those of other tensors as the allocator gives them again. The
// layers of a model share a plan, so the maps are not the plan's. A map holds an address, and no memory.
inline TensorMap find_or_encode(const MapKey& key) {
  constexpr size_t MAX_MAPS = 4096;  // about a megabyte
  struct Less {
    bool operator()(const MapKey& x, const MapKey& y) const {
      return x.data != y.data ? std::less<>()(x.data, y.data) : std::memcmp(&x, &y, sizeof x) < 0;
    }
  };
  static_assert(std::has_unique_object_representations_v<MapKey>);  // no padding
  static auto& maps = *new std::map<MapKey, TensorMap, Less>;       // threads use it until the process ends
  static std::mutex mutex;
  const std::lock_guard<std::mutex> lock(mutex);
  const auto found = maps.find(key);
  if (found != maps.end()) return found->second;
  TensorMap map;
  encode(map, key);
  if (maps.size() == MAX_MAPS) maps.clear();
  return maps.emplace(key, map).first->second;
}

// Rows are read 16 bytes at a time by TMA, 4 by threads.
inline void require_start(const View& view) {
  if (reinterpret_cast<uintptr_t>(view.data) % 16)
    throw std::invalid_argument(
        "backend='cuda' takes tensors that begin at multiples of 16 bytes in prefill and for gradients; "
        "backend='triton' takes any");
}

// Describes the rows of `view`, of so many columns, which has B batch rows (0: no such axis) and H heads, in tiles
// whose rows have row_bytes bytes. No rows: a map that is not used.
inline RowsMap map_rows(const View& view, Type type, int64_t B, int64_t H, int64_t rows, int64_t columns,
                        int row_bytes) {
  RowsMap map;
  if (!rows) return map;
  require_start(view);
  constexpr int64_t ITEM = 2;
  const bool one_axis = B == 0;  // [H, rows, D]: s0 is the head's stride, s1 the row's
  const int64_t row = one_axis ? view.s1 : view.s2, head = one_axis ? view.s0 : view.s1;
  const int64_t batch_row = one_axis ? 0 : view.s0;
  const auto is_axis = [](int64_t size, int64_t stride) { return size > 1 && stride; };
  map.h = is_axis(H, head), map.n = is_axis(B, batch_row);
  const int64_t alone = columns * ITEM;  // from an axis' only entry to the next: 16 bytes at least
  const MapKey key = {
      view.data,
      {columns, rows, map.h ? H : 1, map.n ? B : 1},
      {ITEM, rows > 1 ? row * ITEM : alone, map.h ? head * ITEM : alone, map.n ? batch_row * ITEM : alone},
      type,
      SIDE,
      row_bytes};
  map.map = find_or_encode(key);
  return map;
}
inline RowsMap map_rows(const Problem& p, const View& view, int64_t B, int64_t H, int64_t rows) {
  return map_rows(view, p.type, B, H, rows, p.D, ROW_BYTES);
}
inline RowsMap map_narrow_rows(const Problem& p, const View& view, int64_t B, int64_t rows, int64_t columns) {
  return map_rows(view, p.type, B, p.H, rows, columns, NARROW_ROW_BYTES);
}

// Describes float32 sums [tables, H, rows, D], contiguous, in boxes of `box` rows. Without data: a map that is not
// used.
inline TensorMap map_sums(const Problem& p, const float* data, int64_t tables, int64_t rows, int box) {
  if (!data) return {};
  const int64_t row = 4 * p.D;  // unused with position queries
  return find_or_encode(
      {data, {p.D, rows, p.H, tables}, {4, row, row * rows, row * rows * p.H}, Type::f32, box, ROW_BYTES});
}

}  // namespace txl_cuda
