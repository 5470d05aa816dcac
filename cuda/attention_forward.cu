// Attention forward for sm_90a: o = softmax(scale q k^T + ...) v and the log-sum-exp of every row, bf16 and fp16.
//
// The shape is FlashAttention-3's (Shah et al. 2024). One producer warp loads tiles of q, k and v with TMA; two or
// three consumer warpgroups own 64 queries each and walk the keys from the last to the first. A warpgroup issues the
// scores of the next keys before the values of the last ones, and the warpgroups take turns at the tensor cores, so
// that the softmax of one runs under the products of another. CTAs are persistent and take the longest tiles first.
//
// Shapes of a CTA: q [Rows, D], k and v [Keys, D] per stage, scores [64, Keys] and o [64, D] in each warpgroup's
// registers. D is the head dim rounded up to 64, 96, 128 or 256: TMA reads zeros beyond the tensors' last column.
#include "attention_forward_tiles.h"
#include "attention_order.cuh"
#include "attention_ring.cuh"
#include "attention_rows.cuh"

namespace shardlib {
namespace {

// --- configuration -------------------------------------------------------------------------------------------------

// Queries and keys per tile. A general kernel looks at every logit by itself, and keeps fewer of them in registers.
template <int D_, bool General_> struct Config {
  static constexpr int D = D_;
  static constexpr bool General = General_;
  static constexpr int Consumers = D == 64 && !General ? 3 : 2;
  static constexpr int Rows = 64 * Consumers;
  static constexpr int Keys = kForwardKeys<D, General>;
  static constexpr int Stages = 2;
  static constexpr int Threads = 128 * (Consumers + 1);
  static constexpr int ConsumerRegisters = Consumers == 3 ? 160 : 240;
  static constexpr int ProducerRegisters = Consumers == 3 ? 32 : 24;
  // A tile lies in shared memory as panels of 64 columns, 128 bytes a row, swizzled.
  static constexpr int Panels = (D + 63) / 64;
  static constexpr int QPanel = Rows * 128, KvPanel = Keys * 128;
  static constexpr int QBytes = Panels * QPanel, KvBytes = Panels * KvPanel;
  static constexpr int BarriersAt = QBytes + 2 * Stages * KvBytes;
  static constexpr int SharedBytes = BarriersAt + int(sizeof(Barrier)) * (2 + 4 * Stages);
  static_assert(SharedBytes <= kMostSharedBytes);
  static_assert(registers_fit(Consumers, ConsumerRegisters, ProducerRegisters));
};

// Named barriers: one per warpgroup for its turn at the tensor cores, one for its output.
constexpr unsigned kTurn = 1, kOutput = 4;

// --- arguments -----------------------------------------------------------------------------------------------------

struct Params {
  TensorMap q, k, v, o;
  Sight sight;
  Extras extras;
  void* o_base;
  float* lse;
  int64_t o_strides[3], lse_strides[3];
  WorkOrder order;
  int kv_group, head_dim;  // query heads per key head
  float scale_log2;        // scale * log2(e); 1 in a general kernel, whose logits are scaled one by one
};

// Where things lie in a CTA's shared memory.
template <class C> struct Shared {
  unsigned char* q;
  Ring<C> k, v;
  Barrier *q_full, *q_empty;

  __device__ __forceinline__ explicit Shared(unsigned char* base) {
    auto* barriers = reinterpret_cast<Barrier*>(base + C::BarriersAt);
    q = base, q_full = barriers, q_empty = barriers + 1, barriers += 2;
    k.tiles = base + C::QBytes, k.full = barriers, k.empty = barriers + C::Stages, barriers += 2 * C::Stages;
    v.tiles = k.tiles + C::Stages * C::KvBytes, v.full = barriers, v.empty = barriers + C::Stages;
  }
};

// --- kernel --------------------------------------------------------------------------------------------------------

// The key tiles [first, last) that a tile of queries sees something of.
template <class C> __device__ __forceinline__ void key_tiles(const Sight& sight, int row, int& first, int& last) {
  const int end = sight.end(min(row + C::Rows, sight.queries) - 1), begin = sight.begin(row);
  first = begin / C::Keys;
  last = end > begin ? (end + C::Keys - 1) / C::Keys : first;
}

template <class C> __device__ __forceinline__ void produce(const Params& p, Shared<C> s) {
  unsigned q_phase = 0;
  Work work;
  for (int round = 0; take_work(p.order, C::Rows, round, work); ++round) {
    if (work.row < 0) continue;
    int first, last;
    key_tiles<C>(p.sight, work.row, first, last);
    if (first == last) continue;
    const int kv_head = work.head / p.kv_group;
    barrier_wait(s.q_empty, q_phase ^ 1);
    barrier_arrive_expect(s.q_full, C::QBytes);
    load_panels<C>(s.q, C::QPanel, &p.q, s.q_full, work.row, work.head, work.batch);
    q_phase ^= 1;
    load_stage(s.k, &p.k, last - 1, kv_head, work.batch);
    for (int tile = last - 2; tile >= first; --tile) {
      load_stage(s.k, &p.k, tile, kv_head, work.batch);
      load_stage(s.v, &p.v, tile + 1, kv_head, work.batch);
    }
    load_stage(s.v, &p.v, first, kv_head, work.batch);
  }
}

// The warpgroups issue their products in turn: barrier kTurn + g is group g's, which the group before it arrives at.
template <class C> struct Turn {
  unsigned mine, after;
  __device__ __forceinline__ explicit Turn(int group)
      : mine(kTurn + unsigned(group)), after(kTurn + unsigned(group + 1 == C::Consumers ? 0 : group + 1)) {
    if (group == 0) named_barrier_arrive(mine, 256);
  }
  __device__ __forceinline__ void take() const { named_barrier_sync(mine, 256); }
  __device__ __forceinline__ void pass() const { named_barrier_arrive(after, 256); }
};

// scores = q k^T, one commit group.
template <class T, class C>
__device__ __forceinline__ void issue_scores(float (&scores)[C::Keys / 2], uint64_t q, uint64_t k) {
  wgmma_pin(scores);
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < C::D / 16; ++step) {
    const int inside = step % 4 * 32;
    wgmma<T, C::Keys>(scores, q + ((step / 4 * C::QPanel + inside) >> 4), k + ((step / 4 * C::KvPanel + inside) >> 4),
                      step > 0);
  }
  wgmma_commit();
}

// o += probabilities v, one commit group.
template <class T, class C>
__device__ __forceinline__ void issue_values(float (&o)[C::D / 2], uint32_t (&probabilities)[C::Keys / 16][4],
                                             uint64_t v) {
  wgmma_pin(o);
  wgmma_pin(probabilities);
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < C::Keys / 16; ++step)
    wgmma<T, C::D, Major::mn>(o, probabilities[step], v + ((step * 2048) >> 4), true);
  wgmma_commit();
}

// Normalizes and writes a warpgroup's rows of o, through its rows of q in shared memory, and its lse.
template <class T, class C>
__device__ __forceinline__ void write_rows(const Params& p, const Work& work, unsigned char* q_rows,
                                           float (&o)[C::D / 2], RowState& rows, int group, int row, Barrier* q_empty) {
  const int thread = int(threadIdx.x) % 128, warp = thread / 32, lane = thread % 32;
  finish_rows(rows);
  float* lse = p.lse + work.batch * p.lse_strides[0] + work.head * p.lse_strides[1];
#pragma unroll
  for (int r = 0; r < 2; ++r)
    if (lane % 4 == 0 && row + 8 * r < p.sight.queries)
      lse[(row + 8 * r) * p.lse_strides[2]] = row_lse(rows, r, p.scale_log2);
  scale_rows(
      o, make_float2(rows.sum[0] > 0.0f ? 1.0f / rows.sum[0] : 0.0f, rows.sum[1] > 0.0f ? 1.0f / rows.sum[1] : 0.0f));
  // Lane i holds the address of row i % 8 of matrix i / 8: rows 0-7 and 8-15 of 8 columns, then of the next 8.
  const int matrix = lane / 8, my_row = warp * 16 + matrix % 2 * 8 + lane % 8;
#pragma unroll
  for (int i = 0; i < C::D / 16; ++i) {
    const int chunk = 2 * i % 8 + matrix / 2;
    const uint32_t words[4] = {pack<T>(o[8 * i], o[8 * i + 1]), pack<T>(o[8 * i + 2], o[8 * i + 3]),
                               pack<T>(o[8 * i + 4], o[8 * i + 5]), pack<T>(o[8 * i + 6], o[8 * i + 7])};
    stmatrix_x4(q_rows + i / 4 * C::QPanel + my_row * 128 + ((chunk ^ my_row % 8) * 16), words);
  }
  fence_async_shared();
  named_barrier_sync(kOutput + group, 128);
  if (thread == 0) {
#pragma unroll
    for (int panel = 0; panel < C::Panels; ++panel)
      tma_store(&p.o, q_rows + panel * C::QPanel, panel * 64, work.row + 64 * group, work.head, work.batch);
    bulk_commit();
    bulk_wait_read<0>();
    barrier_arrive(q_empty);
  }
}

// A tile of queries that see no key at all: o = 0, lse = -inf.
template <class T, class C>
__device__ __forceinline__ void write_nothing(const Params& p, const Work& work, int group) {
  const int thread = int(threadIdx.x) % 128, chunks = p.head_dim / 8;
  auto* o = static_cast<T*>(p.o_base) + work.batch * p.o_strides[0] + work.head * p.o_strides[1];
  const int row = work.row + 64 * group, rows = min(64, p.sight.queries - row);
  for (int i = thread; i < rows * chunks; i += 128)
    store_16(o + (row + i / chunks) * p.o_strides[2] + i % chunks * 8, make_uint4(0, 0, 0, 0));
  if (thread < rows)
    p.lse[work.batch * p.lse_strides[0] + work.head * p.lse_strides[1] + (row + thread) * p.lse_strides[2]] =
        SHARDLIB_MINUS_INFINITY;
}

// A warpgroup's queries from `top` on against the key tiles [first, last). Leaves o to be normalized.
template <class T, class C>
__device__ __forceinline__ void attend(const Params& p, Ring<C>& k, Ring<C>& v, const Turn<C>& turn, uint64_t q_tile,
                                       int top, int row, int first, int last, float (&o)[C::D / 2], RowState& rows) {
  const uint64_t k_tile = wgmma_descriptor(k.tiles, 16, 1024), v_tile = wgmma_descriptor(v.tiles, C::KvPanel, 1024);
  const int column = int(threadIdx.x) % 4 * 2;
  float scores[C::Keys / 2];
  uint32_t probabilities[C::Keys / 16][4];

  uint64_t k_full = full_stage(k, k_tile);
  turn.take();
  issue_scores<T, C>(scores, q_tile, k_full);
  turn.pass();
  wgmma_wait<0>();
  wgmma_pin(scores);
  release_stage(k);
  if (!p.sight.whole(top, 64, (last - 1) * C::Keys, C::Keys))
    mask_scores(scores, p.sight, row, (last - 1) * C::Keys + column);
  softmax(scores, rows, p.scale_log2);
  pack_scores<T>(probabilities, scores);

#pragma unroll 1
  for (int tile = last - 2; tile >= first; --tile) {
    k_full = full_stage(k, k_tile);
    turn.take();
    issue_scores<T, C>(scores, q_tile, k_full);
    issue_values<T, C>(o, probabilities, full_stage(v, v_tile));
    turn.pass();
    wgmma_wait<1>();
    wgmma_pin(scores);
    release_stage(k);
    if (!p.sight.whole(top, 64, tile * C::Keys, C::Keys)) mask_scores(scores, p.sight, row, tile * C::Keys + column);
    const float2 shrink = softmax(scores, rows, p.scale_log2);
    wgmma_wait<0>();
    wgmma_pin(o);
    release_stage(v);
    pack_scores<T>(probabilities, scores);
    scale_rows(o, shrink);
  }

  issue_values<T, C>(o, probabilities, full_stage(v, v_tile));
  wgmma_wait<0>();
  wgmma_pin(o);
  release_stage(v);
}

// The same with everything that can be added to a logit, and dropout: simpler, and slower.
template <class T, class C>
__device__ __forceinline__ void attend_general(const Params& p, Ring<C>& k, Ring<C>& v, const Turn<C>& turn,
                                               uint64_t q_tile, const RowExtras (&extras)[2], int row, int first,
                                               int last, float (&o)[C::D / 2], RowState& rows) {
  const uint64_t k_tile = wgmma_descriptor(k.tiles, 16, 1024), v_tile = wgmma_descriptor(v.tiles, C::KvPanel, 1024);
  const int column = int(threadIdx.x) % 4 * 2;
  float scores[C::Keys / 2];
  uint32_t probabilities[C::Keys / 16][4];
#pragma unroll 1
  for (int tile = last - 1; tile >= first; --tile) {
    const uint64_t k_full = full_stage(k, k_tile);
    turn.take();
    issue_scores<T, C>(scores, q_tile, k_full);
    turn.pass();
    wgmma_wait<0>();
    wgmma_pin(scores);
    release_stage(k);
    general_scores(scores, p.extras, extras, p.sight, row, tile * C::Keys + column);
    scale_rows(o, softmax(scores, rows, 1.0f));
    if (p.extras.key) drop(scores, p.extras, extras, tile * C::Keys + column);
    pack_scores<T>(probabilities, scores);
    issue_values<T, C>(o, probabilities, full_stage(v, v_tile));
    wgmma_wait<0>();
    wgmma_pin(o);
    release_stage(v);
  }
}

template <class T, class C> __device__ __forceinline__ void consume(const Params& p, Shared<C> s, int group) {
  const int thread = int(threadIdx.x) % 128;
  unsigned char* q_rows = s.q + group * 64 * 128;
  const uint64_t q_tile = wgmma_descriptor(q_rows, 16, 1024);
  const Turn<C> turn(group);
  unsigned q_phase = 0;
  Work work;
  for (int round = 0; take_work(p.order, C::Rows, round, work); ++round) {
    if (work.row < 0) continue;
    int first, last;
    key_tiles<C>(p.sight, work.row, first, last);
    if (first == last) {
      write_nothing<T, C>(p, work, group);
      continue;
    }
    const int top = work.row + 64 * group, row = top + thread / 32 * 16 + thread % 32 / 4;
    RowState rows = {{SHARDLIB_MINUS_INFINITY, SHARDLIB_MINUS_INFINITY}, {0.0f, 0.0f}};
    float o[C::D / 2];
#pragma unroll
    for (int i = 0; i < C::D / 2; ++i) o[i] = 0.0f;
    barrier_wait(s.q_full, q_phase);
    q_phase ^= 1;
    if constexpr (C::General) {
      const int end = p.sight.queries - 1;  // rows beyond the last query read its features
      const RowExtras extras[2] = {row_extras(p.extras, work.batch, work.head, min(row, end)),
                                   row_extras(p.extras, work.batch, work.head, min(row + 8, end))};
      attend_general<T, C>(p, s.k, s.v, turn, q_tile, extras, row, first, last, o, rows);
    } else {
      attend<T, C>(p, s.k, s.v, turn, q_tile, top, row, first, last, o, rows);
    }
    write_rows<T, C>(p, work, q_rows, o, rows, group, row, s.q_empty);
  }
}

template <class T, int D, bool General>
__global__ void __launch_bounds__(Config<D, General>::Threads, 1) forward(const __grid_constant__ Params p) {
  using C = Config<D, General>;
  const Shared<C> s(shared_memory());
  const unsigned warp = warp_index();
  if (warp == 0 && elect_one()) {
    tma_prefetch(&p.q), tma_prefetch(&p.k), tma_prefetch(&p.v), tma_prefetch(&p.o);
    barrier_init(s.q_full, 1);
    barrier_init(s.q_empty, C::Consumers);
    for (int stage = 0; stage < C::Stages; ++stage) {
      barrier_init(&s.k.full[stage], 1), barrier_init(&s.v.full[stage], 1);
      barrier_init(&s.k.empty[stage], C::Consumers * 4), barrier_init(&s.v.empty[stage], C::Consumers * 4);
    }
    barrier_init_fence();
  }
  __syncthreads();
  if (warp < 4) {
    registers_decrease<C::ProducerRegisters>();
    if (warp == 0 && elect_one()) produce<C>(p, s);
  } else {
    registers_increase<C::ConsumerRegisters>();
    consume<T, C>(p, s, int(warp) / 4 - 1);
  }
}

// --- entry ---------------------------------------------------------------------------------------------------------

template <class T, int D, bool General> int run(const AttentionArgs& a, cudaStream_t stream) {
  using C = Config<D, General>;
  Params p = {};
  p.sight = make_sight(a);
  p.extras = make_extras(a);
  p.o_base = a.o, p.lse = a.lse;
  for (int d = 0; d < 3; ++d) p.o_strides[d] = a.o_strides[d], p.lse_strides[d] = a.lse_strides[d];
  p.kv_group = int(a.heads / a.kv_heads), p.head_dim = int(a.head_dim);
  p.scale_log2 = General ? 1.0f : p.extras.scale_log2;
  if (int code = make_order(p.order, a, C::Rows)) return code;
  int code = map_tiles(p.q, a, a.q, a.q_strides, a.heads, a.queries, C::Rows);
  if (code == 0) code = map_tiles(p.o, a, a.o, a.o_strides, a.heads, a.queries, 64);
  if (code == 0 && a.keys > 0) code = map_tiles(p.k, a, a.k, a.k_strides, a.kv_heads, a.keys, C::Keys);
  if (code == 0 && a.keys > 0) code = map_tiles(p.v, a, a.v, a.v_strides, a.kv_heads, a.keys, C::Keys);
  if (code != 0) return code;
  LaunchShape shape;
  shape.grid = dim3(unsigned(min(p.order.tiles, multiprocessor_count())));
  shape.block = dim3(C::Threads);
  shape.shared_bytes = C::SharedBytes;
  return launch(shape, stream, forward<T, D, General>, p);
}

template <class T> int choose(const AttentionArgs& a, cudaStream_t stream) {
  if (has_extras(a)) {
    if (a.head_dim <= 64) return run<T, 64, true>(a, stream);
    if (a.head_dim <= 128) return run<T, 128, true>(a, stream);
    return run<T, 256, true>(a, stream);
  }
  if (a.head_dim <= 64) return run<T, 64, false>(a, stream);
  if (a.head_dim <= 96) return run<T, 96, false>(a, stream);
  if (a.head_dim <= 128) return run<T, 128, false>(a, stream);
  return run<T, 256, false>(a, stream);
}

}  // namespace
}  // namespace shardlib

// Writes o and lse; 0, or an error code with its text in shardlib_last_error().
extern "C" int shardlib_attention_forward(const AttentionArgs* args, cudaStream_t stream) {
  using namespace shardlib;
  if (int code = check_attention(*args)) return code;
  if (args->batch == 0 || args->heads == 0 || args->queries == 0) return 0;
  return args->dtype == SHARDLIB_BF16 ? choose<bf16>(*args, stream) : choose<fp16>(*args, stream);
}
