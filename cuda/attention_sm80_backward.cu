// Attention backward for cards from sm_80 on: cp.async, ldmatrix, mma.sync (after FlashAttention-2, Dao 2023).
//
// Shapes: q, grad_o, dq [B, H, S, D]; k, v, dk, dv [B, KV, T, D]; lse, delta [B, H, S]; dq_sum, float [B, H, S, D].
// Two kernels in a row:
//   backward a CTA owns a tile of keys of one key head and walks over the query heads of its group and the tiles of
//            queries that see these keys. Its scores are transposed, keys down: so P^T and dS^T leave the accumulators
//            as left operands of dV += P^T dO and dK += dS^T Q, and only dQ += dS K needs dS in shared memory.
//   convert  dq from its sums
// The CTAs add to a sum of dq in any order, so that its last bits vary; with `repeatable`, in the order of their keys.
#include "attention_sm80.cuh"
#include "attention_turns.cuh"

namespace shardlib {
namespace {

using namespace sm80;

// Configuration, by the width of a row of q.
template <int kWidth> struct Config {
  static constexpr int kQueries = kWidth <= 64 ? 64 : 32;  // per tile
  static constexpr int kStages = kWidth <= 128 ? 2 : 1;    // tiles of queries in shared memory
  static constexpr int kParts = kWidth <= 128 ? 1 : 2;     // warps that share 16 keys, each with its columns of dk and dv
  static constexpr int kKeys = 16 * kWarps / kParts;       // per CTA
};

// Arguments
struct Params {
  AttentionBackwardArgs args;
  Sight sight;
  Extras extras;
  bool general;           // there are extras: scores are turned into logits
  int tiles, query_tiles; // of keys, and of queries, per head
  Turns turns;            // of the tiles of dq
};

// Kernels
template <class T> __global__ void __launch_bounds__(kThreads) convert(const __grid_constant__ AttentionBackwardArgs p) {
  const AttentionArgs& a = p.forward;
  const int64_t word = int64_t(blockIdx.x) * kThreads + threadIdx.x, wide = a.head_dim / 8;
  const int64_t row = word / wide, c = word % wide * 8;
  if (row >= a.batch * a.heads * a.queries) return;
  const int64_t i = row % a.queries, h = row / a.queries % a.heads, b = row / a.queries / a.heads;
  const auto* sums = reinterpret_cast<const float4*>(p.workspace + 8 * word);
  const float4 x = sums[0], y = sums[1];
  const float scale = float(a.scale);
  store_16(static_cast<T*>(p.dq) + b * p.dq_strides[0] + h * p.dq_strides[1] + i * p.dq_strides[2] + c,
           make_uint4(pack<T>(x.x * scale, x.y * scale), pack<T>(x.z * scale, x.w * scale),
                      pack<T>(y.x * scale, y.y * scale), pack<T>(y.z * scale, y.w * scale)));
}

// All threads wait until `before` CTAs have added to a tile of dq; then they let the next one add.
__device__ __forceinline__ void wait_for_turn(const Turns& turns, int tile, int before) {
  if (threadIdx.x == 0) turns.wait(tile, before);
  __syncthreads();
}
__device__ __forceinline__ void end_turn(const Turns& turns, int tile) {
  __syncthreads();
  if (threadIdx.x == 0) turns.pass(tile);
}

// Adds dS to the gradient of the bias. In any order, also with `repeatable`: it shows where the bias is broadcast.
template <int kEights>
__device__ __forceinline__ void add_bias_gradient(const AttentionBackwardArgs& args, int b, int h,
                                                  const float (&ds)[kEights][4], Block<true> block, uint32_t seen) {
  const int64_t* strides = args.dbias_strides;
  float* dbias = args.dbias + b * strides[0] + h * strides[1];
#pragma unroll
  for (int n = 0; n < kEights; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e)
      if (seen >> (4 * n + e) & 1)
        atomicAdd(dbias + block.query_of(n, e) * strides[2] + block.key_of(n, e) * strides[3], ds[n][e]);
}

template <class T, int kWidth> struct Backward {
  using C = Config<kWidth>;
  using KeyTile = Tile<T, C::kKeys, kWidth>;
  using QueryTile = Tile<T, C::kQueries, kWidth>;
  using ScoreTile = Tile<T, C::kKeys, C::kQueries>;
  static constexpr int kRows = 2 * C::kQueries;  // of lse and delta, of one stage
  static constexpr int kEights = C::kQueries / 8;
  static constexpr unsigned kSharedBytes =
      2 * KeyTile::kBytes + 2 * C::kStages * QueryTile::kBytes + ScoreTile::kBytes + C::kStages * kRows * 4;
  static_assert(kSharedBytes <= kMostSharedBytes);
};

template <class T, int kWidth>
__global__ void __launch_bounds__(kThreads) backward(const __grid_constant__ Params p) {
  using F = Backward<T, kWidth>;
  using C = typename F::C;
  const AttentionArgs& a = p.args.forward;
  const int queries = int(a.queries), dim = int(a.head_dim), group = int(a.heads / a.kv_heads);
  unsigned char* shared = shared_memory();
  const typename F::KeyTile k_tile = {reinterpret_cast<T*>(shared)}, v_tile = {k_tile.data + F::KeyTile::kBytes / sizeof(T)};
  const auto query_tile = [&](int n) {
    return typename F::QueryTile{reinterpret_cast<T*>(shared + 2 * F::KeyTile::kBytes + n * F::QueryTile::kBytes)};
  };
  const typename F::ScoreTile ds_tile = {query_tile(2 * C::kStages).data};
  float* rows = reinterpret_cast<float*>(ds_tile.data + F::ScoreTile::kBytes / sizeof(T));

  auto* ticket = reinterpret_cast<uint32_t*>(ds_tile.data);
  if (threadIdx.x == 0) p.turns.take(ticket);
  __syncthreads();
  const int cta = p.turns.index(ticket);
  const int b = cta / p.tiles / int(a.kv_heads), kv_head = cta / p.tiles % int(a.kv_heads);
  const int j0 = cta % p.tiles * C::kKeys, keys = min(int(a.keys) - j0, C::kKeys);
  const int warp = int(warp_index()), part = warp % C::kParts, warp_row = warp / C::kParts * 16;

  // The steps of this CTA: tiles of queries, for one head of the group after the other.
  const int first = p.sight.first_query(j0) / C::kQueries;
  const int last = (p.sight.last_query(j0 + keys - 1) + C::kQueries - 1) / C::kQueries;
  const int per_head = last > first ? last - first : 0, steps = per_head * group;
  const auto load_queries = [&](int step) {
    const int64_t h = kv_head * group + step / per_head, i = (first + step % per_head) * C::kQueries;
    const T* q = static_cast<const T*>(a.q) + b * a.q_strides[0] + h * a.q_strides[1] + i * a.q_strides[2];
    const T* grad_o = static_cast<const T*>(p.args.grad_o) + b * p.args.grad_o_strides[0] + h * p.args.grad_o_strides[1] +
                      i * p.args.grad_o_strides[2];
    query_tile(step % C::kStages * 2).load(q, a.q_strides[2], queries - int(i), dim);
    query_tile(step % C::kStages * 2 + 1).load(grad_o, p.args.grad_o_strides[2], queries - int(i), dim);
  };
  // One thread's part of lse, in log 2, and delta. A row that sees nothing, or that there is not, has probabilities 0.
  const auto load_row = [&](int step) {
    const int64_t h = kv_head * group + step / per_head;
    const int r = int(threadIdx.x) % C::kQueries, i = (first + step % per_head) * C::kQueries + r;
    if (threadIdx.x >= F::kRows || i >= queries) return threadIdx.x < C::kQueries ? -SHARDLIB_MINUS_INFINITY : 0.0f;
    if (threadIdx.x >= C::kQueries) return p.args.delta[(b * a.heads + h) * queries + i];
    const float lse = a.lse[b * a.lse_strides[0] + h * a.lse_strides[1] + i * a.lse_strides[2]];
    return lse == SHARDLIB_MINUS_INFINITY ? -SHARDLIB_MINUS_INFINITY : lse * kLog2E;
  };
  const auto store_row = [&](int step, float value) {
    if (threadIdx.x < F::kRows) rows[step % C::kStages * F::kRows + threadIdx.x] = value;
  };

  if (steps > 0) {
    const T* from_k = static_cast<const T*>(a.k) + b * a.k_strides[0] + kv_head * a.k_strides[1] + j0 * a.k_strides[2];
    const T* from_v = static_cast<const T*>(a.v) + b * a.v_strides[0] + kv_head * a.v_strides[1] + j0 * a.v_strides[2];
    k_tile.load(from_k, a.k_strides[2], keys, dim);
    v_tile.load(from_v, a.v_strides[2], keys, dim);
    load_queries(0);
    store_row(0, load_row(0));
  }
  cp_async_commit();

  constexpr int kColumns = kWidth / C::kParts;  // of dk and dv, of this warp
  float dk[1][kColumns / 8][4] = {}, dv[1][kColumns / 8][4] = {};
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    const int h = kv_head * group + step / per_head, i0 = (first + step % per_head) * C::kQueries;
    cp_async_wait<0>();
    __syncthreads();  // this step's tiles are here for all, and all are done with the step before
    if (C::kStages == 2 && step + 1 < steps) load_queries(step + 1);
    cp_async_commit();
    const auto q_tile = query_tile(step % C::kStages * 2), grad_o_tile = query_tile(step % C::kStages * 2 + 1);
    const float* row = rows + step % C::kStages * F::kRows + lane_index() % 4 * 2;

    uint32_t ds[1][F::kEights / 2][4] = {};
    if (!blind(p.sight, i0, C::kQueries, j0 + warp_row, 16)) {
      float s[1][F::kEights][4] = {}, dp[1][F::kEights][4] = {};
      multiply<T, kWidth>(s, k_tile, warp_row, q_tile);
      multiply<T, kWidth>(dp, v_tile, warp_row, grad_o_tile);

      const Block<true> block = {i0, j0 + warp_row};
      const RowExtras head = p.general ? row_extras(p.extras, b, h, 0) : RowExtras{};
      const uint32_t visible = seen<F::kEights>(p.sight, p.extras, head, block);
      if (p.general) add_extras(s[0], p.sight, p.extras, head, block);
      hide(s[0], visible);
      const uint32_t keep = p.extras.key ? kept<F::kEights>(p.extras, head, block) : ~0u;

      const float unit = p.general ? 1.0f : p.extras.scale_log2;  // of s, in log 2
#pragma unroll
      for (int n = 0; n < F::kEights; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const float probability = exp2_approx(fmaf(s[0][n][e], unit, -row[8 * n + e % 2]));
          const bool keeps = keep >> (4 * n + e) & 1;
          const float gradient = keeps ? dp[0][n][e] * p.extras.keep_scale : 0.0f;
          dp[0][n][e] = probability * (gradient - row[8 * n + e % 2 + C::kQueries]);  // dS
          s[0][n][e] = keeps ? probability : 0.0f;
        }
      if (p.args.dbias && part == 0) add_bias_gradient(p.args, b, h, dp[0], block, visible);

      uint32_t probabilities[1][F::kEights / 2][4];
      pack_scores<T>(probabilities[0], flat(s[0]));
      pack_scores<T>(ds[0], flat(dp[0]));
      accumulate<T>(dv, probabilities, grad_o_tile, part * kColumns);
      accumulate<T>(dk, ds, q_tile, part * kColumns);
    }
    if (part == 0) store_fragments(ds_tile, warp_row, ds[0]);
    const float next_row = step + 1 < steps ? load_row(step + 1) : 0.0f;
    __syncthreads();  // all of dS is there, and all are done with this step's other tiles
    if (C::kStages == 1 && step + 1 < steps) load_queries(step + 1);
    cp_async_commit();
    store_row(step + 1, next_row);

    // dQ: a warp has 16 queries and a part of the columns.
    constexpr int kRowBlocks = C::kQueries / 16, kDqColumns = kWidth * kRowBlocks / kWarps;
    const int dq_row = warp % kRowBlocks * 16, dq_column = warp / kRowBlocks * kDqColumns;
    float dq[1][kDqColumns / 8][4] = {};
    uint32_t ds_rows[1][C::kKeys / 16][4];
#pragma unroll
    for (int k = 0; k < C::kKeys / 16; ++k) ldmatrix_x4_transposed(ds_rows[0][k], along_first(ds_tile, 16 * k, dq_row));
    accumulate<T>(dq, ds_rows, k_tile, dq_column);
    float* dq_sum = p.args.workspace + (b * a.heads + h) * queries * dim;
    const int tile = (b * int(a.heads) + h) * p.query_tiles + i0 / C::kQueries;
    if (p.turns.words) wait_for_turn(p.turns, tile, j0 / C::kKeys - p.sight.begin(i0) / C::kKeys);
    const Block<false> dq_block = {i0 + dq_row, dq_column};  // its keys are columns of dq
#pragma unroll
    for (int n = 0; n < kDqColumns / 8; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int i = dq_block.query_of(n, e), c = dq_block.key_of(n, e);
        if (i < queries && c < dim) atomicAdd(dq_sum + int64_t(i) * dim + c, dq[0][n][e]);
      }
    if (p.turns.words) end_turn(p.turns, tile);
  }

  const AttentionBackwardArgs& g = p.args;
  T* to_k = static_cast<T*>(g.dk) + b * g.dk_strides[0] + kv_head * g.dk_strides[1] + j0 * g.dk_strides[2];
  T* to_v = static_cast<T*>(g.dv) + b * g.dv_strides[0] + kv_head * g.dv_strides[1] + j0 * g.dv_strides[2];
  const float k_factor = float(a.scale), v_factor = p.extras.keep_scale;
  store_block<T>(to_k, g.dk_strides[2], dk[0], warp_row, keys, part * kColumns, dim, k_factor, k_factor);
  store_block<T>(to_v, g.dv_strides[2], dv[0], warp_row, keys, part * kColumns, dim, v_factor, v_factor);
}

// Entry
int64_t dq_sums(const AttentionArgs& a) { return a.batch * a.heads * a.queries * a.head_dim; }

template <class Kernel, class P>
int launch_many(int64_t ctas, unsigned shared_bytes, cudaStream_t stream, const Kernel& kernel, const P& params) {
  if (ctas >= int64_t(1) << 31) return fail(1, "attention: %lld tiles are too many", (long long)ctas);
  LaunchShape shape;
  shape.grid = dim3(unsigned(ctas)), shape.block = dim3(kThreads), shape.shared_bytes = shared_bytes;
  return launch(shape, stream, kernel, params);
}

struct Bytes {
  const AttentionBackwardArgs& g;

  template <class T, int kWidth> int64_t call() const {
    const AttentionArgs& a = g.forward;
    const int64_t tiles = a.batch * a.heads * tiles_of(a.queries, Config<kWidth>::kQueries);
    return 4 * dq_sums(a) + (g.repeatable ? turn_bytes(tiles) : 0);
  }
};

struct Run {
  const AttentionBackwardArgs& g;
  cudaStream_t stream;

  template <class T, int kWidth> int call() const {
    using C = Config<kWidth>;
    const AttentionArgs& a = g.forward;
    const int64_t tiles = tiles_of(a.keys, C::kKeys), query_tiles = tiles_of(a.queries, C::kQueries);
    const Turns turns = {g.repeatable ? reinterpret_cast<uint32_t*>(g.workspace + dq_sums(a)) : nullptr};
    const Params params = {g, make_sight(a), make_extras(a), has_extras(a), int(tiles), int(query_tiles), turns};
    int code = 0;
    if (const int64_t ctas = tiles * a.batch * a.kv_heads)
      code = launch_many(ctas, Backward<T, kWidth>::kSharedBytes, stream, backward<T, kWidth>, params);
    const int64_t ctas = tiles_of(dq_sums(a), 8 * kThreads);
    return code || ctas == 0 ? code : launch_many(ctas, 0, stream, convert<T>, g);
  }
};

}  // namespace
}  // namespace shardlib

// The bytes that args->workspace must have, zeros on entry.
extern "C" int64_t shardlib_attention_sm80_backward_workspace(const AttentionBackwardArgs* args) {
  return shardlib::sm80::for_type_and_width(args->forward, shardlib::Bytes{*args});
}

// Writes dq, dk and dv and adds to dbias, with delta as shardlib_attention_delta wrote it; 0, or an error code with its
// text in shardlib_last_error().
extern "C" int shardlib_attention_sm80_backward(const AttentionBackwardArgs* args, cudaStream_t stream) {
  using namespace shardlib;
  if (const int code = check_backward(*args)) return code;
  return sm80::for_type_and_width(args->forward, Run{*args, stream});
}
