// The attention backward for sm_90a: dq from the float sums that the CTAs of all keys added up.
#pragma once
#include "attention_backward.cuh"

namespace shardlib {
namespace {

struct DqParams {
  const float* dq_sum;
  void* dq;
  int64_t strides[3];
  int heads, queries, query_tiles, head_dim;
  float scale;
};

// dq = scale * dq_sum; a CTA has one run of sums, a thread the registers of the thread that made them.
template <class T, int D, bool General>
__global__ void __launch_bounds__(128) convert_dq(const __grid_constant__ DqParams p) {
  using C = Config<D, General>;
  const int run = int(blockIdx.x), part = run % C::DqRuns, tile = run / C::DqRuns % p.query_tiles,
            head = run / C::DqRuns / p.query_tiles;
  const int thread = int(threadIdx.x), lane = thread % 32;
  const int row = tile * C::Queries + (C::Dq == Split::rows ? 64 * part : 0) + thread / 32 * 16 + lane / 4;
  const int column = (C::Dq == Split::rows ? 0 : part * C::DqColumns) + lane % 4 * 2;
  const float4* sums = reinterpret_cast<const float4*>(p.dq_sum + int64_t(run) * C::DqFloats) + thread;
  T* out = static_cast<T*>(p.dq) + head / p.heads * p.strides[0] + head % p.heads * p.strides[1];
#pragma unroll
  for (int i = 0; i < C::DqColumns / 8; ++i) {
    const float4 sum = sums[128 * i];
    if (column + 8 * i >= p.head_dim) continue;
    T* place = out + row * p.strides[2] + column + 8 * i;
    if (row < p.queries) *reinterpret_cast<uint32_t*>(place) = pack<T>(sum.x * p.scale, sum.y * p.scale);
    if (row + 8 < p.queries)
      *reinterpret_cast<uint32_t*>(place + 8 * p.strides[2]) = pack<T>(sum.z * p.scale, sum.w * p.scale);
  }
}

}  // namespace
}  // namespace shardlib
