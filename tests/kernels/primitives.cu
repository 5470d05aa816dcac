// Small kernels over the primitives, for the emulation and for nvcc: products, tiles, fragments, flags, and misuse.
#include <type_traits>

#include "philox.cuh"

namespace shardlib {
namespace {

// --- c [64, N] = a [64, 64] b [64, N] on one warpgroup -------------------------------------------------------------

enum class From { k_major, mn_major, registers };  // where a lies; b lies along k or along n

template <class T, int N, From A, Major B>
__global__ void __launch_bounds__(128, 1)
    product(const __grid_constant__ TensorMap a_map, const __grid_constant__ TensorMap b_map, float* c) {
  unsigned char *a = shared_memory(), *b = a + 64 * 128;
  constexpr int b_panels = B == Major::k ? 1 : (N + 63) / 64, b_panel = B == Major::k ? N * 128 : 64 * 128;
  auto* full = reinterpret_cast<Barrier*>(b + b_panels * b_panel);
  const int warp = int(warp_index()), lane = int(lane_index());
  if (threadIdx.x == 0) barrier_init(full, 1), barrier_init_fence();
  __syncthreads();
  if (threadIdx.x == 0) {
    barrier_arrive_expect(full, 64 * 128 + b_panels * b_panel);
    tma_load(a, &a_map, full, 0, 0, 0, 0);
    for (int panel = 0; panel < b_panels; ++panel) tma_load(b + panel * b_panel, &b_map, full, panel * 64, 0, 0, 0);
  }
  barrier_wait(full, 0);
  uint32_t fragments[4][4];
  if (A == From::registers)
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      const int row = warp * 16 + lane % 16, chunk = 2 * step + lane / 16;
      ldmatrix_x4(fragments[step], a + row * 128 + ((chunk ^ row % 8) * 16));
    }
  float d[N / 2];
#pragma unroll
  for (int i = 0; i < N / 2; ++i) d[i] = 0.0f;
  wgmma_pin(d);
  if (A == From::registers) wgmma_pin(fragments);
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < 4; ++step) {
    const uint64_t b_tile =
        B == Major::k ? wgmma_descriptor(b + step * 32, 16, 1024) : wgmma_descriptor(b + step * 2048, b_panel, 1024);
    if constexpr (A == From::registers)
      wgmma<T, N, B>(d, fragments[step], b_tile, true);
    else if constexpr (A == From::k_major)
      wgmma<T, N, Major::k, B>(d, wgmma_descriptor(a + step * 32, 16, 1024), b_tile, true);
    else
      wgmma<T, N, Major::mn, B>(d, wgmma_descriptor(a + step * 2048, 64 * 128, 1024), b_tile, true);
  }
  wgmma_commit();
  wgmma_wait<0>();
  wgmma_pin(d);
#pragma unroll
  for (int i = 0; i < N / 2; ++i)
    c[(warp * 16 + lane / 4 + i / 2 % 2 * 8) * N + i / 4 * 8 + lane % 4 * 2 + i % 2] = d[i];
}

template <class T, int N, From A, Major B> int run_product(const void* a, const void* b, float* c) {
  const TileType type = std::is_same_v<T, bf16> ? TileType::bf16 : TileType::fp16;
  TensorMap a_map, b_map;
  constexpr unsigned inner = B == Major::k ? 64 : N, outer = B == Major::k ? N : 64;
  const uint64_t a_sizes[4] = {64, 64, 1, 1}, a_strides[3] = {128, 16, 16};
  const uint64_t b_sizes[4] = {inner, outer, 1, 1}, b_strides[3] = {2 * inner, 16, 16};
  const uint32_t a_box[4] = {64, 64, 1, 1}, b_box[4] = {64, outer, 1, 1};
  int code = make_tensor_map(a_map, type, a, a_sizes, a_strides, a_box);
  if (code == 0) code = make_tensor_map(b_map, type, b, b_sizes, b_strides, b_box);
  if (code != 0) return code;
  LaunchShape shape;
  shape.grid = dim3(1), shape.block = dim3(128), shape.shared_bytes = 64 * 128 + 256 * 128 + 64;
  return launch(shape, nullptr, product<T, N, A, B>, a_map, b_map, c);
}

template <class T, int N> int choose_product(int from, int major, const void* a, const void* b, float* c) {
  if (major == 0) {
    if (from == 0) return run_product<T, N, From::k_major, Major::k>(a, b, c);
    if (from == 1) return run_product<T, N, From::mn_major, Major::k>(a, b, c);
    return run_product<T, N, From::registers, Major::k>(a, b, c);
  }
  if (from == 0) return run_product<T, N, From::k_major, Major::mn>(a, b, c);
  if (from == 1) return run_product<T, N, From::mn_major, Major::mn>(a, b, c);
  return run_product<T, N, From::registers, Major::mn>(a, b, c);
}

#if defined(__CUDACC__)  // every width; in the emulation N is a number like any other
#define WIDTH(N)                                                                                   \
  template int run_product<bf16, N, From::registers, Major::mn>(const void*, const void*, float*); \
  template int run_product<fp16, N, From::k_major, Major::k>(const void*, const void*, float*);
WIDTH(32) WIDTH(64) WIDTH(80) WIDTH(144) WIDTH(176) WIDTH(256)
#endif

// --- a tile there and back -----------------------------------------------------------------------------------------

// Loads a box at (x, y, z, w), writes its raw bytes to `raw`, and stores it at the same place of another tensor.
__global__ void tile(const __grid_constant__ TensorMap from, const __grid_constant__ TensorMap to, uint4* raw, int bytes,
                     int x, int y, int z, int w) {
  unsigned char* s = shared_memory();
  auto* full = reinterpret_cast<Barrier*>(s + 32768);
  if (threadIdx.x == 0) {
    tma_prefetch(&from);
    barrier_init(full, 1), barrier_init_fence();
    barrier_arrive_expect(full, unsigned(bytes));
    tma_load(s, &from, full, x, y, z, w);
  }
  __syncthreads();
  barrier_wait(full, 0);
  for (int i = int(threadIdx.x); i < bytes / 16; i += int(blockDim.x)) raw[i] = *reinterpret_cast<uint4*>(s + 16 * i);
  __syncthreads();
  if (threadIdx.x == 0) {
    tma_store(&to, s, x, y, z, w);
    bulk_commit();
    bulk_wait<0>();
  }
}

// sum += in, of so many floats.
__global__ void add_run(const float* in, float* sum, int floats) {
  auto* s = reinterpret_cast<float*>(shared_memory());
  for (int i = int(threadIdx.x); i < floats; i += int(blockDim.x)) s[i] = in[i];
  fence_async_shared();
  __syncthreads();
  if (threadIdx.x == 0) {
    bulk_reduce_add(sum, s, unsigned(4 * floats));
    bulk_commit();
    bulk_wait_read<0>();
  }
}

// --- fragments of a warp -------------------------------------------------------------------------------------------

// c [16, 16] = a [16, 16] b [16, 16], b given as it is or as its transpose; back receives a through stmatrix.
template <class T> __global__ void fragments(const T* a, const T* b, float* c, T* back, int b_transposed) {
  unsigned char* s = shared_memory();
  const int lane = int(lane_index());
  cp_async_16(s + lane * 16, reinterpret_cast<const unsigned char*>(a) + lane * 16);
  cp_async_commit();
  cp_async_16(s + 512 + lane * 16, reinterpret_cast<const unsigned char*>(b) + lane * 16, 16);
  cp_async_commit();
  cp_async_wait<0>();
  __syncwarp();
  uint32_t left[4], right[4];
  float d[2][4] = {};
  ldmatrix_x4(left, s + lane % 16 * 32 + lane / 16 * 16);
  if (b_transposed)
    ldmatrix_x4(right, s + 512 + (lane % 8 + lane / 16 * 8) * 32 + lane / 8 % 2 * 16);  // rows are columns of b
  else
    ldmatrix_x4_transposed(right, s + 512 + lane % 16 * 32 + lane / 16 * 16);
  for (int half = 0; half < 2; ++half) {
    const uint32_t columns[2] = {right[2 * half], right[2 * half + 1]};
    mma_16816<T>(d[half], left, columns);
    for (int i = 0; i < 4; ++i) c[(lane / 4 + i / 2 * 8) * 16 + 8 * half + lane % 4 * 2 + i % 2] = d[half][i];
  }
  stmatrix_x4(s + 1024 + lane % 16 * 32 + lane / 16 * 16, left);
  __syncwarp();
  reinterpret_cast<uint4*>(back)[lane] = *reinterpret_cast<uint4*>(s + 1024 + lane * 16);
}

// --- numbers -------------------------------------------------------------------------------------------------------

// Word i of `packed` is in[2 i], in[2 i + 1] as T; back holds them as floats again; single the same one by one.
template <class T> __global__ void convert(const float* in, uint32_t* packed, float* back, T* single, int pairs) {
  for (int i = int(threadIdx.x); i < pairs; i += int(blockDim.x)) {
    packed[i] = pack<T>(in[2 * i], in[2 * i + 1]);
    const float2 two = unpack<T>(packed[i]);
    back[2 * i] = two.x, back[2 * i + 1] = two.y;
    single[2 * i] = from_float<T>(in[2 * i]), single[2 * i + 1] = from_float<T>(to_float(from_float<T>(in[2 * i + 1])));
  }
}

__global__ void random_words(int64_t seed, int64_t counter, int64_t first, uint32_t* out) {
  const int64_t index = first + int64_t(threadIdx.x);
  out[threadIdx.x] =
      philox_word(philox({uint64_t(seed), uint64_t(counter)}, uint64_t(index) >> 2), unsigned(index & 3));
}

__global__ void warp_words(int* out) {
  const int lane = int(lane_index());
  int* mine = out + 5 * lane;
  SHARED(int, seven);
  if (lane == 31) seven = 7;
  __syncwarp();
  mine[0] = __shfl_sync(kFullMask, lane, 5), mine[1] = __shfl_sync(kFullMask, lane, 3, 8);
  mine[2] = __shfl_xor_sync(kFullMask, lane, 9), mine[3] = elect_one(), mine[4] = seven;
}

// --- flags between CTAs --------------------------------------------------------------------------------------------

// CTA 0 sends 64 words and a flag; the others wait for the flag and count the words that have not arrived.
__global__ void send(uint4* data, uint32_t* flag, uint32_t* missing, int released) {
  if (blockIdx.x == 0) {
    store_16(data + threadIdx.x, make_uint4(1, 1, 1, 1));
    if (released) __syncthreads();
    if (threadIdx.x == 0) {
      if (released)
        store_release_system(flag, 1u);
      else
        store_relaxed_system(flag, 1u);
    }
    return;
  }
  while (load_acquire_system(flag) == 0) pause_ns(20);
  if (load_16(data + threadIdx.x).x != 1) atomicAdd(missing, 1u);
}

// The order in which warps get here.
__global__ void queue(uint32_t* next, uint32_t* order) {
  if (lane_index() == 0) order[warp_index()] = add_acquire_release_device(next, 1u);
}

// Waits for a flag that nobody raises; writes how long it took to give up.
__global__ void give_up(const uint32_t* flag, uint64_t limit_ns, uint64_t* waited) {
  const uint64_t start = timer_ns();
  while (load_acquire_system(flag) == 0 && timer_ns() - start < limit_ns) pause_ns(20);
  *waited = timer_ns() - start;
}

#if !defined(__CUDACC__)
// --- misuse: what the hardware forbids or what never ends ----------------------------------------------------------

__global__ void __launch_bounds__(128, 1) misuse(int what, float* global) {
  unsigned char* s = shared_memory();  // 16 KiB
  auto* barrier = reinterpret_cast<Barrier*>(s);
  float d[32] = {};
  uint32_t words[4] = {};
  const int thread = int(threadIdx.x);
  if (thread == 0 && what != 1) barrier_init(barrier, 1);
  __syncthreads();
  switch (what) {
    case 0: break;
    case 1: barrier_wait(barrier, 0); break;
    case 2:
      if (thread == 0) barrier_arrive_expect(barrier, 16), barrier_arrive(barrier);
      break;
    case 3: barrier_wait(barrier, 0); break;
    case 4:
      if (thread < 96) named_barrier_sync(3, 128);
      break;
    case 5: named_barrier_sync(2, thread < 64 ? 128 : 64); break;
    case 6: named_barrier_sync(16, 128); break;
    case 7:
      if (thread < 16) __syncwarp();
      break;
    case 8:
      if (thread < 16)
        __syncwarp();
      else
        __shfl_sync(kFullMask, thread, 0);
      break;
    case 9:
      if (thread > 0) __syncwarp(1);
      break;
    case 10:
      wgmma_pin(d);
      wgmma<bf16, 64>(d, wgmma_descriptor(s + 1024, 16, 1024), wgmma_descriptor(s + 1024, 16, 1024), true);
      break;
    case 11:
      wgmma_pin(d), wgmma_fence();
      wgmma<bf16, 64>(d, wgmma_descriptor(s + 1024 * (thread / 64), 16, 1024), wgmma_descriptor(s, 16, 1024), true);
      break;
    case 12:
      wgmma_pin(d), wgmma_fence();
      wgmma<bf16, 64>(d, wgmma_descriptor(s + 15 * 1024, 16, 1024), wgmma_descriptor(s, 16, 1024), true);
      wgmma_commit(), wgmma_wait<0>();
      break;
    case 13: ldmatrix_x4(words, s + 8); break;
    case 14: cp_async_16(s + 16 * 1024, global); break;
    case 15: cp_async_16(s, global + 1); break;
    case 16: store_16(global + 1, make_uint4(0, 0, 0, 0)); break;
    case 17:
      if (thread == 0) s[16 * 1024 + 40] = 1;
      break;
    case 18:
      if (thread == 0) bulk_reduce_add(global, reinterpret_cast<float*>(s + 1024), 1024), bulk_commit();
      break;
    case 19:
      if (thread == 0) bulk_reduce_add(global, reinterpret_cast<float*>(s + 1024), 24);
      break;
    case 20:
      while (load_acquire_system(reinterpret_cast<uint32_t*>(global)) == 7) {
      }
      break;
    case 21:
      while (load_acquire_system(reinterpret_cast<uint32_t*>(global)) == 7) pause_ns(20);
      break;
    case 22:
      wgmma_pin(d), wgmma_fence();
      wgmma<bf16, 64>(d, wgmma_descriptor(s + 1024, 16, 1024), wgmma_descriptor(s + 1024, 16, 1024), true);
      wgmma_commit();
      break;  // no wait
    case 23: {
      uint32_t a[1][4] = {};
      wgmma_pin(d), wgmma_fence();
      wgmma<bf16, 64>(d, a[0], wgmma_descriptor(s + 1024, 16, 1024), true);
      break;
    }
    case 24: {
      uint32_t a[1][4] = {};
      wgmma_pin(d), wgmma_pin(a);
      a[0][2] = 1;
      wgmma_fence();
      wgmma<bf16, 64>(d, a[0], wgmma_descriptor(s + 1024, 16, 1024), true);
      break;
    }
    case 25:
      wgmma_pin(d);
      d[5] = 1;
      wgmma_fence();
      wgmma<bf16, 64>(d, wgmma_descriptor(s + 1024, 16, 1024), wgmma_descriptor(s + 1024, 16, 1024), true);
      break;
    case 26: emulation::use_alias(); break;
    case 27:
      fence_alias(), emulation::use_alias();
      __syncthreads();
      break;
  }
  if (what == 22) global[thread] = d[0];
}
#endif

}  // namespace
}  // namespace shardlib

// --- entries -------------------------------------------------------------------------------------------------------

using namespace shardlib;

static LaunchShape shape_of(int ctas, int threads, unsigned shared_bytes, bool cooperative = false) {
  LaunchShape shape;
  shape.grid = dim3(unsigned(ctas)), shape.block = dim3(unsigned(threads));
  shape.shared_bytes = shared_bytes, shape.cooperative = cooperative;
  return shape;
}

extern "C" int test_product(int64_t fp16_, int64_t n, int64_t from, int64_t major, const void* a, const void* b,
                            float* c) {
  if (fp16_) return choose_product<fp16, 128>(int(from), int(major), a, b, c);
  if (n == 48) return choose_product<bf16, 48>(int(from), int(major), a, b, c);
  return choose_product<bf16, 96>(int(from), int(major), a, b, c);
}

extern "C" int test_tile(int64_t fp16_, const uint64_t (&sizes)[4], const uint64_t (&strides)[3],
                         const uint32_t (&box)[4], const int32_t* at, const void* from, void* to, void* raw) {
  const TileType type = fp16_ ? TileType::fp16 : TileType::bf16;
  TensorMap source, target;
  int code = make_tensor_map(source, type, from, sizes, strides, box);
  if (code == 0) code = make_tensor_map(target, type, to, sizes, strides, box);
  if (code != 0) return code;
  const int bytes = int(box[0] * box[1] * box[2] * box[3]) * 2;
  return launch(shape_of(1, 64, 32768 + 64), nullptr, tile, source, target, static_cast<uint4*>(raw), bytes, at[0],
                at[1], at[2], at[3]);
}

extern "C" int test_add_run(const float* in, float* sum, int64_t floats) {
  return launch(shape_of(1, 32, 4096), nullptr, add_run, in, sum, int(floats));
}

extern "C" int test_fragments(int64_t fp16_, const void* a, const void* b, float* c, void* back, int64_t b_transposed) {
  const LaunchShape shape = shape_of(1, 32, 2048);
  if (fp16_)
    return launch(shape, nullptr, fragments<fp16>, static_cast<const fp16*>(a), static_cast<const fp16*>(b), c,
                  static_cast<fp16*>(back), int(b_transposed));
  return launch(shape, nullptr, fragments<bf16>, static_cast<const bf16*>(a), static_cast<const bf16*>(b), c,
                static_cast<bf16*>(back), int(b_transposed));
}

extern "C" int test_convert(int64_t fp16_, const float* in, void* packed, float* back, void* single, int64_t pairs) {
  auto* words = static_cast<uint32_t*>(packed);
  if (fp16_)
    return launch(shape_of(1, 32, 0), nullptr, convert<fp16>, in, words, back, static_cast<fp16*>(single), int(pairs));
  return launch(shape_of(1, 32, 0), nullptr, convert<bf16>, in, words, back, static_cast<bf16*>(single), int(pairs));
}

extern "C" int test_random_words(int64_t seed, int64_t counter, int64_t first, uint32_t* out) {
  return launch(shape_of(1, 64, 0), nullptr, random_words, seed, counter, first, out);
}
extern "C" int test_warp_words(int* out) { return launch(shape_of(1, 32, 0), nullptr, warp_words, out); }
extern "C" int test_send(uint4* data, uint32_t* flag, uint32_t* missing, int64_t released) {
  return launch(shape_of(3, 64, 0, true), nullptr, send, data, flag, missing, int(released));
}
extern "C" int test_queue(uint32_t* next, uint32_t* order) {
  return launch(shape_of(1, 256, 0), nullptr, queue, next, order);
}
extern "C" int test_give_up(const uint32_t* flag, int64_t limit_ns, uint64_t* waited) {
  return launch(shape_of(1, 1, 0), nullptr, give_up, flag, uint64_t(limit_ns), waited);
}
#if !defined(__CUDACC__)
extern "C" int test_misuse(int64_t what, float* global) {
  return launch(shape_of(1, 128, 16 << 10), nullptr, misuse, int(what), global);
}
#endif
