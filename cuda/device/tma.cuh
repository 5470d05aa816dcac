// The tensor memory accelerator: tiles between global and shared memory, and sums of floats.
#pragma once
#include <cuda.h>

#include "host.cuh"
#include "sync.cuh"

namespace shardlib {

enum class TileType { bf16, fp16 };
using TensorMap = CUtensorMap;

// Describes a tensor of 4 dims for copies of boxes: sizes, strides (bytes; of dims 1 and up) and the box, innermost
// first. A box's rows are up to 128 bytes; they lie in shared memory with the 128-byte swizzle. Elements outside the
// tensor read as zero. The driver's function is found at run time, so that nothing links with libcuda.
inline int make_tensor_map(TensorMap& map, TileType type, const void* base, const uint64_t (&sizes)[4],
                           const uint64_t (&strides)[3], const uint32_t (&box)[4]) {
  using Encode = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*,
                              const cuuint64_t*, const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave,
                              CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);
  static Encode encode = nullptr;
  if (encode == nullptr) {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result;
    cudaError_t error =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &result);
    if (error != cudaSuccess || result != cudaDriverEntryPointSuccess)
      return fail(2, "the driver has no cuTensorMapEncodeTiled: %s", cudaGetErrorString(error));
    encode = reinterpret_cast<Encode>(found);
  }
  const cuuint32_t steps[4] = {1, 1, 1, 1};
  const CUresult code = encode(
      &map, type == TileType::bf16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 4,
      const_cast<void*>(base), reinterpret_cast<const cuuint64_t*>(sizes), reinterpret_cast<const cuuint64_t*>(strides),
      box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (code != CUDA_SUCCESS)
    return fail(2, "cuTensorMapEncodeTiled refused a tensor of inner size %llu and inner box %u (CUresult %d)",
                static_cast<unsigned long long>(sizes[0]), box[0], int(code));
  return 0;
}

__device__ __forceinline__ void tma_prefetch(const TensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// Loads the box at these coordinates (innermost first, may lie outside) and adds its bytes to the barrier's phase.
__device__ __forceinline__ void tma_load(void* to, const TensorMap* map, Barrier* barrier, int x, int y, int z, int w) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], "
      "[%2];" ::"r"(shared_address(to)),
      "l"(map), "r"(shared_address(barrier)), "r"(x), "r"(y), "r"(z), "r"(w)
      : "memory");
}

// Stores a box from shared memory; of the issuing thread's bulk group.
__device__ __forceinline__ void tma_store(const TensorMap* map, const void* from, int x, int y, int z, int w) {
  asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(map),
               "r"(shared_address(from)), "r"(x), "r"(y), "r"(z), "r"(w)
               : "memory");
}

// Adds floats from shared memory: 16-byte aligned at both ends, a multiple of 16 bytes; likewise.
__device__ __forceinline__ void bulk_reduce_add(float* to, const float* from, unsigned bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(to),
               "r"(shared_address(from)), "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// All but this thread's N latest groups have read their shared memory.
template <int N> __device__ __forceinline__ void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(N) : "memory");
}
// All but this thread's N latest groups have written global memory.
template <int N> __device__ __forceinline__ void bulk_wait() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(N) : "memory");
}

// Shows this thread's ordinary stores to shared memory to TMA and wgmma; a barrier must follow.
__device__ __forceinline__ void fence_async_shared() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

}  // namespace shardlib
