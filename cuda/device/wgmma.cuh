// wgmma: 64 x N x 16 products of a warpgroup, float += bf16 x bf16 or fp16 x fp16.
#pragma once
#include <type_traits>

#include "tma.cuh"

namespace shardlib {

enum class Major { k, mn };

// A tile in shared memory as wgmma reads it, with the 128-byte swizzle. Offsets in bytes. K-major: `stride` is from 8
// rows to the next 8, `leading` says nothing. MN-major: `leading` is from 64 elements of MN to the next 64, `stride`
// from 8 of k to the next 8.
__device__ __forceinline__ uint64_t wgmma_descriptor(const void* tile, unsigned leading, unsigned stride) {
  constexpr uint64_t kSwizzle128 = uint64_t(1) << 62;
  return static_cast<uint64_t>((shared_address(tile) & 0x3ffff) >> 4) |
         static_cast<uint64_t>((leading & 0x3ffff) >> 4) << 16 | static_cast<uint64_t>((stride & 0x3ffff) >> 4) << 32 |
         kSwizzle128;
}

// Before the first product of a group, and after registers that it uses were written and pinned.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// All but the N latest groups are complete: their accumulators may be read, their operands overwritten.
template <int N> __device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}
// Pins registers: no write to them is moved behind it, and no read before it. Accumulators and left operands are pinned
// before the fence, accumulators also behind the wait.
template <int R> __device__ __forceinline__ void wgmma_pin(float (&d)[R]) {
#pragma unroll
  for (int i = 0; i < R; ++i) asm volatile("" : "+f"(d[i])::"memory");
}
template <int S> __device__ __forceinline__ void wgmma_pin(uint32_t (&a)[S][4]) {
#pragma unroll
  for (int i = 0; i < 4 * S; ++i) asm volatile("" : "+r"(a[i / 4][i % 4])::"memory");
}

// --- one instruction a width -----------------------------------------------------------------------------------------

// An instruction's text names its accumulators, R = N / 2 registers, as operands %0 to %(R - 1); its other operands are
// numbered on from R. The lists of accumulators, as text and as operands, by their number:
// clang-format off
#define SHARDLIB_TEXT_8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define SHARDLIB_TEXT_16 SHARDLIB_TEXT_8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define SHARDLIB_TEXT_24 SHARDLIB_TEXT_16 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define SHARDLIB_TEXT_32 SHARDLIB_TEXT_24 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define SHARDLIB_TEXT_40 SHARDLIB_TEXT_32 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define SHARDLIB_TEXT_48 SHARDLIB_TEXT_40 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define SHARDLIB_TEXT_56 SHARDLIB_TEXT_48 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define SHARDLIB_TEXT_64 SHARDLIB_TEXT_56 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define SHARDLIB_TEXT_72 SHARDLIB_TEXT_64 ", %64, %65, %66, %67, %68, %69, %70, %71"
#define SHARDLIB_TEXT_80 SHARDLIB_TEXT_72 ", %72, %73, %74, %75, %76, %77, %78, %79"
#define SHARDLIB_TEXT_88 SHARDLIB_TEXT_80 ", %80, %81, %82, %83, %84, %85, %86, %87"
#define SHARDLIB_TEXT_96 SHARDLIB_TEXT_88 ", %88, %89, %90, %91, %92, %93, %94, %95"
#define SHARDLIB_TEXT_104 SHARDLIB_TEXT_96 ", %96, %97, %98, %99, %100, %101, %102, %103"
#define SHARDLIB_TEXT_112 SHARDLIB_TEXT_104 ", %104, %105, %106, %107, %108, %109, %110, %111"
#define SHARDLIB_TEXT_120 SHARDLIB_TEXT_112 ", %112, %113, %114, %115, %116, %117, %118, %119"
#define SHARDLIB_TEXT_128 SHARDLIB_TEXT_120 ", %120, %121, %122, %123, %124, %125, %126, %127"
#define SHARDLIB_EIGHT(i) \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), \
  "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define SHARDLIB_OUT_8 SHARDLIB_EIGHT(0)
#define SHARDLIB_OUT_16 SHARDLIB_OUT_8, SHARDLIB_EIGHT(8)
#define SHARDLIB_OUT_24 SHARDLIB_OUT_16, SHARDLIB_EIGHT(16)
#define SHARDLIB_OUT_32 SHARDLIB_OUT_24, SHARDLIB_EIGHT(24)
#define SHARDLIB_OUT_40 SHARDLIB_OUT_32, SHARDLIB_EIGHT(32)
#define SHARDLIB_OUT_48 SHARDLIB_OUT_40, SHARDLIB_EIGHT(40)
#define SHARDLIB_OUT_56 SHARDLIB_OUT_48, SHARDLIB_EIGHT(48)
#define SHARDLIB_OUT_64 SHARDLIB_OUT_56, SHARDLIB_EIGHT(56)
#define SHARDLIB_OUT_72 SHARDLIB_OUT_64, SHARDLIB_EIGHT(64)
#define SHARDLIB_OUT_80 SHARDLIB_OUT_72, SHARDLIB_EIGHT(72)
#define SHARDLIB_OUT_88 SHARDLIB_OUT_80, SHARDLIB_EIGHT(80)
#define SHARDLIB_OUT_96 SHARDLIB_OUT_88, SHARDLIB_EIGHT(88)
#define SHARDLIB_OUT_104 SHARDLIB_OUT_96, SHARDLIB_EIGHT(96)
#define SHARDLIB_OUT_112 SHARDLIB_OUT_104, SHARDLIB_EIGHT(104)
#define SHARDLIB_OUT_120 SHARDLIB_OUT_112, SHARDLIB_EIGHT(112)
#define SHARDLIB_OUT_128 SHARDLIB_OUT_120, SHARDLIB_EIGHT(120)
// clang-format on

// {predicate; d = a b + (accumulate ? d : 0)}: `A` and `B` are texts of the operands, `LIES` of how they lie.
#define SHARDLIB_WGMMA_TEXT(N, R, TYPE, A, B, ACCUMULATE, LIES)                                                    \
  "{\n.reg .pred p;\nsetp.ne.b32 p, " ACCUMULATE ", 0;\nwgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE \
  " {" SHARDLIB_TEXT_##R "}, " A ", " B ", p, 1, 1, " LIES ";\n}"

template <int N> struct Wgmma;  // the widths of the kernels, and of those that the GPU session tries, are below

// The width N; the numbers of the operands behind its R accumulators are R and I1 to I6.
#define SHARDLIB_WGMMA(N, R, I1, I2, I3, I4, I5, I6)                                                                \
  template <> struct Wgmma<N> {                                                                                     \
    template <class T, Major A, Major B>                                                                            \
    static __device__ __forceinline__ void shared(float (&d)[N / 2], uint64_t a, uint64_t b, bool accumulate) {     \
      if constexpr (std::is_same_v<T, bf16>)                                                                        \
        SHARDLIB_WGMMA_SHARED(N, R, "bf16", I1, I2, I3, I4);                                                        \
      else                                                                                                          \
        SHARDLIB_WGMMA_SHARED(N, R, "f16", I1, I2, I3, I4);                                                         \
    }                                                                                                               \
    template <class T, Major B>                                                                                     \
    static __device__ __forceinline__ void registers(float (&d)[N / 2], const uint32_t (&a)[4], uint64_t b,         \
                                                     bool accumulate) {                                             \
      if constexpr (std::is_same_v<T, bf16>)                                                                        \
        SHARDLIB_WGMMA_REGISTERS(N, R, "bf16", I1, I2, I3, I4, I5, I6);                                             \
      else                                                                                                          \
        SHARDLIB_WGMMA_REGISTERS(N, R, "f16", I1, I2, I3, I4, I5, I6);                                              \
    }                                                                                                               \
  };
#define SHARDLIB_WGMMA_SHARED(N, R, TYPE, I1, I2, I3, I4)                                     \
  asm volatile(SHARDLIB_WGMMA_TEXT(N, R, TYPE, "%" #R, "%" #I1, "%" #I2, "%" #I3 ", %" #I4)   \
               : SHARDLIB_OUT_##R                                                             \
               : "l"(a), "l"(b), "r"(int(accumulate)), "n"(A == Major::mn), "n"(B == Major::mn))
#define SHARDLIB_WGMMA_REGISTERS(N, R, TYPE, I1, I2, I3, I4, I5, I6)                                                  \
  asm volatile(                                                                                                       \
      SHARDLIB_WGMMA_TEXT(N, R, TYPE, "{%" #R ", %" #I1 ", %" #I2 ", %" #I3 "}", "%" #I4, "%" #I5, "%" #I6)           \
      : SHARDLIB_OUT_##R                                                                                              \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(int(accumulate)), "n"(B == Major::mn))

SHARDLIB_WGMMA(32, 16, 17, 18, 19, 20, 21, 22)
SHARDLIB_WGMMA(48, 24, 25, 26, 27, 28, 29, 30)
SHARDLIB_WGMMA(64, 32, 33, 34, 35, 36, 37, 38)
SHARDLIB_WGMMA(80, 40, 41, 42, 43, 44, 45, 46)
SHARDLIB_WGMMA(96, 48, 49, 50, 51, 52, 53, 54)
SHARDLIB_WGMMA(128, 64, 65, 66, 67, 68, 69, 70)
SHARDLIB_WGMMA(144, 72, 73, 74, 75, 76, 77, 78)
SHARDLIB_WGMMA(176, 88, 89, 90, 91, 92, 93, 94)
SHARDLIB_WGMMA(256, 128, 129, 130, 131, 132, 133, 134)
#undef SHARDLIB_WGMMA
#undef SHARDLIB_WGMMA_SHARED
#undef SHARDLIB_WGMMA_REGISTERS
#undef SHARDLIB_WGMMA_TEXT

// --- what kernels call -----------------------------------------------------------------------------------------------

// d = a b + (accumulate ? d : 0), both operands in shared memory; Major says which of their dims is contiguous.
template <class T, int N, Major A = Major::k, Major B = Major::k>
__device__ __forceinline__ void wgmma(float (&d)[N / 2], uint64_t a, uint64_t b, bool accumulate) {
  Wgmma<N>::template shared<T, A, B>(d, a, b, accumulate);
}
// The same with a in registers, in the fragments of mma_16816: thread t holds rows t / 4 and t / 4 + 8 of its warp.
template <class T, int N, Major B = Major::k>
__device__ __forceinline__ void wgmma(float (&d)[N / 2], const uint32_t (&a)[4], uint64_t b, bool accumulate) {
  Wgmma<N>::template registers<T, B>(d, a, b, accumulate);
}

}  // namespace shardlib
