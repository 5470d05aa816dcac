// What all attention kernels share: their arguments, which keys a query sees, what is added to a logit, dropout.
//
// Shapes: q, o [B, H, S, D]; k, v [B, KV, T, D]; lse [B, H, S]; query head h reads key head h / (H / KV).
// Positions: query i and key j see each other by i + shift - j, with shift = q_offset - k_offset.
#pragma once
#include <cmath>

#include "attention_args.h"
#include "philox.cuh"
#include "primitives.cuh"

namespace shardlib {

constexpr float kLog2E = 1.4426950408889634f, kLn2 = 0.6931471805599453f;
#define SHARDLIB_MINUS_INFINITY (-__int_as_float(0x7f800000))

// Which keys a query sees by position alone.
struct Sight {
  int queries, keys, shift, window;  // window 0: none
  bool causal;

  // Query i sees the keys [begin(i), end(i)).
  __host__ __device__ __forceinline__ int begin(int i) const {
    const int first = window > 0 ? i + shift - window + 1 : 0;
    return first > 0 ? first : 0;
  }
  __host__ __device__ __forceinline__ int end(int i) const {
    int last = keys;
    if (causal)
      last = i + shift + 1;
    else if (window > 0)
      last = i + shift + window;
    last = last < keys ? last : keys;
    return last > 0 ? last : 0;
  }
  // Key j is seen by the queries [first_query(j), last_query(j)).
  __host__ __device__ __forceinline__ int first_query(int j) const {
    int first = 0;
    if (causal)
      first = j - shift;
    else if (window > 0)
      first = j - shift - window + 1;
    return first > 0 ? first : 0;
  }
  __host__ __device__ __forceinline__ int last_query(int j) const {
    int last = queries;
    if (window > 0) last = j - shift + window;
    last = last < queries ? last : queries;
    return last > 0 ? last : 0;
  }
  // Whether each of the queries [i, i + rows) sees each of the keys [j, j + columns).
  __host__ __device__ __forceinline__ bool whole(int i, int rows, int j, int columns) const {
    return j >= begin(i + rows - 1) && j + columns <= end(i);
  }
};

// What a "general" kernel adds to a logit, and dropout. Logits are in units of log 2: exp2 gives the probability.
struct Extras {
  const uint8_t* mask;
  const void* bias;
  const float* alibi;
  const int64_t* key;
  int64_t mask_strides[4], bias_strides[4];
  int64_t first_row;                          // the dropout row of batch 0, head 0, query 0 of this part
  int64_t batch_rows, head_rows, row_blocks;  // dropout rows per batch and head; Philox blocks per row
  int64_t k_offset;
  float scale_log2, keep_scale;  // scale * log2(e); 1 / (1 - dropout)
  uint32_t threshold;            // a probability is kept when its 32 bits reach this
  int bias_dtype;
};

// The features of one row of one head.
struct RowExtras {
  const uint8_t* mask;
  int64_t bias, dropout_row;  // offset of the row in bias; Philox block of key position 0
  float slope_log2;
};

__device__ __forceinline__ float load_bias(const void* bias, int dtype, int64_t at) {
  if (dtype == SHARDLIB_F32) return static_cast<const float*>(bias)[at];
  const uint32_t bits = static_cast<const uint16_t*>(bias)[at];
  return dtype == SHARDLIB_BF16 ? unpack<bf16>(bits).x : unpack<fp16>(bits).x;
}

__device__ __forceinline__ RowExtras row_extras(const Extras& e, int b, int h, int i) {
  RowExtras row;
  row.mask = e.mask ? e.mask + b * e.mask_strides[0] + h * e.mask_strides[1] + i * e.mask_strides[2] : nullptr;
  row.bias = b * e.bias_strides[0] + h * e.bias_strides[1] + i * e.bias_strides[2];
  row.slope_log2 = e.alibi ? e.alibi[h] * kLog2E : 0.0f;
  row.dropout_row = (e.first_row + b * e.batch_rows + h * e.head_rows + i) * e.row_blocks;
  return row;
}

// The logit of a product of query and key, in units of log 2; minus infinity where the query does not see the key.
// (i, j) must lie inside the tensors; `distance` is i + shift - j.
__device__ __forceinline__ float extra_logit(const Extras& e, const RowExtras& row, float product, int j,
                                             int distance) {
  float logit = product * e.scale_log2;
  if (e.bias) logit += load_bias(e.bias, e.bias_dtype, row.bias + j * e.bias_strides[3]) * kLog2E;
  logit -= row.slope_log2 * fabsf(float(distance));
  if (row.mask && !row.mask[j * e.mask_strides[3]]) logit = SHARDLIB_MINUS_INFINITY;
  return logit;
}

// Whether dropout keeps the probabilities of keys j and j + 1.
__device__ __forceinline__ void kept_pair(const Extras& e, const RowExtras& row, PhiloxKey key, int j, bool& first,
                                          bool& second) {
  const int64_t position = e.k_offset + j;
  uint4 words = philox(key, uint64_t(row.dropout_row + (position >> 2)));
  first = philox_word(words, unsigned(position & 3)) >= e.threshold;
  if ((position & 3) == 3) words = philox(key, uint64_t(row.dropout_row + (position >> 2) + 1));
  second = philox_word(words, unsigned((position + 1) & 3)) >= e.threshold;
}

// Whether dropout keeps the probability of key j.
__device__ __forceinline__ bool kept(const Extras& e, const RowExtras& row, PhiloxKey key, int j) {
  const int64_t position = e.k_offset + j;
  return philox_word(philox(key, uint64_t(row.dropout_row + (position >> 2))), unsigned(position & 3)) >= e.threshold;
}

// --- host ----------------------------------------------------------------------------------------------------------

// Positions are 32-bit: sequences stay below kFar, and whoever is further apart than twice that is simply far apart.
constexpr int64_t kFar = int64_t(1) << 28;

inline Sight make_sight(const AttentionArgs& a) {
  const int64_t shift = a.q_offset - a.k_offset;
  Sight sight;
  sight.queries = int(a.queries), sight.keys = int(a.keys);
  sight.shift = int(shift < -2 * kFar ? -2 * kFar : shift > 2 * kFar ? 2 * kFar : shift);
  sight.window = a.window >= 4 * kFar ? 0 : int(a.window);  // wider than everything
  sight.causal = a.causal != 0;
  return sight;
}

// Whether a kernel needs Extras; otherwise its logits are scale * q k with scale > 0.
inline bool has_extras(const AttentionArgs& a) {
  return a.mask || a.bias || a.alibi || (a.key && a.dropout > 0) || !(a.scale > 0);
}

inline Extras make_extras(const AttentionArgs& a) {
  Extras e = {};
  e.mask = a.mask, e.bias = a.bias, e.alibi = a.alibi, e.key = a.dropout > 0 ? a.key : nullptr;
  for (int d = 0; d < 4; ++d) e.mask_strides[d] = a.mask_strides[d], e.bias_strides[d] = a.bias_strides[d];
  e.first_row = (a.first_batch * a.global_heads + a.first_head) * a.global_queries + a.q_offset;
  e.batch_rows = a.global_heads * a.global_queries, e.head_rows = a.global_queries;
  e.row_blocks = (a.global_keys + 3) / 4;
  e.k_offset = a.k_offset;
  e.scale_log2 = float(a.scale * 1.4426950408889634), e.keep_scale = float(1.0 / (1.0 - a.dropout));
  const double threshold = std::ceil(a.dropout * 4294967296.0);
  e.threshold = threshold >= 4294967295.0 ? 0xffffffffu : uint32_t(threshold);
  e.bias_dtype = a.bias_dtype;
  return e;
}

// Rows must begin at multiples of 16 bytes, and so step the dims that are stepped at all.
inline int check_rows(const char* name, const void* base, const int64_t (&strides)[3], const int64_t (&sizes)[3]) {
  bool fits = reinterpret_cast<uintptr_t>(base) % 16 == 0;
  for (int d = 0; d < 3; ++d) fits = fits && (sizes[d] <= 1 || strides[d] % 8 == 0);
  return fits ? 0 : fail(1, "attention: %s must begin at, and step by, multiples of 16 bytes", name);
}

// 0, or an error that names the argument that no attention kernel here takes.
inline int check_attention(const AttentionArgs& a) {
  if (a.dtype != SHARDLIB_BF16 && a.dtype != SHARDLIB_FP16)
    return fail(1, "attention: q, k and v must be bf16 or fp16");
  if (a.kv_heads < 1 || a.heads % a.kv_heads)
    return fail(1, "attention: %lld query heads do not divide into %lld key heads", (long long)a.heads,
                (long long)a.kv_heads);
  if (a.head_dim < 8 || a.head_dim > 256 || a.head_dim % 8)
    return fail(1, "attention: head dim %lld; the kernels take multiples of 8 up to 256", (long long)a.head_dim);
  if (a.queries >= kFar || a.keys >= kFar) return fail(1, "attention: a sequence of 2^28 or more");
  if (a.window < 0) return fail(1, "attention: window %lld is negative", (long long)a.window);
  const int64_t shift = a.q_offset - a.k_offset;
  if ((a.alibi || a.window >= kFar) && (shift > 2 * kFar || shift < -2 * kFar))
    return fail(1, "attention: ALiBi or a window of 2^28 over a distance of more than 2^29");
  if (!(a.dropout >= 0 && a.dropout < 1)) return fail(1, "attention: dropout %g is not in [0, 1)", a.dropout);
  if (a.dropout > 0 && !a.key) return fail(1, "attention: dropout without a key");
  const int64_t q_sizes[3] = {a.batch, a.heads, a.queries}, k_sizes[3] = {a.batch, a.kv_heads, a.keys};
  int code = check_rows("q", a.q, a.q_strides, q_sizes);
  if (code == 0) code = check_rows("k", a.k, a.k_strides, k_sizes);
  if (code == 0) code = check_rows("v", a.v, a.v_strides, k_sizes);
  if (code == 0) code = check_rows("o", a.o, a.o_strides, q_sizes);
  return code;
}

// The same of a backward kernel's arguments.
inline int check_backward(const AttentionBackwardArgs& g) {
  const AttentionArgs& a = g.forward;
  const int64_t q_sizes[3] = {a.batch, a.heads, a.queries}, k_sizes[3] = {a.batch, a.kv_heads, a.keys};
  int code = check_attention(a);
  if (code == 0) code = check_rows("grad_o", g.grad_o, g.grad_o_strides, q_sizes);
  if (code == 0) code = check_rows("dq", g.dq, g.dq_strides, q_sizes);
  if (code == 0) code = check_rows("dk", g.dk, g.dk_strides, k_sizes);
  if (code == 0) code = check_rows("dv", g.dv, g.dv_strides, k_sizes);
  return code;
}

inline int64_t tiles_of(int64_t rows, int64_t size) { return (rows + size - 1) / size; }

}  // namespace shardlib
