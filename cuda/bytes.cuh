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

__device__ __forceinline__ uint4 load(const uint4* p) { return load_16_streaming(p); }
__device__ __forceinline__ void store(uint4* p, uint4 v) { store_16(p, v); }
template <class Word> __device__ __forceinline__ Word load(const Word* p) { return *p; }
template <class Word> __device__ __forceinline__ void store(Word* p, Word v) { *p = v; }

template <class Word> __device__ __forceinline__ void copy_words(Word* to, const Word* from, int64_t count) {
  const int64_t threads = blockDim.x;
  int64_t i = threadIdx.x;
  for (; i + (kUnroll - 1) * threads < count; i += kUnroll * threads) {
    Word words[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) words[u] = load(from + i + u * threads);
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) store(to + i + u * threads, words[u]);
  }
  for (; i < count; i += threads) store(to + i, load(from + i));
}

// In words of the target's alignment; the bytes before the first and after the last whole word go one by one.
template <class Word>
__device__ __forceinline__ void copy_aligned(unsigned char* to, const unsigned char* from, int64_t bytes) {
  constexpr int64_t kSize = sizeof(Word);
  const int64_t head = min(bytes, int64_t(-reinterpret_cast<uintptr_t>(to) % kSize));
  const int64_t count = (bytes - head) / kSize, tail = head + count * kSize;
  for (int64_t i = threadIdx.x; i < head; i += blockDim.x) to[i] = from[i];
  copy_words(reinterpret_cast<Word*>(to + head), reinterpret_cast<const Word*>(from + head), count);
  for (int64_t i = tail + threadIdx.x; i < bytes; i += blockDim.x) to[i] = from[i];
}

__device__ __forceinline__ void copy_bytes(unsigned char* to, const unsigned char* from, int64_t bytes) {
  const auto apart = reinterpret_cast<uintptr_t>(to) - reinterpret_cast<uintptr_t>(from);
  if (bytes <= 0) return;
  if (apart % 16 == 0) return copy_aligned<uint4>(to, from, bytes);
  if (apart % 4 == 0) return copy_aligned<uint32_t>(to, from, bytes);
  if (apart % 2 == 0) return copy_aligned<uint16_t>(to, from, bytes);
  copy_aligned<unsigned char>(to, from, bytes);
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
