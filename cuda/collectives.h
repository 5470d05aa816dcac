// The arguments of the collectives over peer pointers: fields of 8 bytes, as in ops/collectives/transport/cuda_args.py.
#pragma once
#include <stdint.h>

namespace shardlib {

constexpr int kMaxRanks = 16;

enum Form : int64_t { kPackets, kStaged, kDirect, kMulticast, kForms };  // see exchange.cuh
enum Element : int64_t { kFloat32, kBfloat16, kFloat16 };

// Who takes part and through which memory: the same on all ranks but for `rank` and for what pointers look like there.
struct Group {
  int64_t ranks;
  int64_t rank, present;        // this launch runs ranks [rank, rank + present): see peers.cuh
  int64_t ctas, threads;        // of every rank
  int64_t limit_ns;             // of every wait
  int64_t packet_words;         // 4-byte words of a message that goes as packets, at most
  int64_t window;               // bytes of each half of the data area
  int64_t chunk;                // bytes of a CTA's slice from one flag to the next
  int64_t op;                   // which collective this is: for flags and the report
  unsigned char* multicast;     // all workspaces at once, or null
  unsigned char* workspace[kMaxRanks];
  uint64_t* report[kMaxRanks];  // of the present ranks, in memory that the host can read: see Report in peers.cuh
};

// In all of these: input[p] and output[p] of the present ranks; the inputs of all ranks in the form direct.
struct AllGatherArgs {
  Group group;
  int64_t form;
  const unsigned char* input[kMaxRanks];
  unsigned char* output[kMaxRanks];
  int64_t bytes_of[kMaxRanks];
  int64_t place[kMaxRanks];
};

struct AllToAllArgs {
  Group group;
  int64_t form;
  const unsigned char* input[kMaxRanks];
  unsigned char* output[kMaxRanks];
  int64_t sizes[kMaxRanks][kMaxRanks];
};

struct ReduceScatterArgs {
  Group group;
  int64_t form;
  const unsigned char* input[kMaxRanks];
  unsigned char* output[kMaxRanks];
  int64_t element;
  int64_t segments;             // ranks: rank r sums segment r; 1: every rank sums segment 0
  int64_t count[kMaxRanks];     // elements of each segment; they follow each other in the inputs
};

}  // namespace shardlib
