// Bytes from here to there, by all threads of a CTA: any count, any alignment, 16 at a time where both sides allow it.
#pragma once
#include "primitives.cuh"

namespace shardlib {

constexpr int kUnroll = 8;  // 16-byte loads of a thread in flight: what a link's latency asks for

struct Range {
  int64_t begin, end;
  __device__ __forceinline__ int64_t size() const { return end - begin; }
};

__host__ __device__ __forceinline__ int64_t round_up(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }

// The longest slice of `bytes` among `ctas`; all slices but the last begin and end at multiples of 128.
__host__ __device__ __forceinline__ int64_t slice_bytes(int64_t bytes, int64_t ctas) {
  return round_up((bytes + ctas - 1) / ctas, 128);
}
// Chunk number `step` of CTA i's slice of `bytes`; may be empty. Writers and readers of a message cut it alike.
__device__ __forceinline__ Range piece_of(int64_t bytes, int64_t ctas, int64_t i, int64_t chunk, int64_t step) {
  const int64_t slice = slice_bytes(bytes, ctas);
  const int64_t last = min(bytes, (i + 1) * slice), first = i * slice + step * chunk;
  return {min(first, last), min(first + chunk, last)};
}

// Word i of 4 bytes from `from` on, which lies `past` bytes past a multiple of 4: of the two words that hold it.
__device__ __forceinline__ uint32_t load_askew(const unsigned char* from, int64_t i, unsigned past) {
  const uint32_t* words = reinterpret_cast<const uint32_t*>(from - past) + i;
  const uint64_t both = uint64_t(past == 0 ? 0 : words[1]) << 32 | words[0];
  return uint32_t(both >> 8 * past);
}

// The target is written in words of 16 bytes if the source lies alike, else in words of 4; the bytes before its first
// and after its last whole word go one by one.
__device__ __forceinline__ void copy_bytes(unsigned char* to, const unsigned char* from, int64_t bytes) {
  const bool alike = (reinterpret_cast<uintptr_t>(to) - reinterpret_cast<uintptr_t>(from)) % 16 == 0;
  const unsigned size = alike ? 16 : 4;
  const int64_t head = min(bytes, int64_t(-reinterpret_cast<uintptr_t>(to) % size));
  const int64_t count = (bytes - head) / size, tail = head + count * size, threads = blockDim.x;
  for (int64_t i = threadIdx.x; i < head; i += threads) to[i] = from[i];
  for (int64_t i = tail + threadIdx.x; i < bytes; i += threads) to[i] = from[i];
  to += head, from += head;
  int64_t i = threadIdx.x;
  if (alike) {
    for (; i + (kUnroll - 1) * threads < count; i += kUnroll * threads) {
      uint4 words[kUnroll];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) words[u] = load_16_streaming(from + (i + u * threads) * 16);
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) store_16(to + (i + u * threads) * 16, words[u]);
    }
    for (; i < count; i += threads) store_16(to + i * 16, load_16_streaming(from + i * 16));
  } else {
    const unsigned past = reinterpret_cast<uintptr_t>(from) % 4;
#pragma unroll 4
    for (; i < count; i += threads) reinterpret_cast<uint32_t*>(to)[i] = load_askew(from, i, past);
  }
}

// Word i of a message of `bytes`, by 4 bytes; what lies beyond its end counts as zeros and is not touched.
__device__ __forceinline__ uint32_t load_word(const unsigned char* from, int64_t i, int64_t bytes) {
  const unsigned char* p = from + 4 * i;
  const int64_t left = bytes - 4 * i;
  if (left >= 4 && reinterpret_cast<uintptr_t>(p) % 4 == 0) return *reinterpret_cast<const uint32_t*>(p);
  uint32_t word = 0;
  for (int b = 0; b < 4; ++b)
    if (b < left) word |= uint32_t(p[b]) << 8 * b;
  return word;
}
__device__ __forceinline__ void store_word(unsigned char* to, int64_t i, int64_t bytes, uint32_t word) {
  unsigned char* p = to + 4 * i;
  const int64_t left = bytes - 4 * i;
  if (left >= 4 && reinterpret_cast<uintptr_t>(p) % 4 == 0) {
    *reinterpret_cast<uint32_t*>(p) = word;
    return;
  }
  for (int b = 0; b < 4; ++b)
    if (b < left) p[b] = static_cast<unsigned char>(word >> 8 * b);
}

}  // namespace shardlib
