// The attention backward for sm_90a: what happens to single scores, and how tiles of them leave the registers.
//
// Scores stand transposed, keys down and queries across, so that a warpgroup's probabilities are at once the left
// operand of dv = P^T grad_o and, as dS, of dk = dS^T q. A thread of a 64 x N tile holds, in element 4 i + 2 r + c,
// key row 16 warp + lane / 4 + 8 r and query column 8 i + 2 (lane % 4) + c.
#pragma once
#include "attention_backward.cuh"

namespace shardlib {
namespace {

// --- scores ----------------------------------------------------------------------------------------------------------

// Puts minus infinity where query and key do not see each other. `key` and `query` are this thread's first.
template <int N> __device__ __forceinline__ void hide(float (&scores)[N], const Sight& sight, int key, int query) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int j = key + 8 * r, begin = sight.first_query(j) - query,
              end = j < sight.keys ? sight.last_query(j) - query : 0;
#pragma unroll
    for (int i = 0; i < N / 4; ++i)
#pragma unroll
      for (int c = 0; c < 2; ++c)
        if (8 * i + c < begin || 8 * i + c >= end) scores[4 * i + 2 * r + c] = SHARDLIB_MINUS_INFINITY;
  }
}

// Makes logits in units of log 2 from products, with everything that a general kernel adds.
template <int N>
__device__ __forceinline__ void general_logits(float (&scores)[N], const Params& p, int batch, int head, int key,
                                               int query) {
#pragma unroll
  for (int i = 0; i < N / 4; ++i)
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const int row = query + 8 * i + c, begin = p.sight.begin(row), end = row < p.sight.queries ? p.sight.end(row) : 0;
      const RowExtras extras = row_extras(p.extras, batch, head, row);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int j = key + 8 * r;
        float& score = scores[4 * i + 2 * r + c];
        score = j >= begin && j < end ? extra_logit(p.extras, extras, score, j, row + p.sight.shift - j)
                                      : SHARDLIB_MINUS_INFINITY;
      }
    }
}

// Which of a thread's probabilities dropout keeps: a bit each. Four neighboring keys share one Philox block, and four
// lanes hold them: where the blocks begin with the tile, each lane draws for one of four queries, and they swap.
template <int N>
__device__ __forceinline__ uint32_t kept_bits(const Extras& e, int batch, int head, int key, int query) {
  static_assert(N <= 32);
  const PhiloxKey philox_key = {uint64_t(e.key[0]), uint64_t(e.key[1])};
  const int mine = int(lane_index()) / 4 % 4;
  const bool odd = mine & 1, high = mine & 2;
  uint32_t bits = 0;
  if (e.k_offset % 4 == 0) {
#pragma unroll 1
    for (int i = 0; i < N / 4; i += 2)
#pragma unroll 1
      for (int r = 0; r < 2; ++r) {
        const RowExtras row = row_extras(e, batch, head, query + 8 * (i + mine / 2) + mine % 2);
        uint4 w = philox(philox_key, uint64_t(row.dropout_row + ((e.k_offset + key + 8 * r) >> 2)));
        // A 4 x 4 transpose: word `mine` of the lanes 0 to 3.
        const uint32_t a = __shfl_xor_sync(kFullMask, odd ? w.x : w.y, 4),
                       b = __shfl_xor_sync(kFullMask, odd ? w.z : w.w, 4);
        w = odd ? make_uint4(a, w.y, b, w.w) : make_uint4(w.x, a, w.z, b);
        const uint32_t c = __shfl_xor_sync(kFullMask, high ? w.x : w.z, 8),
                       d = __shfl_xor_sync(kFullMask, high ? w.y : w.w, 8);
        w = high ? make_uint4(c, d, w.z, w.w) : make_uint4(w.x, w.y, c, d);
        bits |= uint32_t(w.x >= e.threshold) << (4 * i + 2 * r) | uint32_t(w.y >= e.threshold) << (4 * i + 2 * r + 1) |
                uint32_t(w.z >= e.threshold) << (4 * i + 2 * r + 4) |
                uint32_t(w.w >= e.threshold) << (4 * i + 2 * r + 5);
      }
  } else {
#pragma unroll 1
    for (int i = 0; i < N; ++i) {
      const RowExtras row = row_extras(e, batch, head, query + i / 4 * 8 + i % 2);
      bits |= uint32_t(kept(e, row, philox_key, key + i / 2 % 2 * 8)) << i;
    }
  }
  return bits;
}

// Makes probabilities of logits. `lse` is that of this thread's first query, in shared memory and in units of log 2.
template <int N> __device__ __forceinline__ void exponentiate(float (&scores)[N], const float* lse, float scale_log2) {
#pragma unroll
  for (int i = 0; i < N / 4; ++i) {
    const float2 two = *reinterpret_cast<const float2*>(lse + 8 * i);
#pragma unroll
    for (int e = 0; e < 4; ++e)
      scores[4 * i + e] = exp2_approx(fmaf(scores[4 * i + e], scale_log2, -(e % 2 ? two.y : two.x)));
  }
}

template <int N>
__device__ __forceinline__ void drop(float (&out)[N], const float (&in)[N], uint32_t kept, float keep_scale) {
#pragma unroll
  for (int i = 0; i < N; ++i) out[i] = kept >> i & 1 ? in[i] * keep_scale : 0.0f;
}

// Makes dS of dP. `delta` is that of this thread's first query, in shared memory.
template <int N>
__device__ __forceinline__ void differentiate(float (&dp)[N], const float (&probabilities)[N], const float* delta) {
#pragma unroll
  for (int i = 0; i < N / 4; ++i) {
    const float2 two = *reinterpret_cast<const float2*>(delta + 8 * i);
#pragma unroll
    for (int e = 0; e < 4; ++e) dp[4 * i + e] = probabilities[4 * i + e] * (dp[4 * i + e] - (e % 2 ? two.y : two.x));
  }
}

// Adds dS to the gradient of the bias; what the bias repeats along the queries is first summed here.
template <int N>
__device__ __forceinline__ void add_bias_gradient(const float (&ds)[N], const Params& p, int batch, int head, int key,
                                                  int query) {
  const int64_t* strides = p.dbias_strides;
  float* base = p.dbias + batch * strides[0] + head * strides[1];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int j = key + 8 * r;
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < N / 4; ++i)
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const int row = query + 8 * i + c;
        const float value = ds[4 * i + 2 * r + c];
        sum += value;
        if (strides[2] != 0 && row < p.sight.queries && j < p.sight.keys)
          atomicAdd(base + row * strides[2] + j * strides[3], value);
      }
    sum += __shfl_xor_sync(kFullMask, sum, 1);
    sum += __shfl_xor_sync(kFullMask, sum, 2);
    if (strides[2] == 0 && lane_index() % 4 == 0 && j < p.sight.keys) atomicAdd(base + j * strides[3], sum);
  }
}

// --- tiles -----------------------------------------------------------------------------------------------------------

// A tile in registers as the left operands of wgmma, 16 columns each, and as stmatrix stores them.
template <class T, int N>
__device__ __forceinline__ void pack_tile(uint32_t (&words)[N / 8][4], const float (&tile)[N]) {
#pragma unroll
  for (int i = 0; i < N / 2; ++i) words[i / 4][i % 4] = pack<T>(tile[2 * i], tile[2 * i + 1]);
}

// Stores a warpgroup's 64 rows into panels, from column 8 * `chunk` on. `rows` is the first row in the first panel.
template <int S>
__device__ __forceinline__ void store_tile(unsigned char* rows, int panel_bytes, int chunk,
                                           const uint32_t (&words)[S][4]) {
  // Lane i gives the address of row i % 8 of matrix i / 8: rows 0-7 and 8-15 of 8 columns, then of the next 8.
  const int lane = int(lane_index()), matrix = lane / 8,
            row = int(threadIdx.x) % 128 / 32 * 16 + matrix % 2 * 8 + lane % 8;
#pragma unroll
  for (int i = 0; i < S; ++i) {
    const int at = chunk + 2 * i + matrix / 2;
    stmatrix_x4(rows + at / 8 * panel_bytes + row * 128 + ((at % 8 ^ row % 8) * 16), words[i]);
  }
}

}  // namespace
}  // namespace shardlib
