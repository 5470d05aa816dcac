// Attention forward for cards from sm_80 on: cp.async, ldmatrix, mma.sync (after FlashAttention-2, Dao 2023).
//
// Shapes: q, o [B, H, S, D]; k, v [B, KV, T, D]; lse [B, H, S]. A CTA owns a tile of queries of one head and walks over
// the tiles of keys that these see; a warp owns whole rows, so that a softmax stays within four lanes. While one tile of
// keys is worked on, the next is on its way.
#include "attention_sm80.cuh"

namespace shardlib {
namespace {

using namespace sm80;

// Configuration, by the width of a row of q.
template <int kWidth> struct Config {
  static constexpr int kBlocks = kWidth <= 128 ? 2 : 1;      // blocks of 16 queries per warp
  static constexpr int kKeys = kWidth <= 64 ? 64 : 32;       // keys per tile
  static constexpr int kQueries = 16 * kBlocks * kWarps;     // queries per CTA
};

// Arguments
struct Params {
  AttentionArgs args;
  Sight sight;
  Extras extras;
  bool general;  // there are extras: scores are turned into logits before the softmax
  int tiles;     // of queries, per head
};

// Kernel
template <class T, int kWidth> struct Forward {
  using C = Config<kWidth>;
  using QueryTile = Tile<T, C::kQueries, kWidth>;
  using KeyTile = Tile<T, C::kKeys, kWidth>;
  static constexpr int kEights = C::kKeys / 8;
  static constexpr unsigned kSharedBytes = QueryTile::kBytes + 4 * KeyTile::kBytes;
  static_assert(kSharedBytes <= kMostSharedBytes);
};

template <class T, int kWidth>
__global__ void __launch_bounds__(kThreads) forward(const __grid_constant__ Params p) {
  using F = Forward<T, kWidth>;
  using C = typename F::C;
  const AttentionArgs& a = p.args;
  const int head_index = int(blockIdx.x) / p.tiles, b = head_index / int(a.heads), h = head_index % int(a.heads);
  // The last queries first: under a causal mask they have the most to do.
  const int i0 = (p.tiles - 1 - int(blockIdx.x) % p.tiles) * C::kQueries, queries = int(a.queries), dim = int(a.head_dim);
  const int warp_row = int(warp_index()) * 16 * C::kBlocks;
  const int64_t kv_head = h / (a.heads / a.kv_heads);
  const T* keys = static_cast<const T*>(a.k) + b * a.k_strides[0] + kv_head * a.k_strides[1];
  const T* values = static_cast<const T*>(a.v) + b * a.v_strides[0] + kv_head * a.v_strides[1];

  unsigned char* shared = shared_memory();
  const typename F::QueryTile q_tile = {reinterpret_cast<T*>(shared)};
  const auto key_tile = [&](int n) {
    return typename F::KeyTile{reinterpret_cast<T*>(shared + F::QueryTile::kBytes + n * F::KeyTile::kBytes)};
  };
  const auto load_keys = [&](int n, int stage) {
    const int j = n * C::kKeys, rows = int(a.keys) - j;
    key_tile(2 * stage).load(keys + j * a.k_strides[2], a.k_strides[2], rows, dim);
    key_tile(2 * stage + 1).load(values + j * a.v_strides[2], a.v_strides[2], rows, dim);
  };

  const int first = p.sight.begin(i0) / C::kKeys;
  const int last = (p.sight.end(min(i0 + C::kQueries, queries) - 1) + C::kKeys - 1) / C::kKeys;
  if (first < last) {
    const T* from = static_cast<const T*>(a.q) + b * a.q_strides[0] + h * a.q_strides[1] + i0 * a.q_strides[2];
    q_tile.load(from, a.q_strides[2], queries - i0, dim);
    load_keys(first, first & 1);
  }
  cp_async_commit();

  const float unit = p.general ? 1.0f : p.extras.scale_log2;  // of the scores that go into the softmax, in log 2
  float o[C::kBlocks][kWidth / 8][4] = {};
  RowState rows[C::kBlocks];
#pragma unroll
  for (int m = 0; m < C::kBlocks; ++m) rows[m] = {{SHARDLIB_MINUS_INFINITY, SHARDLIB_MINUS_INFINITY}, {0.0f, 0.0f}};

#pragma unroll 1
  for (int n = first; n < last; ++n) {
    cp_async_wait<0>();
    __syncthreads();  // tile n is here for all, and all are done with tile n - 1
    if (n + 1 < last) load_keys(n + 1, ~n & 1);
    cp_async_commit();
    if (blind(p.sight, i0 + warp_row, 16 * C::kBlocks, n * C::kKeys, C::kKeys)) continue;

    float s[C::kBlocks][F::kEights][4] = {};
    multiply<T, kWidth>(s, q_tile, warp_row, key_tile(n % 2 * 2));

    uint32_t probabilities[C::kBlocks][F::kEights / 2][4];
#pragma unroll
    for (int m = 0; m < C::kBlocks; ++m) {
      const Block<false> block = {i0 + warp_row + 16 * m, n * C::kKeys};
      const RowExtras head = p.general ? row_extras(p.extras, b, h, 0) : RowExtras{};
      const uint32_t visible = seen<F::kEights>(p.sight, p.extras, head, block);
      if (p.general) add_extras(s[m], p.sight, p.extras, head, block);
      hide(s[m], visible);

      scale_rows(flat(o[m]), softmax(flat(s[m]), rows[m], unit));
      if (p.extras.key) {
        const uint32_t keep = kept<F::kEights>(p.extras, head, block);
#pragma unroll
        for (int c = 0; c < F::kEights; ++c)
#pragma unroll
          for (int e = 0; e < 4; ++e) s[m][c][e] = keep >> (4 * c + e) & 1 ? s[m][c][e] : 0.0f;
      }
      pack_scores<T>(probabilities[m], flat(s[m]));
    }
    accumulate<T>(o, probabilities, key_tile(n % 2 * 2 + 1), 0);
  }

  T* out = static_cast<T*>(a.o) + b * a.o_strides[0] + h * a.o_strides[1];
  float* lse = a.lse + b * a.lse_strides[0] + h * a.lse_strides[1];
#pragma unroll
  for (int m = 0; m < C::kBlocks; ++m) {
    const int row = i0 + warp_row + 16 * m;
    finish_rows(rows[m]);
    float factor[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int i = row + int(lane_index()) / 4 + 8 * r;
      factor[r] = rows[m].sum[r] == 0 ? 0.0f : p.extras.keep_scale / rows[m].sum[r];
      if (lane_index() % 4 == 0 && i < queries) lse[i * a.lse_strides[2]] = row_lse(rows[m], r, unit);
    }
    store_block<T>(out, a.o_strides[2], o[m], row, queries, 0, dim, factor[0], factor[1]);
  }
}

// Entry
struct Run {
  const AttentionArgs& a;
  cudaStream_t stream;

  template <class T, int kWidth> int call() const {
    const int64_t tiles = (a.queries + Config<kWidth>::kQueries - 1) / Config<kWidth>::kQueries;
    const int64_t ctas = tiles * a.heads * a.batch;
    if (ctas >= int64_t(1) << 31) return fail(1, "attention: %lld tiles of queries are too many", (long long)ctas);
    LaunchShape shape;
    shape.grid = dim3(unsigned(ctas)), shape.block = dim3(kThreads);
    shape.shared_bytes = Forward<T, kWidth>::kSharedBytes;
    const Params params = {a, make_sight(a), make_extras(a), has_extras(a), int(tiles)};
    return launch(shape, stream, forward<T, kWidth>, params);
  }
};

}  // namespace
}  // namespace shardlib

// Writes o and lse; 0, or an error code with its text in shardlib_last_error().
extern "C" int shardlib_attention_sm80_forward(const AttentionArgs* args, cudaStream_t stream) {
  using namespace shardlib;
  if (const int code = check_attention(*args)) return code;
  if (args->batch * args->heads * args->queries == 0) return 0;
  return sm80::for_type_and_width(*args, Run{*args, stream});
}
