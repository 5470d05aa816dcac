// The arguments of the attention kernels, as plain C: for the kernels, for the binding, and for tests.
//
// Shapes: q, o [B, H, S, D]; k, v [B, KV, T, D]; lse [B, H, S]; query head h reads key head h / (H / KV).
#pragma once
#include <stdint.h>

extern "C" {

// Element types of q, k, v, o, and of a bias.
enum { SHARDLIB_BF16 = 0, SHARDLIB_FP16 = 1, SHARDLIB_F32 = 2 };

// The arguments of every forward kernel, and the forward's part of a backward kernel's. Pointers are device addresses;
// strides count elements; the last dim of q, k, v, o is dense. Nine null or zero fields mean plain attention.
struct AttentionArgs {
  const void *q, *k, *v;
  void* o;
  float* lse;
  const uint8_t* mask;  // bool, null: none
  const void* bias;     // null: none
  const float* alibi;   // [H], null: none
  const int64_t* key;   // (seed, counter) of dropout, null: none
  int64_t q_strides[3], k_strides[3], v_strides[3], o_strides[3], lse_strides[3];  // batch, head, row
  int64_t mask_strides[4], bias_strides[4];  // batch, head, row, column; 0: broadcast
  int64_t batch, heads, kv_heads, queries, keys, head_dim;
  int64_t q_offset, k_offset, window;                                          // window 0: none
  int64_t first_batch, first_head, global_heads, global_queries, global_keys;  // this part's place, for dropout
  double scale, dropout;
  int32_t dtype, bias_dtype, causal;
};

// The backward's arguments. `forward.o` and `forward.lse` are inputs. All lse-like tensors are float.
struct AttentionBackwardArgs {
  AttentionArgs forward;
  const void* grad_o;
  const float* grad_lse;  // null: zero
  float* delta;           // [B, H, S] dense: rowsum(grad_o * o) - grad_lse, written by shardlib_attention_delta
  void *dq, *dk, *dv;     // of q's type
  float* dbias;           // null: not wanted; otherwise zeros on entry, added to with dbias_strides
  float* workspace;       // as many bytes as the kernel's shardlib_..._workspace(args) says, zeros on entry
  int64_t grad_o_strides[3], grad_lse_strides[3], dq_strides[3], dk_strides[3], dv_strides[3];
  int64_t dbias_strides[4];
  int32_t repeatable;  // 1: dq adds up in a fixed order, the same bits every time (slower)
};

}  // extern "C"
