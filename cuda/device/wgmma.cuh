// wgmma: 64 x N x 16 products of a warpgroup, float += bf16 x bf16 or fp16 x fp16.
#pragma once
#include <type_traits>

#include "tma.cuh"

namespace shardlib {

enum class Major { k, mn };

// A tile in shared memory as wgmma reads it. Offsets in bytes. K-major: `stride` is from 8 rows to the next 8,
// `leading` counts without swizzle only. MN-major with swizzle: `leading` is from one swizzle width to the next along
// MN, `stride` from 8 of k to the next 8.
__device__ __forceinline__ uint64_t wgmma_descriptor(const void* tile, unsigned leading, unsigned stride,
                                                     Swizzle swizzle = Swizzle::b128) {
  const uint64_t layout = swizzle == Swizzle::b128 ? 1 : swizzle == Swizzle::b64 ? 2 : swizzle == Swizzle::b32 ? 3 : 0;
  return static_cast<uint64_t>((shared_address(tile) & 0x3ffff) >> 4) |
         static_cast<uint64_t>((leading & 0x3ffff) >> 4) << 16 | static_cast<uint64_t>((stride & 0x3ffff) >> 4) << 32 |
         layout << 62;
}

// Before the first product of a group, and after registers that it uses were written.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// All but the N latest groups are complete: their accumulators may be read, their operands overwritten.
template <int N> __device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}
// Keeps the compiler from moving accumulators across a fence or a wait.
template <int R> __device__ __forceinline__ void wgmma_keep(float (&d)[R]) {
#pragma unroll
  for (int i = 0; i < R; ++i) asm volatile("" : "+f"(d[i])::"memory");
}
template <int R> __device__ __forceinline__ void wgmma_keep(uint32_t (&a)[R]) {
#pragma unroll
  for (int i = 0; i < R; ++i) asm volatile("" : "+r"(a[i])::"memory");
}

// Eight accumulator registers as text and as operands; W<N> puts N / 16 of them together.
#define SHARDLIB_T0 "%0, %1, %2, %3, %4, %5, %6, %7"
#define SHARDLIB_T1 "%8, %9, %10, %11, %12, %13, %14, %15"
#define SHARDLIB_T2 "%16, %17, %18, %19, %20, %21, %22, %23"
#define SHARDLIB_T3 "%24, %25, %26, %27, %28, %29, %30, %31"
#define SHARDLIB_T4 "%32, %33, %34, %35, %36, %37, %38, %39"
#define SHARDLIB_T5 "%40, %41, %42, %43, %44, %45, %46, %47"
#define SHARDLIB_T6 "%48, %49, %50, %51, %52, %53, %54, %55"
#define SHARDLIB_T7 "%56, %57, %58, %59, %60, %61, %62, %63"
#define SHARDLIB_T8 "%64, %65, %66, %67, %68, %69, %70, %71"
#define SHARDLIB_T9 "%72, %73, %74, %75, %76, %77, %78, %79"
#define SHARDLIB_T10 "%80, %81, %82, %83, %84, %85, %86, %87"
#define SHARDLIB_T11 "%88, %89, %90, %91, %92, %93, %94, %95"
#define SHARDLIB_T12 "%96, %97, %98, %99, %100, %101, %102, %103"
#define SHARDLIB_T13 "%104, %105, %106, %107, %108, %109, %110, %111"
#define SHARDLIB_T14 "%112, %113, %114, %115, %116, %117, %118, %119"
#define SHARDLIB_T15 "%120, %121, %122, %123, %124, %125, %126, %127"
#define SHARDLIB_R(i)                                                                                         \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), \
      "+f"(d[i + 7])

// One width: the text of its accumulators, their operands, and the numbers of the seven operands after them.
#define SHARDLIB_WGMMA_TEXT(N, TYPE, REGISTERS, OPERANDS, SCALE, TAIL)                                           \
  "{\n.reg .pred p;\nsetp.ne.b32 p, " SCALE                                                                      \
  ", 0;\n"                                                                                                       \
  "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE "." TYPE " {" REGISTERS "}, " OPERANDS ", p, 1, 1" TAIL \
  ";\n}"
#define SHARDLIB_WGMMA_SHARED(N, TYPE, REGISTERS, OUT, I0, I1, I2, I3, I4)              \
  asm volatile(SHARDLIB_WGMMA_TEXT(N, TYPE, REGISTERS, I0 ", " I1, I2, ", " I3 ", " I4) \
               : OUT                                                                    \
               : "l"(a), "l"(b), "r"(int(accumulate)), "n"(A == Major::mn), "n"(B == Major::mn))
#define SHARDLIB_WGMMA_REGISTERS(N, TYPE, REGISTERS, OUT, I0, I1, I2, I3, I4, I5, I6)                        \
  asm volatile(SHARDLIB_WGMMA_TEXT(N, TYPE, REGISTERS, "{" I0 ", " I1 ", " I2 ", " I3 "}, " I4, I5, ", " I6) \
               : OUT                                                                                         \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(int(accumulate)), "n"(B == Major::mn))

template <int N> struct Wgmma;  // the widths that the kernels use are below

#define SHARDLIB_WGMMA(N, REGISTERS, OUT, I0, I1, I2, I3, I4, I5, I6)                                           \
  template <> struct Wgmma<N> {                                                                                 \
    template <class T, Major A, Major B>                                                                        \
    static __device__ __forceinline__ void shared(float (&d)[N / 2], uint64_t a, uint64_t b, bool accumulate) { \
      if constexpr (std::is_same_v<T, bf16>)                                                                    \
        SHARDLIB_WGMMA_SHARED(N, "bf16", REGISTERS, SHARDLIB_ESC OUT, I0, I1, I2, I3, I4);                      \
      else                                                                                                      \
        SHARDLIB_WGMMA_SHARED(N, "f16", REGISTERS, SHARDLIB_ESC OUT, I0, I1, I2, I3, I4);                       \
    }                                                                                                           \
    template <class T, Major B>                                                                                 \
    static __device__ __forceinline__ void registers(float (&d)[N / 2], const uint32_t (&a)[4], uint64_t b,     \
                                                     bool accumulate) {                                         \
      if constexpr (std::is_same_v<T, bf16>)                                                                    \
        SHARDLIB_WGMMA_REGISTERS(N, "bf16", REGISTERS, SHARDLIB_ESC OUT, I0, I1, I2, I3, I4, I5, I6);           \
      else                                                                                                      \
        SHARDLIB_WGMMA_REGISTERS(N, "f16", REGISTERS, SHARDLIB_ESC OUT, I0, I1, I2, I3, I4, I5, I6);            \
    }                                                                                                           \
  };
#define SHARDLIB_ESC(...) __VA_ARGS__

// clang-format off
SHARDLIB_WGMMA(16, SHARDLIB_T0, (SHARDLIB_R(0)), "%8", "%9", "%10", "%11", "%12", "%13", "%14")
SHARDLIB_WGMMA(32, SHARDLIB_T0 ", " SHARDLIB_T1, (SHARDLIB_R(0), SHARDLIB_R(8)), "%16", "%17", "%18", "%19", "%20",
               "%21", "%22")
SHARDLIB_WGMMA(48, SHARDLIB_T0 ", " SHARDLIB_T1 ", " SHARDLIB_T2, (SHARDLIB_R(0), SHARDLIB_R(8), SHARDLIB_R(16)),
               "%24", "%25", "%26", "%27", "%28", "%29", "%30")
SHARDLIB_WGMMA(64, SHARDLIB_T0 ", " SHARDLIB_T1 ", " SHARDLIB_T2 ", " SHARDLIB_T3, (SHARDLIB_R(0), SHARDLIB_R(8),
               SHARDLIB_R(16), SHARDLIB_R(24)), "%32", "%33", "%34", "%35", "%36", "%37", "%38")
SHARDLIB_WGMMA(80, SHARDLIB_T0 ", " SHARDLIB_T1 ", " SHARDLIB_T2 ", " SHARDLIB_T3 ", " SHARDLIB_T4, (SHARDLIB_R(0),
               SHARDLIB_R(8), SHARDLIB_R(16), SHARDLIB_R(24), SHARDLIB_R(32)), "%40", "%41", "%42", "%43", "%44",
               "%45", "%46")
SHARDLIB_WGMMA(96, SHARDLIB_T0 ", " SHARDLIB_T1 ", " SHARDLIB_T2 ", " SHARDLIB_T3 ", " SHARDLIB_T4 ", " SHARDLIB_T5,
               (SHARDLIB_R(0), SHARDLIB_R(8), SHARDLIB_R(16), SHARDLIB_R(24), SHARDLIB_R(32), SHARDLIB_R(40)), "%48",
               "%49", "%50", "%51", "%52", "%53", "%54")
SHARDLIB_WGMMA(112, SHARDLIB_T0 ", " SHARDLIB_T1 ", " SHARDLIB_T2 ", " SHARDLIB_T3 ", " SHARDLIB_T4 ", " SHARDLIB_T5
               ", " SHARDLIB_T6, (SHARDLIB_R(0), SHARDLIB_R(8), SHARDLIB_R(16), SHARDLIB_R(24), SHARDLIB_R(32),
               SHARDLIB_R(40), SHARDLIB_R(48)), "%56", "%57", "%58", "%59", "%60", "%61", "%62")
SHARDLIB_WGMMA(128, SHARDLIB_T0 ", " SHARDLIB_T1 ", " SHARDLIB_T2 ", " SHARDLIB_T3 ", " SHARDLIB_T4 ", " SHARDLIB_T5
               ", " SHARDLIB_T6 ", " SHARDLIB_T7, (SHARDLIB_R(0), SHARDLIB_R(8), SHARDLIB_R(16), SHARDLIB_R(24),
               SHARDLIB_R(32), SHARDLIB_R(40), SHARDLIB_R(48), SHARDLIB_R(56)), "%64", "%65", "%66", "%67", "%68",
               "%69", "%70")
SHARDLIB_WGMMA(144, SHARDLIB_T0 ", " SHARDLIB_T1 ", " SHARDLIB_T2 ", " SHARDLIB_T3 ", " SHARDLIB_T4 ", " SHARDLIB_T5
               ", " SHARDLIB_T6 ", " SHARDLIB_T7 ", " SHARDLIB_T8, (SHARDLIB_R(0), SHARDLIB_R(8), SHARDLIB_R(16),
               SHARDLIB_R(24), SHARDLIB_R(32), SHARDLIB_R(40), SHARDLIB_R(48), SHARDLIB_R(56), SHARDLIB_R(64)), "%72",
               "%73", "%74", "%75", "%76", "%77", "%78")
SHARDLIB_WGMMA(160, SHARDLIB_T0 ", " SHARDLIB_T1 ", " SHARDLIB_T2 ", " SHARDLIB_T3 ", " SHARDLIB_T4 ", " SHARDLIB_T5
               ", " SHARDLIB_T6 ", " SHARDLIB_T7 ", " SHARDLIB_T8 ", " SHARDLIB_T9, (SHARDLIB_R(0), SHARDLIB_R(8),
               SHARDLIB_R(16), SHARDLIB_R(24), SHARDLIB_R(32), SHARDLIB_R(40), SHARDLIB_R(48), SHARDLIB_R(56),
               SHARDLIB_R(64), SHARDLIB_R(72)), "%80", "%81", "%82", "%83", "%84", "%85", "%86")
SHARDLIB_WGMMA(176, SHARDLIB_T0 ", " SHARDLIB_T1 ", " SHARDLIB_T2 ", " SHARDLIB_T3 ", " SHARDLIB_T4 ", " SHARDLIB_T5
               ", " SHARDLIB_T6 ", " SHARDLIB_T7 ", " SHARDLIB_T8 ", " SHARDLIB_T9 ", " SHARDLIB_T10, (SHARDLIB_R(0),
               SHARDLIB_R(8), SHARDLIB_R(16), SHARDLIB_R(24), SHARDLIB_R(32), SHARDLIB_R(40), SHARDLIB_R(48),
               SHARDLIB_R(56), SHARDLIB_R(64), SHARDLIB_R(72), SHARDLIB_R(80)), "%88", "%89", "%90", "%91", "%92",
               "%93", "%94")
SHARDLIB_WGMMA(192, SHARDLIB_T0 ", " SHARDLIB_T1 ", " SHARDLIB_T2 ", " SHARDLIB_T3 ", " SHARDLIB_T4 ", " SHARDLIB_T5
               ", " SHARDLIB_T6 ", " SHARDLIB_T7 ", " SHARDLIB_T8 ", " SHARDLIB_T9 ", " SHARDLIB_T10 ", "
               SHARDLIB_T11, (SHARDLIB_R(0), SHARDLIB_R(8), SHARDLIB_R(16), SHARDLIB_R(24), SHARDLIB_R(32),
               SHARDLIB_R(40), SHARDLIB_R(48), SHARDLIB_R(56), SHARDLIB_R(64), SHARDLIB_R(72), SHARDLIB_R(80),
               SHARDLIB_R(88)), "%96", "%97", "%98", "%99", "%100", "%101", "%102")
SHARDLIB_WGMMA(224, SHARDLIB_T0 ", " SHARDLIB_T1 ", " SHARDLIB_T2 ", " SHARDLIB_T3 ", " SHARDLIB_T4 ", " SHARDLIB_T5
               ", " SHARDLIB_T6 ", " SHARDLIB_T7 ", " SHARDLIB_T8 ", " SHARDLIB_T9 ", " SHARDLIB_T10 ", " SHARDLIB_T11
               ", " SHARDLIB_T12 ", " SHARDLIB_T13, (SHARDLIB_R(0), SHARDLIB_R(8), SHARDLIB_R(16), SHARDLIB_R(24),
               SHARDLIB_R(32), SHARDLIB_R(40), SHARDLIB_R(48), SHARDLIB_R(56), SHARDLIB_R(64), SHARDLIB_R(72),
               SHARDLIB_R(80), SHARDLIB_R(88), SHARDLIB_R(96), SHARDLIB_R(104)), "%112", "%113", "%114", "%115",
               "%116", "%117", "%118")
SHARDLIB_WGMMA(256, SHARDLIB_T0 ", " SHARDLIB_T1 ", " SHARDLIB_T2 ", " SHARDLIB_T3 ", " SHARDLIB_T4 ", " SHARDLIB_T5
               ", " SHARDLIB_T6 ", " SHARDLIB_T7 ", " SHARDLIB_T8 ", " SHARDLIB_T9 ", " SHARDLIB_T10 ", " SHARDLIB_T11
               ", " SHARDLIB_T12 ", " SHARDLIB_T13 ", " SHARDLIB_T14 ", " SHARDLIB_T15, (SHARDLIB_R(0), SHARDLIB_R(8),
               SHARDLIB_R(16), SHARDLIB_R(24), SHARDLIB_R(32), SHARDLIB_R(40), SHARDLIB_R(48), SHARDLIB_R(56),
               SHARDLIB_R(64), SHARDLIB_R(72), SHARDLIB_R(80), SHARDLIB_R(88), SHARDLIB_R(96), SHARDLIB_R(104),
               SHARDLIB_R(112), SHARDLIB_R(120)), "%128", "%129", "%130", "%131", "%132", "%133", "%134")

// clang-format on
#undef SHARDLIB_WGMMA

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
