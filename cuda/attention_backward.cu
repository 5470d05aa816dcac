// Attention backward for sm_90a: dq, dk, dv and the bias's gradient of o = softmax(scale q k^T + ...) v, bf16 and fp16.
//
// The shape is FlashAttention-3's (Shah et al. 2024). A CTA owns a block of keys of one key head, and walks the queries
// of every head that reads it: one warp loads tiles with TMA, one fetches what a row knows (log-sum-exp, delta), two
// warpgroups compute
//     P = exp2(S - lse)   dv += P^T grad_o   dS = P (grad_o v^T - delta)   dk += dS^T q   dq += dS k
// with dk and dv in registers, and one warp for each adds its dq to float sums in global memory. A small kernel then
// makes dq of the sums. With `repeatable`, CTAs add to a sum in the order of their keys.
//
// Shapes of a CTA: k, v [Keys, D]; q, grad_o [Queries, D] per stage; scores [Keys, Queries]. D is the head dim rounded
// up to 64, 128 or 256: TMA reads zeros beyond the tensors' last column.
#include "attention_backward.cuh"
#include "attention_backward_dq.cuh"
#include "attention_backward_feed.cuh"
#include "attention_backward_products.cuh"
#include "attention_backward_scores.cuh"

namespace shardlib {
namespace {

// Named barriers: both warpgroups have written their scores; both are done with k and v; a warpgroup's own.
constexpr unsigned kScores = 1, kDone = 2, kOutput = 3;

// --- consumers -------------------------------------------------------------------------------------------------------

// Writes 64 rows of dk or dv over the rows of k or v that they belong to, and from there to global memory.
template <class T, class C>
__device__ __forceinline__ void write_sum(const TensorMap* map, unsigned char* tile, const float (&sum)[C::Columns / 2],
                                          const Work& work, int group) {
  const int first_row = C::Halved ? 0 : 64 * group, first_panel = C::Halved ? group * C::Columns / 64 : 0;
  unsigned char* rows = tile + first_panel * C::KeyPanel + first_row * 128;
  uint32_t words[C::Columns / 16][4];
  pack_tile<T>(words, sum);
  store_tile(rows, C::KeyPanel, 0, words);
  fence_async_shared();
  named_barrier_sync(kOutput + unsigned(group), 128);
  if (threadIdx.x % 128 == 0) {
#pragma unroll
    for (int panel = 0; panel < C::Columns / 64; ++panel)
      tma_store(map, rows + panel * C::KeyPanel, (first_panel + panel) * 64, work.key + first_row, work.kv_head,
                work.batch);
    bulk_commit();
  }
}

template <class T, class C>
__device__ __forceinline__ void consume(const Params& p, Shared<C>& s, const Work& work, int group) {
  const int thread = int(threadIdx.x) % 128, lane = thread % 32;
  const int key_row = C::Halved ? 0 : 64 * group, query_column = C::Halved ? group * C::ScoreColumns : 0;
  const int key = work.key + key_row + thread / 32 * 16 + lane / 4, column = query_column + lane % 4 * 2;
  const int dq_panel = C::Dq == Split::columns ? group * C::DqColumns / 64 : 0,
            dq_key = C::Dq == Split::keys ? group * C::DqKeys : 0;
  const int sum_panel = C::Halved ? group * C::Columns / 64 : 0;
  // Operands: rows of keys and queries as they lie (k-major), and the other way round (mn-major) where they are summed.
  // One descriptor and constants make all others: few registers, whatever is live.
  using S = Shared<C>;
  const uint64_t origin = wgmma_descriptor(&s, 0, 1024);
  const auto operand = [origin](size_t tile, int place, int leading) {
    return origin + ((tile + uint64_t(place)) >> 4) + (uint64_t(leading >> 4) << 16);
  };
  const uint64_t k_rows = operand(offsetof(S, k), key_row * 128, 16),
                 v_rows = operand(offsetof(S, v), key_row * 128, 16),
                 q_rows = operand(offsetof(S, q), query_column * 128, 16),
                 grad_rows = operand(offsetof(S, grad_o), query_column * 128, 16),
                 ds_rows = operand(offsetof(S, ds), 0, 16), p_rows = operand(offsetof(S, p), 0, 16);
  const uint64_t q_columns = operand(offsetof(S, q), sum_panel * C::QueryPanel, C::QueryPanel),
                 grad_columns = operand(offsetof(S, grad_o), sum_panel * C::QueryPanel, C::QueryPanel),
                 k_columns = operand(offsetof(S, k), dq_panel * C::KeyPanel + dq_key * 128, C::KeyPanel);
  const int ds_panel = C::Dq == Split::rows ? group : 0;
  const uint64_t ds_columns = operand(offsetof(S, ds), ds_panel * C::KeyPanel + dq_key * 128, C::KeyPanel);

  float dk[C::Columns / 2], dv[C::Columns / 2];
#pragma unroll
  for (int i = 0; i < C::Columns / 2; ++i) dk[i] = 0.0f, dv[i] = 0.0f;
  float scores[C::ScoreColumns / 2];
  Ring<C::Stages> ring;
  unsigned flip = 0;  // the buffer of scores, and the phase of dq
  const auto next_scores = [&] { issue_scores<T, C>(scores, k_rows, q_rows + ring.stage * (C::QueryBytes >> 4)); };
  const auto next_dp = [&](float (&dp)[C::ScoreColumns / 2]) {
    barrier_wait(&s.grad_full[ring.stage], ring.phase);
    issue_scores<T, C>(dp, v_rows, grad_rows + ring.stage * (C::QueryBytes >> 4));
  };
  int head = work.kv_head * (p.heads / p.kv_heads), tile = work.first;
  int left = (work.last - work.first) * (p.heads / p.kv_heads);
  if (left > 0) {
    barrier_wait(&s.k_full, 0);
    barrier_wait(&s.v_full, 0);
    if constexpr (C::Ahead) {
      barrier_wait(&s.q_full[ring.stage], ring.phase);
      next_scores();
      wgmma_wait<0>();
      wgmma_pin(scores);
    }
  }

#pragma unroll 1
  for (; left > 0; --left) {
    const int stage = ring.stage * (C::QueryBytes >> 4), buffer = int(flip) * (C::ScoreBytes >> 4),
              query = tile * C::Queries + column;
    const float *lse_log2 = &s.lse_log2[ring.stage][column], *delta = &s.delta[ring.stage][column];
    // A shuffle that changes nothing: what follows from the key shall not stay in registers from tile to tile.
    const int my_key = C::General ? __shfl_sync(kFullMask, key, lane) : key;
    float dp[C::ScoreColumns / 2];
    uint32_t probabilities[C::ScoreColumns / 16][4], gradients[C::ScoreColumns / 16][4];

    if constexpr (!C::Ahead) barrier_wait(&s.q_full[ring.stage], ring.phase), next_scores();
    if constexpr (!C::General) next_dp(dp);
    if constexpr (!C::Ahead) {
      wgmma_wait<C::General ? 0 : 1>();
      wgmma_pin(scores);
    }

    // P, without dropout in `scores`, with it in `probabilities`.
    uint32_t kept = ~0u;
    if constexpr (C::General) {
      general_logits(scores, p, work.batch, head, my_key, query);
      if (p.extras.key) kept = kept_bits<C::ScoreColumns / 2>(p.extras, work.batch, head, my_key, query);
    } else if (!p.sight.whole(tile * C::Queries, C::Queries, work.key, C::Keys)) {
      hide(scores, p.sight, key, query);
    }
    exponentiate(scores, lse_log2, p.scale_log2);
    if constexpr (C::General) {
      float dropped[C::ScoreColumns / 2];
      drop(dropped, scores, kept, p.extras.keep_scale);
      pack_tile<T>(probabilities, dropped);
    } else {
      pack_tile<T>(probabilities, scores);
    }

    // dS, in place of dP. A general kernel has not the registers to begin dP earlier.
    if constexpr (C::General) barrier_wait(&s.grad_full[ring.stage], ring.phase);
    if constexpr (C::EarlyDv) issue_sum<T, C>(dv, probabilities, 0, grad_columns + stage);
    if constexpr (C::General) {
      wgmma_wait<0>();
      wgmma_pin(dv);
      next_dp(dp);
    }
    wgmma_wait<C::EarlyDv && !C::General ? 1 : 0>();
    wgmma_pin(dp);
    if constexpr (C::General) drop(dp, dp, kept, p.extras.keep_scale);
    differentiate(dp, scores, delta);
    if constexpr (C::General)
      if (p.dbias) add_bias_gradient(dp, p, work.batch, head, my_key, query);
    pack_tile<T>(gradients, dp);

    store_tile(s.ds[flip] + key_row * 128, C::KeyPanel, query_column / 8, gradients);
    if constexpr (C::Halved) {
      store_tile(s.p[flip], C::KeyPanel, query_column / 8, probabilities);
      fence_async_shared();
      named_barrier_sync(kScores, 128 * C::Groups);
      issue_sum<T, C>(dv, probabilities, p_rows + buffer, grad_columns + stage);
    } else {
      fence_async_shared();
      if constexpr (!C::EarlyDv) issue_sum<T, C>(dv, probabilities, 0, grad_columns + stage);
      named_barrier_sync(kScores, 128 * C::Groups);
    }
    float dq[C::DqColumns / 2];
    issue_dq<T, C>(dq, ds_columns + buffer, k_columns);
    wgmma_wait<1>();
    wgmma_pin(dv);
    if (lane == 0) barrier_arrive(&s.grad_empty[ring.stage]);
    issue_sum<T, C>(dk, gradients, ds_rows + buffer, q_columns + stage);
    Barrier* q_empty = &s.q_empty[ring.stage];
    if (left > 1) ring.next();
    if constexpr (C::Ahead) {
      if (left > 1) barrier_wait(&s.q_full[ring.stage], ring.phase);
      next_scores();
    }
    wgmma_wait<C::Ahead ? 2 : 1>();
    wgmma_pin(dq);

    // dq, in the order of the registers.
    barrier_wait(&s.dq_empty[group], flip ^ 1);
    float4* sums = reinterpret_cast<float4*>(s.dq[group]) + thread;
#pragma unroll
    for (int i = 0; i < C::DqColumns / 8; ++i)
      sums[128 * i] = make_float4(dq[4 * i], dq[4 * i + 1], dq[4 * i + 2], dq[4 * i + 3]);
    fence_async_shared();
    barrier_arrive(&s.dq_full[group]);

    wgmma_wait<0>();
    wgmma_pin(dk);
    if constexpr (C::Ahead) wgmma_pin(scores);
    if (lane == 0) barrier_arrive(q_empty);
    flip ^= 1;
    if (++tile == work.last) tile = work.first, ++head;
  }

  named_barrier_sync(kDone, 128 * C::Groups);  // k and v may be written over
#pragma unroll
  for (int i = 0; i < C::Columns / 2; ++i) dk[i] *= p.scale;
  write_sum<T, C>(&p.dv, s.v, dv, work, group);
  write_sum<T, C>(&p.dk, s.k, dk, work, group);
  if (thread == 0) bulk_wait_read<0>();
}

// --- kernels ---------------------------------------------------------------------------------------------------------

template <class T, int D, bool General>
__global__ void __launch_bounds__(Config<D, General>::Threads, 1) backward(const __grid_constant__ Params p) {
  using C = Config<D, General>;
  static_assert(sizeof(Shared<C>) <= kMostSharedBytes);
  auto& s = *reinterpret_cast<Shared<C>*>(shared_memory());
  const unsigned warp = warp_index();
  if (warp == 0 && elect_one()) {
    barrier_init(&s.k_full, 1), barrier_init(&s.v_full, 1);
    for (int stage = 0; stage < C::Stages; ++stage) {
      barrier_init(&s.q_full[stage], 1 + 32), barrier_init(&s.grad_full[stage], 1);  // q: its copies, and load_rows
      barrier_init(&s.q_empty[stage], 4 * C::Groups), barrier_init(&s.grad_empty[stage], 4 * C::Groups);
    }
    for (int group = 0; group < C::Groups; ++group)
      barrier_init(&s.dq_full[group], 128), barrier_init(&s.dq_empty[group], 1);
    barrier_init_fence();
    p.turns.take(&s.ticket);
  }
  __syncthreads();
  const Work work = find_work<C>(p, p.turns.index(&s.ticket));
  if (warp < 4) {
    registers_decrease<C::ProducerRegisters>();
    if (warp == 0) {
      if (elect_one()) load_tiles<C>(p, s, work);
    } else if (warp == 1) {
      load_rows<C>(p, s, work);
    } else if (elect_one()) {
      add_dq<C>(p, s, work, int(warp) - 2);
    }
  } else {
    registers_increase<C::ConsumerRegisters>();
    consume<T, C>(p, s, work, int(warp) / 4 - 1);
  }
}

// --- entry -----------------------------------------------------------------------------------------------------------

template <class C> int64_t dq_runs(const AttentionArgs& a) {
  return a.batch * a.heads * tiles_of(a.queries, C::Queries) * C::DqRuns;
}

struct Bytes {
  const AttentionBackwardArgs& args;
  template <class T, int D, bool General> int64_t run() const {
    using C = Config<D, General>;
    const int64_t runs = dq_runs<C>(args.forward);
    return runs * C::DqBytes + (args.repeatable ? turn_bytes(runs) : 0);
  }
};

struct Launch {
  const AttentionBackwardArgs& args;
  cudaStream_t stream;

  template <class T, int D, bool General> int run() const {
    using C = Config<D, General>;
    const AttentionArgs& a = args.forward;
    const int64_t runs = dq_runs<C>(a), key_tiles = tiles_of(a.keys, C::Keys),
                  blocks = key_tiles * a.batch * a.kv_heads;
    if (runs >= int64_t(1) << 31 || blocks >= int64_t(1) << 31) return fail(1, "attention: more than 2^31 tiles");
    int code = blocks > 0 ? gradients<T, D, General>(unsigned(blocks)) : 0;
    if (code == 0 && runs > 0) code = queries<T, D, General>(unsigned(runs));
    return code;
  }

  // dk, dv, dbias, and the sums of dq.
  template <class T, int D, bool General> int gradients(unsigned blocks) const {
    using C = Config<D, General>;
    const AttentionArgs& a = args.forward;
    Params p = {};
    p.sight = make_sight(a);
    p.extras = make_extras(a);
    p.lse = a.lse, p.delta = args.delta, p.dq_sum = args.workspace, p.dbias = args.dbias;
    if (args.repeatable) p.turns.words = reinterpret_cast<uint32_t*>(args.workspace + dq_runs<C>(a) * C::DqFloats);
    for (int d = 0; d < 3; ++d) p.lse_strides[d] = a.lse_strides[d];
    for (int d = 0; d < 4; ++d) p.dbias_strides[d] = args.dbias_strides[d];
    p.heads = int(a.heads), p.kv_heads = int(a.kv_heads);
    p.key_tiles = int(tiles_of(a.keys, C::Keys)), p.query_tiles = int(tiles_of(a.queries, C::Queries));
    p.scale = float(a.scale), p.scale_log2 = General ? 1.0f : p.extras.scale_log2;
    int code = map_tiles(p.k, a, a.k, a.k_strides, a.kv_heads, a.keys, C::Keys);
    if (code == 0) code = map_tiles(p.v, a, a.v, a.v_strides, a.kv_heads, a.keys, C::Keys);
    if (code == 0) code = map_tiles(p.dk, a, args.dk, args.dk_strides, a.kv_heads, a.keys, 64);
    if (code == 0) code = map_tiles(p.dv, a, args.dv, args.dv_strides, a.kv_heads, a.keys, 64);
    if (code == 0 && a.queries > 0) code = map_tiles(p.q, a, a.q, a.q_strides, a.heads, a.queries, C::Queries);
    if (code == 0 && a.queries > 0)
      code = map_tiles(p.grad_o, a, args.grad_o, args.grad_o_strides, a.heads, a.queries, C::Queries);
    if (code != 0) return code;
    LaunchShape shape;
    shape.grid = dim3(blocks), shape.block = dim3(C::Threads), shape.shared_bytes = sizeof(Shared<C>);
    return launch(shape, stream, backward<T, D, General>, p);
  }

  // dq of its sums.
  template <class T, int D, bool General> int queries(unsigned runs) const {
    using C = Config<D, General>;
    const AttentionArgs& a = args.forward;
    DqParams p = {};
    p.dq_sum = args.workspace, p.dq = args.dq, p.scale = float(a.scale);
    for (int d = 0; d < 3; ++d) p.strides[d] = args.dq_strides[d];
    p.heads = int(a.heads), p.queries = int(a.queries), p.head_dim = int(a.head_dim);
    p.query_tiles = int(tiles_of(a.queries, C::Queries));
    LaunchShape shape;
    shape.grid = dim3(runs), shape.block = dim3(128);
    return launch(shape, stream, convert_dq<T, D, General>, p);
  }
};

// Calls what.run<element type, D, General>() for the kernel that serves these arguments.
template <class What> auto choose(const AttentionBackwardArgs& args, const What& what) {
  const AttentionArgs& a = args.forward;
  const auto of_type = [&](auto type) {
    using T = decltype(type);
    const bool general = has_extras(a) || args.dbias;
    if (a.head_dim <= 64) return general ? what.template run<T, 64, true>() : what.template run<T, 64, false>();
    if (a.head_dim <= 128) return general ? what.template run<T, 128, true>() : what.template run<T, 128, false>();
    return general ? what.template run<T, 256, true>() : what.template run<T, 256, false>();
  };
  return a.dtype == SHARDLIB_BF16 ? of_type(bf16()) : of_type(fp16());
}

}  // namespace
}  // namespace shardlib

// The bytes that args->workspace must have, zeros on entry.
extern "C" int64_t shardlib_attention_backward_workspace(const AttentionBackwardArgs* args) {
  return shardlib::choose(*args, shardlib::Bytes{*args});
}

// Writes dq, dk and dv and adds to dbias, with delta as shardlib_attention_delta wrote it; 0, or an error code with its
// text in shardlib_last_error().
extern "C" int shardlib_attention_backward(const AttentionBackwardArgs* args, cudaStream_t stream) {
  using namespace shardlib;
  if (int code = check_backward(*args)) return code;
  if (args->forward.batch == 0 || args->forward.heads == 0) return 0;
  return choose(*args, Launch{*args, stream});
}
