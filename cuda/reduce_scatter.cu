// reduce_scatter: the ranks' inputs are summed, and each rank keeps one segment of the sum.
//
//   input[p]    count[0] + count[1] + .. elements of fp32, bf16 or fp16; an addend from every rank
//   output[r]   count[r] elements: segment r of the sum. With one segment every rank has all of it: an all-reduce.
//
// Sums are formed in float32, in the order of ranks and not of arrival, and rounded once: the same bits on every rank
// and at every run, and those of `combine` in ops/collectives/transport/flat_messages.py. (Not so with multicast, where the switch adds: there the
// order is its own.) The forms are those of exchange.cuh. A rank reads a word from all
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

// A register of elements as floats, and back.
template <class T> __device__ __forceinline__ void widen(uint32_t word, float* x) {
  const float2 two = unpack<T>(word);
  x[0] = two.x, x[1] = two.y;
}
template <> __device__ __forceinline__ void widen<float>(uint32_t word, float* x) { x[0] = __uint_as_float(word); }
template <class T> __device__ __forceinline__ uint32_t narrow(const float* x) { return pack<T>(x[0], x[1]); }
template <> __device__ __forceinline__ uint32_t narrow<float>(const float* x) { return __float_as_uint(x[0]); }

// 16 bytes as floats.
template <class T> struct Lanes {
  static constexpr int kOfWord = 4 / sizeof(T), kCount = 4 * kOfWord;
  float x[kCount];
  __device__ __forceinline__ explicit Lanes(uint4 v) {
    widen<T>(v.x, x), widen<T>(v.y, x + kOfWord), widen<T>(v.z, x + 2 * kOfWord), widen<T>(v.w, x + 3 * kOfWord);
  }
};
template <class T> __device__ __forceinline__ uint4 rounded(const float* x) {
  constexpr int n = Lanes<T>::kOfWord;
  return make_uint4(narrow<T>(x), narrow<T>(x + n), narrow<T>(x + 2 * n), narrow<T>(x + 3 * n));
}

// Arguments
struct ReduceScatter : ReduceScatterArgs {
  int64_t item;  // bytes of an element
  __host__ __device__ int64_t mine(unsigned rank) const { return segments == 1 ? 0 : rank; }
  __host__ __device__ int64_t bytes(int64_t segment) const { return count[segment] * item; }
  __host__ __device__ int64_t taken(int64_t segment) const {
    int64_t before = 0;
#pragma unroll 1
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

// Where the addends to this rank's segment lie, from the beginning of the window.
struct Addends {
  const ReduceScatter& a;
  unsigned rank;
  bool own;
  int64_t taken, staged;
  __device__ __forceinline__ Addends(const Call& c, const ReduceScatter& args, const Window& w)
      : a(args), rank(c.rank), own(reads_own(c, args)), taken(args.taken(args.mine(c.rank)) + w.first),
        staged(staged_at(c, args, args.mine(c.rank))) {}
  __device__ __forceinline__ const unsigned char* of(int p) const {
    return a.form == kDirect || (own && unsigned(p) == rank) ? a.input[p] + taken : a.group.workspace[p] + staged;
  }
};

// `count` words of 16 bytes from `begin` on: up to kPeers addends of kInFlight / kPeers words are on their way at once.
template <class T, int kPeers>
__device__ __forceinline__ void sum_words(const Addends& from, unsigned char* to, int64_t begin, int64_t count) {
  constexpr int kWords = kInFlight / kPeers, kLanes = Lanes<T>::kCount;
  const int ranks = int(from.a.group.ranks);
  for (int64_t i = threadIdx.x; i < count; i += int64_t(kWords) * blockDim.x) {
    float sums[kWords][kLanes];
    for (int base = 0; base < ranks; base += kPeers) {
      uint4 words[kPeers][kWords];
#pragma unroll
      for (int p = 0; p < kPeers; ++p) {
        if (base + p >= ranks) break;
        const unsigned char* source = from.of(base + p) + begin;
#pragma unroll
        for (int u = 0; u < kWords; ++u) {
          const int64_t at = i + int64_t(u) * blockDim.x;
          if (at < count) words[p][u] = load_16_streaming(source + at * 16);
        }
      }
#pragma unroll
      for (int p = 0; p < kPeers; ++p) {
        if (base + p >= ranks) break;
#pragma unroll
        for (int u = 0; u < kWords; ++u) {
          const Lanes<T> more(words[p][u]);
#pragma unroll
          for (int e = 0; e < kLanes; ++e) sums[u][e] = base + p == 0 ? more.x[e] : sums[u][e] + more.x[e];
        }
      }
    }
#pragma unroll
    for (int u = 0; u < kWords; ++u) {
      const int64_t at = i + int64_t(u) * blockDim.x;
      if (at < count) store_16(to + at * 16, rounded<T>(sums[u]));
    }
  }
}

// One by one: tails, and addends that lie askew.
template <class T>
__device__ __forceinline__ void sum_elements(const Addends& from, unsigned char* to, int64_t begin, int64_t bytes) {
  for (int64_t at = threadIdx.x * sizeof(T); at < bytes; at += blockDim.x * sizeof(T)) {
    float total = to_float(*reinterpret_cast<const T*>(from.of(0) + begin + at));
    for (int p = 1; p < from.a.group.ranks; ++p)
      total += to_float(*reinterpret_cast<const T*>(from.of(p) + begin + at));
    *reinterpret_cast<T*>(to + at) = from_float<T>(total);
  }
}

// One chunk of this rank's segment.
template <class T, int kPeers>
__device__ __forceinline__ void sum_piece(const Call& c, const ReduceScatter& a, const Window& w, int64_t round) {
  const Addends from(c, a, w);
  const Range p = piece(a, w, a.mine(c.rank), round);
  unsigned char* to = a.output[c.rank] + w.first + p.begin;
  uintptr_t askew = reinterpret_cast<uintptr_t>(to);
  for (int r = 0; r < a.group.ranks; ++r) askew |= reinterpret_cast<uintptr_t>(from.of(r) + p.begin);
  const int64_t words = askew % 16 ? 0 : p.size() / 16;
  if (a.form == kMulticast && words > 0) {
    by_multicast([&] {
      for (int64_t i = threadIdx.x; i < words; i += blockDim.x)
        store_16(to + i * 16, multicast_sum_16<T>(a.group, from.staged + p.begin + i * 16));
    });
  } else {
    sum_words<T, kPeers>(from, to, p.begin, words);
  }
  sum_elements<T>(from, to + words * 16, p.begin + words * 16, p.size() - words * 16);
}

template <class T, int kPeers>
__global__ void __launch_bounds__(kMaxThreads) reduce_scatter(const __grid_constant__ ReduceScatter a, const Window w) {
  Call c{a.group, unsigned(a.group.rank) + blockIdx.y, a.form};
  if (!begin(c)) return;
  const bool direct = a.form == kDirect;
  bool whole = true;
  for (int64_t round = 0; round <= w.rounds && whole; ++round) {
    // Directly all is there at once; else a chunk is staged while the peers stage theirs, and summed a round later.
    if (direct ? round == 0 : round < w.rounds) {
      if (!direct) publish(c, a, w, round);
      signal_all(c, kArrived, mark(c, round + 1));
    }
    if (round > 0) {
      whole = wait_all(c, kArrived, mark(c, direct ? 1 : round));
      if (whole) sum_piece<T, kPeers>(c, a, w, round - 1);
    }
  }
  if (direct && whole) {
    signal_all(c, kDone, mark(c, 1));
    wait_all(c, kDone, mark(c, 1));
  }
  end(c);
}

template <class T>
__global__ void __launch_bounds__(kMaxThreads) reduce_scatter_packets(const __grid_constant__ ReduceScatter a) {
  constexpr int kLanes = 4 / sizeof(T);
  Call c{a.group, unsigned(a.group.rank) + blockIdx.y, a.form};
  if (!begin(c)) return;
  const unsigned rank = c.rank, ranks = unsigned(a.group.ranks);
  const int64_t first = int64_t(blockIdx.x) * blockDim.x + threadIdx.x, step = int64_t(gridDim.x) * blockDim.x;
  for (unsigned turn = 1; turn < ranks; ++turn) {
    const unsigned to = (rank + turn) % ranks;
    const int64_t segment = a.mine(to), bytes = a.bytes(segment), words = packets_for(bytes);
    const unsigned char* from = a.input[rank] + a.taken(segment);
    for (int64_t i = first; i < words; i += step) send_packet(c, to, i, load_word(from, i, bytes));
  }
  const int64_t segment = a.mine(rank), bytes = a.bytes(segment), words = packets_for(bytes);
  bool whole = true;
  for (int64_t i = first; i < words && whole; i += step) {
    float sums[kLanes];
    for (unsigned p = 0; p < ranks && whole; ++p) {
      uint32_t word = 0;
      if (p == rank) {
        word = load_word(a.input[rank] + a.taken(segment), i, bytes);
      } else {
        whole = receive_packet(c, p, i, word);
      }
      float more[kLanes];
      widen<T>(word, more);
#pragma unroll
      for (int e = 0; e < kLanes; ++e) sums[e] = p == 0 ? more[e] : sums[e] + more[e];
    }
    if (whole) store_word(a.output[rank], i, bytes, narrow<T>(sums));
  }
  end(c);
}

template <class T> int launch_sum(const ReduceScatter& a, const Window& w, cudaStream_t stream) {
  const LaunchShape shape = shape_of(a.group);
  if (a.group.ranks <= 4) return launch(shape, stream, reduce_scatter<T, 4>, a, w);
  return launch(shape, stream, reduce_scatter<T, 8>, a, w);
}

template <class T> int launch_all(const ReduceScatter& a, int64_t longest, cudaStream_t stream) {
  if (a.form == kPackets) return launch(shape_of(a.group), stream, reduce_scatter_packets<T>, a);
  return for_windows(a.group, longest, a.segments, a.form != kDirect,
                     [&](const Window& w) { return launch_sum<T>(a, w, stream); });
}

}  // namespace
}  // namespace shardlib

// Entry
extern "C" int shardlib_reduce_scatter(const shardlib::ReduceScatterArgs* args, cudaStream_t stream) {
  using namespace shardlib;
  const ReduceScatter a{*args, args->element == kFloat32 ? 4 : 2};
  if (const int code = check_group(a.group)) return code;
  if (a.segments != 1 && a.segments != a.group.ranks)
    return fail(1, "%lld segments for %lld ranks", (long long)a.segments, (long long)a.group.ranks);
  int64_t longest = 0;
  for (int64_t s = 0; s < a.segments; ++s) {
    if (a.count[s] < 0) return fail(1, "a segment of %lld elements", (long long)a.count[s]);
    longest = max(longest, a.bytes(s));
  }
  if (a.form == kPackets && longest > 4 * a.group.packet_words)
    return fail(1, "a segment of %lld bytes is too large for packets (%lld bytes at most)", (long long)longest,
                (long long)(4 * a.group.packet_words));
  if (a.form == kMulticast && a.group.multicast == nullptr)
    return fail(1, "the group's memory has no multicast address");
  if (a.form != kPackets && a.form != kStaged && a.form != kDirect && a.form != kMulticast)
    return fail(1, "reduce_scatter has no form %lld", (long long)a.form);
  switch (a.element) {
    case kFloat32: return launch_all<float>(a, longest, stream);
    case kBfloat16: return launch_all<bf16>(a, longest, stream);
    case kFloat16: return launch_all<fp16>(a, longest, stream);
    default: return fail(1, "reduce_scatter adds no elements of kind %lld", (long long)a.element);
  }
}
