// all_gather: every rank's message, one after the other, in every rank's output. See exchange.cuh for the forms.
//
//   input[p]    bytes_of[p] bytes; may differ between ranks, may be 0
//   output[d]   sum of bytes_of; rank p's begin at place[p]
#include "exchange.cuh"

namespace shardlib {
namespace {

// Arguments
struct AllGather : AllGatherArgs {
  __host__ __device__ int64_t segments() const { return 1; }
  __host__ __device__ int64_t bytes(unsigned from, unsigned) const { return bytes_of[from]; }
  __host__ __device__ int64_t taken(unsigned, unsigned) const { return 0; }
  __host__ __device__ int64_t put(unsigned from, unsigned) const { return place[from]; }
};

}  // namespace
}  // namespace shardlib

// Entry
extern "C" int shardlib_all_gather(const shardlib::AllGatherArgs* args, cudaStream_t stream) {
  return shardlib::launch_exchange(shardlib::AllGather{*args}, stream);
}
