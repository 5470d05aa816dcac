// The attention backward for sm_90a, what its kernels share: tiles, shared memory, and the work on single scores.
//
// Scores stand transposed, keys down and queries across, so that a warpgroup's probabilities are at once the left operand
// of dv = P^T grad_o and, as dS, of dk = dS^T q. A thread of a 64 x N tile holds, in element 4 i + 2 r + c, key row
// 16 warp + lane / 4 + 8 r and query column 8 i + 2 (lane % 4) + c.
#pragma once
#include "attention.cuh"

namespace shardlib {
namespace {

// --- configuration ----------------------------------------------------------------------------------------------------

// Two warpgroups share a block of keys. Up to D = 128 each owns 64 keys, with dk and dv [64, D] in its registers. At
// D = 256 those would not fit: both own the same 64 keys, half the columns of dk and dv, and half the queries' scores,
// and show each other their probabilities in shared memory.
template <int D_, bool General_> struct Config {
  static constexpr int D = D_;
  static constexpr bool General = General_;
  static constexpr bool Halved = D == 256;
  static constexpr int Groups = 2, Threads = 128 * (Groups + 1);
  static constexpr int Queries = D == 64 && !General ? 128 : 64;
  static constexpr int Keys = Halved ? 64 : 128;
  static constexpr int Stages = Halved ? 1 : 2;
  // Whether the next tile's scores begin before this tile's dq is written, and dv before dS is known.
  static constexpr bool Ahead = !General && D == 64, EarlyDv = D == 128;
  static constexpr int ProducerRegisters = 24, ConsumerRegisters = 240;
  // One warpgroup's scores are [64, ScoreColumns], its dk and dv [64, Columns], its part of dq [64, DqColumns].
  static constexpr int ScoreColumns = Halved ? Queries / 2 : Queries;
  static constexpr int Columns = Halved ? D / 2 : D;
  static constexpr bool DqByRows = Queries == 128;
  static constexpr int DqColumns = DqByRows ? D : D / 2;
  // Tiles lie in shared memory as panels of 64 columns, 128 bytes a row, swizzled; dS as rows of keys.
  static constexpr int Panels = D / 64;
  static constexpr int KeyPanel = Keys * 128, QueryPanel = Queries * 128;
  static constexpr int KeyBytes = Panels * KeyPanel, QueryBytes = Panels * QueryPanel;
  static constexpr int ScoreBytes = Queries / 64 * KeyPanel;
  static constexpr int DqFloats = 64 * DqColumns, DqBytes = 4 * DqFloats;
  // Where they lie: k, v, then the stages of q and of grad_o, two buffers of dS and, where halved, of P, dq, rows, barriers.
  static constexpr int VAt = KeyBytes, QAt = 2 * KeyBytes, GradAt = QAt + Stages * QueryBytes, DsAt = GradAt + Stages * QueryBytes;
  static constexpr int PAt = DsAt + 2 * ScoreBytes, DqAt = PAt + (Halved ? 2 : 0) * ScoreBytes, RowsAt = DqAt + Groups * DqBytes;
  static constexpr int BarriersAt = RowsAt + Stages * Queries * 8, SharedBytes = BarriersAt + 256;
  static_assert(SharedBytes <= 227 << 10);
};

// --- arguments --------------------------------------------------------------------------------------------------------

struct Params {
  TensorMap q, k, v, grad_o, dk, dv;
  Sight sight;
  Extras extras;
  const float *lse, *delta;
  float* dq_sum;    // [B, H, query tiles, warpgroup] runs of DqFloats, each in the order of the registers it came from
  uint32_t* turns;  // of every such run, how many CTAs have added to it; null: they add in any order
  float* dbias;
  int64_t lse_strides[3], dbias_strides[4];
  int heads, kv_heads, key_tiles, query_tiles;
  float scale, scale_log2;
};

// The barriers and tiles of a CTA's shared memory. Scores are double-buffered: the writers of one iteration are only
// sure that the readers of the last but one are done.
template <class C> struct Shared {
  unsigned char *k, *v, *q, *grad_o, *ds, *p;
  float *dq, *rows;  // rows: per stage, log-sum-exps in units of log 2, then deltas
  Barrier *k_full, *v_full, *q_full, *q_empty, *grad_full, *grad_empty, *dq_full, *dq_empty;

  __device__ __forceinline__ explicit Shared(unsigned char* base) {
    k = base, v = base + C::VAt, q = base + C::QAt, grad_o = base + C::GradAt, ds = base + C::DsAt, p = base + C::PAt;
    dq = reinterpret_cast<float*>(base + C::DqAt), rows = reinterpret_cast<float*>(base + C::RowsAt);
    k_full = reinterpret_cast<Barrier*>(base + C::BarriersAt), v_full = k_full + 1, q_full = v_full + 1;
    q_empty = q_full + C::Stages, grad_full = q_empty + C::Stages, grad_empty = grad_full + C::Stages;
    dq_full = grad_empty + C::Stages, dq_empty = dq_full + C::Groups;
  }
};

// A place in the ring of stages: consumers wait for `phase`, producers for the one before it.
template <int Stages> struct Ring {
  int stage = 0;
  unsigned phase = 0;
  __device__ __forceinline__ void next() {
    if (++stage == Stages) stage = 0, phase ^= 1;
  }
};

// A CTA's keys [key, key + Keys) of one key head, and the query tiles [first, last) that see something of them.
struct Work {
  int batch, kv_head, tile, key, first, last;
};

template <class C> __device__ __forceinline__ Work find_work(const Params& p) {
  Work work;
  const int head = int(blockIdx.x) / p.key_tiles;
  work.tile = int(blockIdx.x) - head * p.key_tiles, work.key = work.tile * C::Keys;
  work.batch = head / p.kv_heads, work.kv_head = head - work.batch * p.kv_heads;
  const int first = p.sight.first_query(work.key), last = p.sight.last_query(min(work.key + C::Keys, p.sight.keys) - 1);
  work.first = first / C::Queries, work.last = last > first ? (last + C::Queries - 1) / C::Queries : work.first;
  return work;
}

// Visits the tiles of queries in the order that every warp of the CTA keeps: visit(query head, query tile).
template <class Visit> __device__ __forceinline__ void each_tile(const Params& p, const Work& work, Visit visit) {
  const int group = p.heads / p.kv_heads;
#pragma unroll 1
  for (int head = work.kv_head * group; head < (work.kv_head + 1) * group; ++head)
#pragma unroll 1
    for (int tile = work.first; tile < work.last; ++tile) visit(head, tile);
}

// --- scores -----------------------------------------------------------------------------------------------------------

// Puts minus infinity where query and key do not see each other. `key` and `query` are this thread's first.
template <int N> __device__ __forceinline__ void hide(float (&scores)[N], const Sight& sight, int key, int query) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int j = key + 8 * r, begin = sight.first_query(j) - query, end = j < sight.keys ? sight.last_query(j) - query : 0;
#pragma unroll
    for (int i = 0; i < N / 4; ++i)
#pragma unroll
      for (int c = 0; c < 2; ++c)
        if (8 * i + c < begin || 8 * i + c >= end) scores[4 * i + 2 * r + c] = SHARDLIB_MINUS_INFINITY;
  }
}

// Makes logits in units of log 2 from products, with everything that a general kernel adds.
template <int N>
__device__ __forceinline__ void general_logits(float (&scores)[N], const Params& p, int batch, int head, int key, int query) {
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

// Which of a thread's probabilities dropout keeps: a bit each. Four neighbouring keys share one Philox block, and four
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
        const uint32_t a = __shfl_xor_sync(kFullMask, odd ? w.x : w.y, 4), b = __shfl_xor_sync(kFullMask, odd ? w.z : w.w, 4);
        w = odd ? make_uint4(a, w.y, b, w.w) : make_uint4(w.x, a, w.z, b);
        const uint32_t c = __shfl_xor_sync(kFullMask, high ? w.x : w.z, 8), d = __shfl_xor_sync(kFullMask, high ? w.y : w.w, 8);
        w = high ? make_uint4(c, d, w.z, w.w) : make_uint4(w.x, w.y, c, d);
        bits |= uint32_t(w.x >= e.threshold) << (4 * i + 2 * r) | uint32_t(w.y >= e.threshold) << (4 * i + 2 * r + 1) |
                uint32_t(w.z >= e.threshold) << (4 * i + 2 * r + 4) | uint32_t(w.w >= e.threshold) << (4 * i + 2 * r + 5);
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

// Adds dS to the gradient of the bias; what the bias repeats along the queries is first summed here.
template <int N>
__device__ __forceinline__ void add_bias_gradient(const float (&ds)[N], const Params& p, int batch, int head, int key, int query) {
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
        if (strides[2] != 0 && row < p.sight.queries && j < p.sight.keys) atomicAdd(base + row * strides[2] + j * strides[3], value);
      }
    sum += __shfl_xor_sync(kFullMask, sum, 1);
    sum += __shfl_xor_sync(kFullMask, sum, 2);
    if (strides[2] == 0 && lane_index() % 4 == 0 && j < p.sight.keys) atomicAdd(base + j * strides[3], sum);
  }
}

// --- tiles ------------------------------------------------------------------------------------------------------------

// A tile in registers as the left operands of wgmma, 16 columns each, and as stmatrix stores them.
template <class T, int N> __device__ __forceinline__ void pack_tile(uint32_t (&words)[N / 8][4], const float (&tile)[N]) {
#pragma unroll
  for (int i = 0; i < N / 2; ++i) words[i / 4][i % 4] = pack<T>(tile[2 * i], tile[2 * i + 1]);
}

// Stores a warpgroup's 64 rows into panels, from column 8 * `chunk` on. `rows` is the first row in the first panel.
template <int S>
__device__ __forceinline__ void store_tile(unsigned char* rows, int panel_bytes, int chunk, const uint32_t (&words)[S][4]) {
  // Lane i gives the address of row i % 8 of matrix i / 8: rows 0-7 and 8-15 of 8 columns, then of the next 8.
  const int lane = int(lane_index()), matrix = lane / 8, row = int(threadIdx.x) % 128 / 32 * 16 + matrix % 2 * 8 + lane % 8;
#pragma unroll
  for (int i = 0; i < S; ++i) {
    const int at = chunk + 2 * i + matrix / 2;
    stmatrix_x4(rows + at / 8 * panel_bytes + row * 128 + ((at % 8 ^ row % 8) * 16), words[i]);
  }
}

}  // namespace
}  // namespace shardlib
