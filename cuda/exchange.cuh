// Messages between all pairs of a group: what all-gather and all-to-all share.
//
// An argument structure A says what the messages are; every rank knows all of them:
//   a.segments()      1: a rank has one message for all; ranks: one for each
//   a.bytes(p, d)     bytes from rank p to rank d
//   a.taken(p, d)     where they begin in p's input
//   a.put(p, d)       where they begin in d's output
//   a.group, a.input[p], a.output[p], a.form
//
// Forms. Readers fetch ("pull"), except for packets; rank r turns to r + 1 first, then to r + 2, so that at any time
// all pairs are at work and no rank serves two.
//   packets    a message is written into the reader's memory with its flags in it: one way, no barrier, twice the bytes
//   staged     a rank copies its messages to its workspace chunk by chunk, others fetch a chunk behind
//   direct     inputs lie in symmetric memory: others fetch from there, and the call ends when all have
//   multicast  as staged, but the message is written to all workspaces at once
// Ranks in different forms never meet: the form is in their flags.
#pragma once
#include "bytes.cuh"
#include "collectives.h"
#include "multicast.cuh"
#include "peers.cuh"
#include "windows.cuh"

namespace shardlib {

// The slot of a message in its sender's half of the data area, or with multicast in everybody's.
__host__ __device__ __forceinline__ int64_t slots_of(const Group& g, int64_t segments, int64_t form) {
  return form == kMulticast ? g.ranks : segments;
}

// Offset in a workspace; off its slot's start as far as the target is off a multiple of 16, so that readers copy by 16.
template <class A> __device__ __forceinline__ int64_t staged_at(const Call& c, const A& a, unsigned from, unsigned to) {
  const int64_t slots = slots_of(c.group, a.segments(), a.form);
  const int64_t slot = a.form == kMulticast ? from : a.segments() == 1 ? 0 : to;
  return data_offset(c) + slot * slot_bytes(c.group, slots) + a.put(from, to) % 16;
}

template <class A>
__device__ __forceinline__ Range piece(const A& a, const Window& w, unsigned from, unsigned to, int64_t round) {
  return piece_of(in_window(w, a.bytes(from, to)), a.group.ctas, blockIdx.x, a.group.chunk, round);
}

// This rank's messages, one chunk of each, to where the others fetch them; what it sends itself, to its output.
template <class A> __device__ __forceinline__ void publish(const Call& c, const A& a, const Window& w, int64_t round) {
  const unsigned rank = c.rank, ranks = unsigned(a.group.ranks);
  for (unsigned turn = 1; turn <= unsigned(a.segments()); ++turn) {
    const unsigned to = a.segments() == 1 ? rank : (rank + turn) % ranks;
    if (a.segments() > 1 && to == rank) break;
    const Range p = piece(a, w, rank, to, round);
    const unsigned char* from = a.input[rank] + a.taken(rank, to) + w.first + p.begin;
    const int64_t at = staged_at(c, a, rank, to) + p.begin;
    if (a.form == kMulticast) {
      by_multicast([&] {
        for (int64_t i = threadIdx.x * 16; i < p.size(); i += blockDim.x * 16)
          multicast_store_16(a.group, at + i, load_16(from + i));
      });
    } else {
      copy_bytes(a.group.workspace[rank] + at, from, p.size());
    }
  }
}

// One chunk of the messages to this rank, from wherever their senders have them.
template <class A> __device__ __forceinline__ void fetch(const Call& c, const A& a, const Window& w, int64_t round) {
  const unsigned rank = c.rank, ranks = unsigned(a.group.ranks);
  for (unsigned turn = 1; turn <= ranks; ++turn) {
    const unsigned from = (rank + turn) % ranks;
    const Range p = piece(a, w, from, rank, round);
    const unsigned char* source = a.input[from] + a.taken(from, rank) + w.first;
    if (from != rank && a.form == kStaged) source = a.group.workspace[from] + staged_at(c, a, from, rank);
    if (from != rank && a.form == kMulticast) source = a.group.workspace[rank] + staged_at(c, a, from, rank);
    copy_bytes(a.output[rank] + a.put(from, rank) + w.first + p.begin, source + p.begin, p.size());
  }
}

template <class A> __device__ __forceinline__ void exchange_staged(Call& c, const A& a, const Window& w) {
  for (int64_t round = 0; round <= w.rounds; ++round) {
    if (round < w.rounds) {
      publish(c, a, w, round);
      signal_all(c, kArrived, mark(c, round + 1));
    }
    if (round > 0) {
      if (!wait_all(c, kArrived, mark(c, round))) return;
      fetch(c, a, w, round - 1);
    }
  }
}

template <class A> __device__ __forceinline__ void exchange_direct(Call& c, const A& a, const Window& w) {
  signal_all(c, kArrived, mark(c, 1));
  if (!wait_all(c, kArrived, mark(c, 1))) return;
  for (int64_t round = 0; round < w.rounds; ++round) fetch(c, a, w, round);
  signal_all(c, kDone, mark(c, 1));
  wait_all(c, kDone, mark(c, 1));
}

template <class A>
__global__ void __launch_bounds__(kMaxThreads, 1) exchange(const __grid_constant__ A a, const Window w) {
  Call c{a.group, unsigned(a.group.rank) + blockIdx.y, a.form};
  if (!begin(c)) return;
  if (a.form == kDirect) {
    exchange_direct(c, a, w);
  } else {
    exchange_staged(c, a, w);
  }
  end(c);
}

template <class A> __global__ void __launch_bounds__(kMaxThreads, 1) exchange_packets(const __grid_constant__ A a) {
  Call c{a.group, unsigned(a.group.rank) + blockIdx.y, a.form};
  if (!begin(c)) return;
  const unsigned rank = c.rank, ranks = unsigned(a.group.ranks);
  const int64_t first = int64_t(blockIdx.x) * blockDim.x + threadIdx.x, step = int64_t(gridDim.x) * blockDim.x;
  for (unsigned turn = 1; turn < ranks; ++turn) {
    const unsigned to = (rank + turn) % ranks;
    const int64_t bytes = a.bytes(rank, to), words = packets_for(bytes);
    const unsigned char* from = a.input[rank] + a.taken(rank, to);
    for (int64_t i = first; i < words; i += step) send_packet(c, to, i, load_word(from, i, bytes));
  }
  bool whole = true;
  for (unsigned turn = 1; turn <= ranks && whole; ++turn) {
    const unsigned from = (rank + turn) % ranks;
    const int64_t bytes = a.bytes(from, rank), words = packets_for(bytes);
    unsigned char* out = a.output[rank] + a.put(from, rank);
    for (int64_t i = first; i < words && whole; i += step) {
      uint32_t word = 0;
      if (from == rank) {
        word = load_word(a.input[rank] + a.taken(rank, rank), i, bytes);
      } else {
        whole = receive_packet(c, from, i, word);
      }
      if (whole) store_word(out, i, bytes, word);
    }
  }
  end(c);
}

// --- host -----------------------------------------------------------------------------------------------------------

template <class A> int launch_exchange(const A& a, cudaStream_t stream) {
  const Group& g = a.group;
  if (const int code = check_group(g)) return code;
  int64_t longest = 0;
  bool by_16 = true;
  for (unsigned from = 0; from < g.ranks; ++from)
    for (unsigned to = 0; to < g.ranks; ++to) {
      const int64_t bytes = a.bytes(from, to);
      if (bytes < 0) return fail(1, "a message of %lld bytes", (long long)bytes);
      longest = max(longest, bytes);
      by_16 = by_16 && bytes % 16 == 0 && a.put(from, to) % 16 == 0;
    }
  switch (a.form) {
    case kPackets:
      if (longest > 4 * g.packet_words)
        return fail(1, "a message of %lld bytes is too large for packets (%lld bytes at most)", (long long)longest,
                    (long long)(4 * g.packet_words));
      return launch(shape_of(g), stream, exchange_packets<A>, a);
    case kMulticast:
      if (g.multicast == nullptr) return fail(1, "the group's memory has no multicast address");
      for (int64_t r = g.rank; r < g.rank + g.present; ++r)
        by_16 = by_16 && reinterpret_cast<uintptr_t>(a.input[r]) % 16 == 0;
      if (a.segments() != 1 || !by_16)
        return fail(1, "multicast takes one message of whole 16-byte words from every rank");
      break;
    case kStaged:
    case kDirect: break;
    default: return fail(1, "there is no form %lld", (long long)a.form);
  }
  return for_windows(g, longest, slots_of(g, a.segments(), a.form), a.form != kDirect,
                     [&](const Window& w) { return launch(shape_of(g), stream, exchange<A>, a, w); });
}

}  // namespace shardlib
