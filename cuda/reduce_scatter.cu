// reduce_scatter: the ranks' inputs are summed, and each rank keeps one segment of the sum.
//
//   input[p]    count[0] + count[1] + .. elements of fp32, bf16 or fp16; an addend from every rank
//   output[r]   count[r] elements: segment r of the sum. With one segment every rank has all of it: an all-reduce.
//
// Sums are formed in float32, in the order of ranks and not of arrival, and rounded once: the same bits on every rank
// and at every run, and those of `combine` in ops/_wire.py. (Not so with multicast, where the switch adds: there the
// order is its own.) The forms are those of exchange.cuh; the copy engines cannot add. A rank reads a word from all
// peers at once, so all links carry the same at any time without an order of turns.
#include "bytes.cuh"
#include "collectives.h"
#include "multicast.cuh"
#include "peers.cuh"
#include "windows.cuh"

namespace shardlib {
namespace {

// Configuration
constexpr int kInFlight = 8;  // 16-byte loads of a thread on their way

// 16 bytes as floats.
template <class T> struct Lanes {
  static constexpr int kCount = 8;
  float x[kCount];
  __device__ __forceinline__ explicit Lanes(uint4 v) {
    const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 two = unpack<T>(words[i]);
      x[2 * i] = two.x, x[2 * i + 1] = two.y;
    }
  }
  __device__ __forceinline__ uint4 rounded() const {
    return make_uint4(pack<T>(x[0], x[1]), pack<T>(x[2], x[3]), pack<T>(x[4], x[5]), pack<T>(x[6], x[7]));
  }
};
template <> struct Lanes<float> {
  static constexpr int kCount = 4;
  float x[kCount];
  __device__ __forceinline__ explicit Lanes(uint4 v)
      : x{__uint_as_float(v.x), __uint_as_float(v.y), __uint_as_float(v.z), __uint_as_float(v.w)} {}
  __device__ __forceinline__ uint4 rounded() const {
    return make_uint4(__float_as_uint(x[0]), __float_as_uint(x[1]), __float_as_uint(x[2]), __float_as_uint(x[3]));
  }
};
template <class T> __device__ __forceinline__ void add(Lanes<T>& sum, uint4 v) {
  const Lanes<T> more(v);
#pragma unroll
  for (int i = 0; i < Lanes<T>::kCount; ++i) sum.x[i] += more.x[i];
}

// Arguments
struct ReduceScatter : ReduceScatterArgs {
  int64_t item;  // bytes of an element
  __host__ __device__ int64_t mine(unsigned rank) const { return segments == 1 ? 0 : rank; }
  __host__ __device__ int64_t bytes(int64_t segment) const { return count[segment] * item; }
  __host__ __device__ int64_t taken(int64_t segment) const {
    int64_t before = 0;
    for (int64_t s = 0; s < segment; ++s) before += count[s];
    return before * item;
  }
};

// Kernel
__device__ __forceinline__ int64_t staged_at(const Call& c, const ReduceScatter& a, int64_t segment) {
  return data_offset(c) + segment * slot_bytes(a.group, a.segments);
}

__device__ __forceinline__ Range piece(const ReduceScatter& a, const Window& w, int64_t segment, int64_t round) {
  return piece_of(in_window(w, a.bytes(segment)), a.group.ctas, blockIdx.x, a.group.chunk, round);
}

// Whether a rank reads its own addend where it is; else it stages that too, so that all addends lie alike.
__device__ __forceinline__ bool reads_own(const Call& c, const ReduceScatter& a) {
  const auto input = reinterpret_cast<uintptr_t>(a.input[c.rank]) + uintptr_t(a.taken(a.mine(c.rank)));
  return a.form == kDirect || (a.form == kStaged && input % 16 == 0);
}

__device__ __forceinline__ void publish(const Call& c, const ReduceScatter& a, const Window& w, int64_t round) {
  for (int64_t turn = 1; turn <= a.segments; ++turn) {
    const int64_t segment = a.segments == 1 ? 0 : (c.rank + turn) % a.segments;
    if (a.segments > 1 && segment == c.rank && reads_own(c, a)) continue;
    const Range p = piece(a, w, segment, round);
    copy_bytes(a.group.workspace[c.rank] + staged_at(c, a, segment) + p.begin,
               a.input[c.rank] + a.taken(segment) + w.first + p.begin, p.size());
  }
}

// Where rank p's addend to this rank's segment lies, from the beginning of the window.
__device__ __forceinline__ const unsigned char* addend(const Call& c, const ReduceScatter& a, const Window& w, unsigned p) {
  const int64_t segment = a.mine(c.rank);
  if (a.form == kDirect || (p == c.rank && reads_own(c, a))) return a.input[p] + a.taken(segment) + w.first;
  return a.group.workspace[p] + staged_at(c, a, segment);
}

// Words of 16 bytes: `kPeers` addends (or fewer) of kInFlight / kPeers words on their way at a time.
template <class T, int kPeers>
__device__ __forceinline__ void sum_words(const Call& c, const ReduceScatter& a, const Window& w, unsigned char* to,
                                          int64_t begin, int64_t count) {
  constexpr int kWords = kInFlight / kPeers;
  const int ranks = int(a.group.ranks);
  for (int64_t i = threadIdx.x; i < count; i += int64_t(kWords) * blockDim.x) {
    uint4 words[kWords][kPeers];
    float sums[kWords][Lanes<T>::kCount];
    for (int peers = 0; peers < ranks; peers += kPeers) {
#pragma unroll
      for (int p = 0; p < kPeers; ++p) {
        if (peers + p >= ranks) break;
        const unsigned char* from = addend(c, a, w, unsigned(peers + p)) + begin;
#pragma unroll
        for (int u = 0; u < kWords; ++u) {
          const int64_t at = i + int64_t(u) * blockDim.x;
          if (at < count) words[u][p] = load_16_streaming(from + at * 16);
        }
      }
#pragma unroll
      for (int p = 0; p < kPeers; ++p) {
        if (peers + p >= ranks) break;
#pragma unroll
        for (int u = 0; u < kWords; ++u) {
          const Lanes<T> more(words[u][p]);
#pragma unroll
          for (int e = 0; e < Lanes<T>::kCount; ++e) sums[u][e] = peers + p == 0 ? more.x[e] : sums[u][e] + more.x[e];
        }
      }
    }
  }
}

}  // namespace
}  // namespace shardlib
