// The launchers of the CUDA kernels, which binding.cpp calls. No torch, no kernels, no CUDA headers.
//
// A launcher checks its arguments, enqueues kernels on `stream` of the current device and returns at once: 0, or an
// error code whose text shardlib_last_error() then holds, for the calling thread.
#pragma once
#include "attention_args.h"
#include "collectives.h"

extern "C" {

typedef struct CUstream_st* cudaStream_t;  // CUDA's own definition, word for word

const char* shardlib_last_error();

// attention_forward.cu (sm_90a) and attention_sm80_forward.cu: o and lse.
int shardlib_attention_forward(const AttentionArgs* args, cudaStream_t stream);
int shardlib_attention_sm80_forward(const AttentionArgs* args, cudaStream_t stream);

// attention_delta.cu: args->delta, for either backward.
int shardlib_attention_delta(const AttentionBackwardArgs* args, cudaStream_t stream);

// attention_backward.cu (sm_90a) and attention_sm80_backward.cu: dq, dk, dv, dbias, from a delta that is there. The
// workspace's size in bytes depends on sizes and options only.
int64_t shardlib_attention_backward_workspace(const AttentionBackwardArgs* args);
int64_t shardlib_attention_sm80_backward_workspace(const AttentionBackwardArgs* args);
int shardlib_attention_backward(const AttentionBackwardArgs* args, cudaStream_t stream);
int shardlib_attention_sm80_backward(const AttentionBackwardArgs* args, cudaStream_t stream);

// all_gather.cu, all_to_all.cu, reduce_scatter.cu: one collective of the present ranks. reduce_scatter is a sum, and
// serves all-reduce too.
int shardlib_all_gather(const shardlib::AllGatherArgs* args, cudaStream_t stream);
int shardlib_all_to_all(const shardlib::AllToAllArgs* args, cudaStream_t stream);
int shardlib_reduce_scatter(const shardlib::ReduceScatterArgs* args, cudaStream_t stream);

}  // extern "C"
