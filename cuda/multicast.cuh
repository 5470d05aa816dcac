// All workspaces of a group at once, through NVSwitch's multicast addresses (sm_90 and later). Never run on hardware.
//
// A workspace then has two addresses, and only a fence between aliases orders what goes by the one and by the other:
// what is done by the multicast address is done inside by_multicast(). In the emulation there is no such address: the
// same calls go through the workspaces one by one, and it tells who forgot a fence.
#pragma once
#include "peers.cuh"

namespace shardlib {

// Does what reads or writes by the multicast address, ordered with what this thread did by others before, and, over the
// next flag, with what anybody does after.
template <class Body> __device__ __forceinline__ void by_multicast(Body body) {
  fence_alias();
  body();
  fence_alias();
}

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
  emulation::use_alias();
  for (int r = 0; r < g.ranks; ++r) store_16(g.workspace[r] + offset, v);
}

template <class T> inline uint4 multicast_sum_16(const Group& g, int64_t offset) {
  constexpr int kElements = 16 / sizeof(T);
  emulation::use_alias();
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
