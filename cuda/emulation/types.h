// CUDA's words and vector types, as plain C++: what the kernel sources use of them and no more.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <type_traits>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__

struct dim3 {
  unsigned x = 1, y = 1, z = 1;
  constexpr dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};
struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};
struct float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

using cudaStream_t = void*;

template <class To, class From> inline To shardlib_bits(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}
inline uint32_t __float_as_uint(float x) { return shardlib_bits<uint32_t>(x); }
inline float __uint_as_float(uint32_t x) { return shardlib_bits<float>(x); }
inline float __int_as_float(int x) { return shardlib_bits<float>(x); }
inline uint32_t __umulhi(uint32_t a, uint32_t b) { return uint32_t((uint64_t(a) * b) >> 32); }
template <class A, class B> inline std::common_type_t<A, B> min(A a, B b) { return b < a ? b : a; }
template <class A, class B> inline std::common_type_t<A, B> max(A a, B b) { return a < b ? b : a; }

namespace shardlib {

// bfloat16 and binary16, as bits; arithmetic happens in float only.
struct bf16 {
  uint16_t bits;
};
struct fp16 {
  uint16_t bits;
};

inline float to_float(bf16 x) { return __uint_as_float(uint32_t(x.bits) << 16); }

namespace emulation {
extern float fp16_values[1 << 16];  // machine.cpp
}
inline float to_float(fp16 x) { return emulation::fp16_values[x.bits]; }
inline float to_float(float x) { return x; }

template <class T> T from_float(float x);

template <> inline float from_float<float>(float x) { return x; }

template <> inline bf16 from_float<bf16>(float x) {
  const uint32_t bits = __float_as_uint(x);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return {0x7fff};
  return {uint16_t((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)};  // to nearest, ties to even
}

template <> inline fp16 from_float<fp16>(float x) {
  const uint32_t bits = __float_as_uint(x), sign = (bits >> 16) & 0x8000u, magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return {0x7fff};
  if (magnitude >= 0x477ff000u) return {uint16_t(sign | 0x7c00u)};  // 65520 and above round to infinity
  if (magnitude < 0x38800000u) {  // subnormal: adding 1/2 aligns the last bit at 2^-24
    const float shifted = __uint_as_float(magnitude) + 0.5f;
    return {uint16_t(sign | (__float_as_uint(shifted) - 0x3f000000u))};
  }
  const uint32_t rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u);
  return {uint16_t(sign | ((rounded - 0x38000000u) >> 13))};
}

template <class T> inline uint32_t pack(float low, float high) {
  return uint32_t(from_float<T>(low).bits) | uint32_t(from_float<T>(high).bits) << 16;
}
template <class T> inline float2 unpack(uint32_t two) {
  return {to_float(T{uint16_t(two & 0xffff)}), to_float(T{uint16_t(two >> 16)})};
}

inline float exp2_approx(float x) { return std::exp2(x); }
inline float log2_approx(float x) { return std::log2(x); }

}  // namespace shardlib
