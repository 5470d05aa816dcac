// All workspaces of a group at once, through NVSwitch's multicast addresses (sm_90 and later). Never run on hardware.
//
// In the emulation there is no such address: the same calls go through the workspaces one by one.
#pragma once
#include "peers.cuh"

namespace shardlib {

#if defined(__CUDACC__)

// 16 bytes to this offset of every workspace.
__device__ __forceinline__ void multicast_store_16(const Group& g, int64_t offset, uint4 v) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("multimem.st.relaxed.sys.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(g.multicast + offset), "r"(v.x),
               "r"(v.y), "r"(v.z), "r"(v.w)
               : "memory");
#else
  __trap();
#endif
}

// The sum over all workspaces of the 16 bytes at this offset, in float32, in an order that the switch chooses.
template <class T> __device__ __forceinline__ uint4 multicast_sum_16(const Group& g, int64_t offset);

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define SHARDLIB_MULTICAST_SUM(T, TYPE)                                                                             \
  template <> __device__ __forceinline__ uint4 multicast_sum_16<T>(const Group& g, int64_t offset) {                \
    uint4 v;                                                                                                        \
    asm volatile("multimem.ld_reduce.relaxed.sys.global.add." TYPE " {%0, %1, %2, %3}, [%4];"                       \
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)                                                       \
                 : "l"(g.multicast + offset)                                                                        \
                 : "memory");                                                                                       \
    return v;                                                                                                       \
  }
#else
#define SHARDLIB_MULTICAST_SUM(T, TYPE)                                                                             \
  template <> __device__ __forceinline__ uint4 multicast_sum_16<T>(const Group&, int64_t) {                         \
    __trap();                                                                                                       \
    return {};                                                                                                      \
  }
#endif
SHARDLIB_MULTICAST_SUM(float, "v4.f32")
SHARDLIB_MULTICAST_SUM(bf16, "acc::f32.v4.bf16x2")
SHARDLIB_MULTICAST_SUM(fp16, "acc::f32.v4.f16x2")
#undef SHARDLIB_MULTICAST_SUM

#else

inline void multicast_store_16(const Group& g, int64_t offset, uint4 v) {
  for (int r = 0; r < g.ranks; ++r) store_16(g.workspace[r] + offset, v);
}

template <class T> inline uint4 multicast_sum_16(const Group& g, int64_t offset) {
  constexpr int kElements = 16 / sizeof(T);
  uint4 sums;
  for (int e = 0; e < kElements; ++e) {
    float total = 0;
    for (int r = int(g.ranks) - 1; r >= 0; --r)  // not the members' order, which nobody promises here
      total += to_float(reinterpret_cast<const T*>(g.workspace[r] + offset)[e]);
    reinterpret_cast<T*>(&sums)[e] = from_float<T>(total);
  }
  return sums;
}

#endif

}  // namespace shardlib
