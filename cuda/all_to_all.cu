// all_to_all: every rank has a message for every rank. See exchange.cuh for the forms.
//
//   input[p]    the messages to ranks 0, 1, .. one after the other; sizes[p][d] bytes to rank d, may be 0
//   output[d]   the messages from ranks 0, 1, .. one after the other
#include "exchange.cuh"

namespace shardlib {
namespace {

// Arguments
struct AllToAll : AllToAllArgs {
  __host__ __device__ int64_t segments() const { return group.ranks; }
  __host__ __device__ int64_t bytes(unsigned from, unsigned to) const { return sizes[from][to]; }
  __host__ __device__ int64_t taken(unsigned from, unsigned to) const {
    int64_t before = 0;
#pragma unroll 1
    for (unsigned d = 0; d < to; ++d) before += sizes[from][d];
    return before;
  }
  __host__ __device__ int64_t put(unsigned from, unsigned to) const {
    int64_t before = 0;
#pragma unroll 1
    for (unsigned p = 0; p < from; ++p) before += sizes[p][to];
    return before;
  }
};

}  // namespace
}  // namespace shardlib

// Entry
extern "C" int shardlib_all_to_all(const shardlib::AllToAllArgs* args, cudaStream_t stream) {
  return shardlib::launch_exchange(shardlib::AllToAll{*args}, stream);
}
