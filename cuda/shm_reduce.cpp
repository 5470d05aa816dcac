#include "shm_reduce.h"

#include <cstdint>
#include <cstring>

// One library serves every machine that shares the cache, so it holds each kernel for two instruction sets.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define CLONES __attribute__((target_clones("avx2", "default")))
#else
#define CLONES
#endif
#define INLINE inline __attribute__((always_inline))

namespace shm {
namespace {

template <class To, class From>
INLINE To bits(From x) {
    static_assert(sizeof(To) == sizeof(From), "same size");
    To y;
    std::memcpy(&y, &x, sizeof y);
    return y;
}

// An element: how it is stored (T), in what it is accumulated (A), and the ways between them.
template <class U>
struct Plain {
    using T = U;
    using A = U;
    static INLINE A load(T x) { return x; }
    static INLINE T store(A x) { return x; }
};

struct BF16 {
    using T = uint16_t;
    using A = float;
    static INLINE A load(T x) { return bits<float>(static_cast<uint32_t>(x) << 16); }
    static INLINE T store(A x) {  // to nearest, ties to even
        uint32_t u = bits<uint32_t>(x);
        uint32_t rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
        return static_cast<T>((u & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded);
    }
};

struct F16 {
    using T = uint16_t;
    using A = float;
    // All in integers and exact products, so that it vectorizes without an instruction set of its own.
    static INLINE A load(T x) {
        uint32_t magnitude = static_cast<uint32_t>(x & 0x7fffu) << 13;
        float scaled = bits<float>(magnitude) * 0x1p112f;  // rebias the exponent; subnormals become normal
        uint32_t special = magnitude >= 0x0f800000u ? (magnitude | 0x7f800000u) : bits<uint32_t>(scaled);
        return bits<float>(special | static_cast<uint32_t>(x & 0x8000u) << 16);
    }
    static INLINE T store(A x) {  // to nearest, ties to even
        uint32_t u = bits<uint32_t>(x), sign = (u >> 16) & 0x8000u, m = u & 0x7fffffffu;
        uint32_t normal = (m - 0x38000000u + 0x0fffu + ((m >> 13) & 1u)) >> 13;
        // Below 2^-14 the addition itself rounds: a half's smallest step is the last bit of a float in [0.5, 1).
        uint32_t small = bits<uint32_t>(bits<float>(m) + 0.5f) - 0x3f000000u;
        uint32_t h = m < 0x38800000u ? small : normal;
        h = m >= 0x47800000u ? 0x7c00u : h;
        h = m > 0x7f800000u ? 0x7e00u : h;
        return static_cast<T>(h | sign);
    }
};

struct Sum {
    template <class A>
    static INLINE A of(A a, A b) { return static_cast<A>(a + b); }
};
struct Max {
    template <class A>
    static INLINE A of(A a, A b) { return (a > b) | (a != a) ? a : b; }
};
struct Min {
    template <class A>
    static INLINE A of(A a, A b) { return (a < b) | (a != a) ? a : b; }
};
struct Or {
    template <class A>
    static INLINE A of(A a, A b) { return a | b; }
};
struct And {
    template <class A>
    static INLINE A of(A a, A b) { return a & b; }
};

template <class E, class F>
INLINE void reduce_tiles(const char* const* from, int n, char* to, size_t count) {
    using T = typename E::T;
    using A = typename E::A;
    constexpr size_t tile = kTile / sizeof(T);
    A total[tile];
    for (size_t at = 0; at < count; at += tile) {
        const size_t some = count - at < tile ? count - at : tile;
        const T* first = reinterpret_cast<const T*>(from[0]) + at;
        const T* second = reinterpret_cast<const T*>(from[1]) + at;
        for (size_t i = 0; i < some; ++i) total[i] = F::of(E::load(first[i]), E::load(second[i]));
        for (int m = 2; m < n; ++m) {
            const T* next = reinterpret_cast<const T*>(from[m]) + at;
            for (size_t i = 0; i < some; ++i) total[i] = F::of(total[i], E::load(next[i]));
        }
        T* out = reinterpret_cast<T*>(to) + at;
        for (size_t i = 0; i < some; ++i) out[i] = E::store(total[i]);
    }
}

#define KERNEL(name, E, F) \
    CLONES void name(const char* const* from, int n, char* to, size_t count) { reduce_tiles<E, F>(from, n, to, count); }
#define KERNELS(name, E, S)      \
    KERNEL(name##_sum, E, S)     \
    KERNEL(name##_max, E, Max)   \
    KERNEL(name##_min, E, Min)

KERNELS(f32, Plain<float>, Sum)
KERNELS(f64, Plain<double>, Sum)
KERNELS(bf16, BF16, Sum)
KERNELS(f16, F16, Sum)
KERNELS(i8, Plain<int8_t>, Sum)
KERNELS(i16, Plain<int16_t>, Sum)
KERNELS(u8, Plain<uint8_t>, Sum)
KERNEL(u32_sum, Plain<uint32_t>, Sum)  // for signed ones too: they wrap around, which C++ only allows to unsigned ones
KERNEL(u64_sum, Plain<uint64_t>, Sum)
KERNEL(i32_max, Plain<int32_t>, Max)
KERNEL(i32_min, Plain<int32_t>, Min)
KERNEL(i64_max, Plain<int64_t>, Max)
KERNEL(i64_min, Plain<int64_t>, Min)
KERNEL(bool_or, Plain<uint8_t>, Or)
KERNEL(bool_and, Plain<uint8_t>, And)

using Kernel = void (*)(const char* const*, int, char*, size_t);
const Kernel kKernels[kDtypes][kKinds] = {
    {f32_sum, f32_max, f32_min},  {f64_sum, f64_max, f64_min}, {bf16_sum, bf16_max, bf16_min},
    {f16_sum, f16_max, f16_min},  {i8_sum, i8_max, i8_min},    {i16_sum, i16_max, i16_min},
    {u32_sum, i32_max, i32_min},  {u64_sum, i64_max, i64_min}, {u8_sum, u8_max, u8_min},
    {bool_or, bool_or, bool_and},
};
const size_t kSizes[kDtypes] = {4, 8, 2, 2, 1, 2, 4, 8, 1, 1};

}  // namespace

size_t element_size(int dtype) { return kSizes[dtype]; }

void reduce(int dtype, int kind, const char* const* from, int n, char* to, size_t count) {
    kKernels[dtype][kind](from, n, to, count);
}

}  // namespace shm
