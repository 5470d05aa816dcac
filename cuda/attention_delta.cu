// What every row's dS is measured against: delta = rowsum(grad_o * o) - grad_lse, before the backward kernels.
//
// Shapes: grad_o, o [B, H, S, D]; grad_lse, delta [B, H, S], delta dense. The kernel reads each element once, 16 bytes
// a thread: the lanes of a row, D / 8 rounded up to a power of two, add up by shuffles.
#include "attention.cuh"

namespace shardlib {
namespace {

// --- configuration ---------------------------------------------------------------------------------------------------

constexpr int kThreads = 256;

// --- arguments -------------------------------------------------------------------------------------------------------

struct Params {
  const void *o, *grad_o;
  const float* grad_lse;
  float* delta;
  int64_t o_strides[3], grad_o_strides[3], grad_lse_strides[3];
  int64_t rows, heads, queries;
  int chunks, lanes;  // 16-byte chunks of a row; lanes that share it
};

// --- kernel ----------------------------------------------------------------------------------------------------------

__device__ __forceinline__ int64_t place(const int64_t (&strides)[3], int64_t b, int64_t h, int64_t i) {
  return b * strides[0] + h * strides[1] + i * strides[2];
}

template <class T> __device__ __forceinline__ float dot(uint32_t x, uint32_t y) {
  const float2 a = unpack<T>(x), b = unpack<T>(y);
  return fmaf(a.x, b.x, a.y * b.y);
}

template <class T> __global__ void __launch_bounds__(kThreads) rows_of_delta(const __grid_constant__ Params p) {
  const int64_t thread = int64_t(blockIdx.x) * kThreads + threadIdx.x, row = thread / p.lanes;
  const int chunk = int(thread % p.lanes);
  const int64_t head = row / p.queries, i = row % p.queries, b = head / p.heads, h = head % p.heads;
  float sum = 0.0f;
  if (row < p.rows && chunk < p.chunks) {
    const uint4 x = load_16(static_cast<const T*>(p.o) + place(p.o_strides, b, h, i) + chunk * 8);
    const uint4 y = load_16(static_cast<const T*>(p.grad_o) + place(p.grad_o_strides, b, h, i) + chunk * 8);
    sum = dot<T>(x.x, y.x) + dot<T>(x.y, y.y) + (dot<T>(x.z, y.z) + dot<T>(x.w, y.w));
  }
  for (int other = p.lanes / 2; other > 0; other /= 2) sum += __shfl_xor_sync(kFullMask, sum, other);
  if (row < p.rows && chunk == 0)
    p.delta[row] = sum - (p.grad_lse ? p.grad_lse[place(p.grad_lse_strides, b, h, i)] : 0.0f);
}

}  // namespace
}  // namespace shardlib

// --- entry -----------------------------------------------------------------------------------------------------------

// Writes args->delta; 0, or an error code with its text in shardlib_last_error().
extern "C" int shardlib_attention_delta(const AttentionBackwardArgs* args, cudaStream_t stream) {
  using namespace shardlib;
  const AttentionArgs& a = args->forward;
  const int64_t sizes[3] = {a.batch, a.heads, a.queries};
  int code = check_attention(a);
  if (code == 0) code = check_rows("grad_o", args->grad_o, args->grad_o_strides, sizes);
  if (code != 0) return code;
  Params p = {};
  p.o = a.o, p.grad_o = args->grad_o, p.grad_lse = args->grad_lse, p.delta = args->delta;
  for (int d = 0; d < 3; ++d) {
    p.o_strides[d] = a.o_strides[d], p.grad_o_strides[d] = args->grad_o_strides[d];
    p.grad_lse_strides[d] = args->grad_lse_strides[d];
  }
  p.rows = a.batch * a.heads * a.queries, p.heads = a.heads, p.queries = a.queries;
  if (p.rows == 0) return 0;
  p.chunks = int(a.head_dim / 8);
  for (p.lanes = 1; p.lanes < p.chunks;) p.lanes *= 2;
  const int64_t blocks = (p.rows * p.lanes + kThreads - 1) / kThreads;
  if (blocks >= int64_t(1) << 31) return fail(1, "attention: %lld rows are too many for one launch", (long long)p.rows);
  LaunchShape shape;
  shape.grid = dim3(unsigned(blocks)), shape.block = dim3(kThreads);
  return a.dtype == SHARDLIB_BF16 ? launch(shape, stream, rows_of_delta<bf16>, p)
                                  : launch(shape, stream, rows_of_delta<fp16>, p);
}
