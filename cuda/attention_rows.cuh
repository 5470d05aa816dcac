// What a thread of a forward kernel does with its scores: masks, adds, softmax, dropout, packing.
//
// A thread holds two rows, r and r + 8 of its warp's 16, in the layout of wgmma and mma accumulators: scores[4 i + 2 r
// + c] is row r, column 8 i + c from the thread's first. Scores stay in registers, so every loop over them is unrolled.
#pragma once
#include "attention.cuh"

namespace shardlib {

// The softmax of a thread's rows so far. Maxima are of scores before scaling; sums are of this thread's columns.
struct RowState {
  float maximum[2], sum[2];
};

// Puts minus infinity where query and key do not see each other; (row, key) is the thread's first place.
template <int N> __device__ __forceinline__ void mask_scores(float (&scores)[N], const Sight& sight, int row, int key) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int begin = sight.begin(row + 8 * r) - key, end = sight.end(row + 8 * r) - key;
#pragma unroll
    for (int i = 0; i < N / 2; ++i) {
      const int column = i / 2 * 8 + i % 2;
      if (column < begin || column >= end) scores[i / 2 * 4 + 2 * r + i % 2] = SHARDLIB_MINUS_INFINITY;
    }
  }
}

// Makes logits in units of log 2 from products, with everything that a general kernel adds. A row beyond the last query
// sees nothing.
template <int N>
__device__ __forceinline__ void general_scores(float (&scores)[N], const Extras& extras, const RowExtras (&rows)[2],
                                               const Sight& sight, int row, int key) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int query = row + 8 * r, begin = sight.begin(query), end = query < sight.queries ? sight.end(query) : 0;
#pragma unroll
    for (int i = 0; i < N / 2; ++i) {
      const int j = key + i / 2 * 8 + i % 2;
      float& score = scores[i / 2 * 4 + 2 * r + i % 2];
      score = j >= begin && j < end ? extra_logit(extras, rows[r], score, j, query + sight.shift - j)
                                    : SHARDLIB_MINUS_INFINITY;
    }
  }
}

// Scores become probabilities relative to the rows' new maxima; returns by how much older sums and outputs shrink.
template <int N> __device__ __forceinline__ float2 softmax(float (&scores)[N], RowState& rows, float scale_log2) {
  float shrink[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float maximum = rows.maximum[r];
#pragma unroll
    for (int i = 0; i < N / 4; ++i) maximum = fmaxf(maximum, fmaxf(scores[4 * i + 2 * r], scores[4 * i + 2 * r + 1]));
    maximum = fmaxf(maximum, __shfl_xor_sync(kFullMask, maximum, 1));
    maximum = fmaxf(maximum, __shfl_xor_sync(kFullMask, maximum, 2));
    // A row that has seen nothing yet: any finite reference gives exp2(-inf) = 0.
    const float reference = maximum == SHARDLIB_MINUS_INFINITY ? 0.0f : maximum * scale_log2;
    shrink[r] = exp2_approx(rows.maximum[r] * scale_log2 - reference);
    rows.maximum[r] = maximum;
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < N / 2; ++i) {
      float& score = scores[i / 2 * 4 + 2 * r + i % 2];
      score = exp2_approx(fmaf(score, scale_log2, -reference));
      sum += score;
    }
    rows.sum[r] = fmaf(rows.sum[r], shrink[r], sum);
  }
  return make_float2(shrink[0], shrink[1]);
}

// Dropout of the probabilities. The bits come from a loop that is not unrolled: Philox is long.
template <int N>
__device__ __forceinline__ void drop(float (&scores)[N], const Extras& extras, const RowExtras (&rows)[2], int key) {
  static_assert(N <= 64, "a row's bits fill one register");
  const PhiloxKey philox_key = {uint64_t(extras.key[0]), uint64_t(extras.key[1])};
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    uint32_t keep = 0;  // bits 2 i and 2 i + 1: the pair at column 8 i
#pragma unroll 1
    for (int i = 0; i < N / 4; ++i) {
      bool first, second;
      kept_pair(extras, rows[r], philox_key, key + 8 * i, first, second);
      keep |= (uint32_t(first) | uint32_t(second) << 1) << (2 * i);
    }
#pragma unroll
    for (int i = 0; i < N / 2; ++i) {
      float& score = scores[i / 2 * 4 + 2 * r + i % 2];
      score = keep >> i & 1 ? score * extras.keep_scale : 0.0f;
    }
  }
}

// Probabilities as the fragments of a matrix operand, 16 columns each.
template <class T, int N>
__device__ __forceinline__ void pack_scores(uint32_t (&fragments)[N / 8][4], const float (&scores)[N]) {
#pragma unroll
  for (int i = 0; i < N / 2; ++i) fragments[i / 4][i % 4] = pack<T>(scores[2 * i], scores[2 * i + 1]);
}

template <int N> __device__ __forceinline__ void scale_rows(float (&o)[N], float2 by) {
#pragma unroll
  for (int i = 0; i < N; ++i) o[i] *= i & 2 ? by.y : by.x;
}

// The whole sums of the rows, from the four threads that share them; the log-sum-exp of a row that saw something.
__device__ __forceinline__ void finish_rows(RowState& rows) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    rows.sum[r] += __shfl_xor_sync(kFullMask, rows.sum[r], 1);
    rows.sum[r] += __shfl_xor_sync(kFullMask, rows.sum[r], 2);
  }
}
__device__ __forceinline__ float row_lse(const RowState& rows, int r, float scale_log2) {
  return rows.sum[r] > 0.0f ? (rows.maximum[r] * scale_log2 + log2_approx(rows.sum[r])) * kLn2
                            : SHARDLIB_MINUS_INFINITY;
}

}  // namespace shardlib
