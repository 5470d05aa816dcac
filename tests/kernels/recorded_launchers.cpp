// Launchers that run nothing: they keep what binding.cpp hands them, for test_binding.py to read. Compiled with
// binding.cpp in its SHARDLIB_EMULATED form.
#include <cstring>

#include "../../cuda/launch.h"

namespace {

const char* last_called = "";
alignas(16) char last_args[1 << 13];  // the arguments' bytes
int refusals;                         // so many calls to come are refused

int record(const char* name, const void* args, size_t size) {
  last_called = name;
  static_assert(sizeof last_args >= sizeof(shardlib::AllToAllArgs), "room for the largest");
  std::memcpy(last_args, args, size);
  return refusals > 0 ? refusals-- : 0;
}

}  // namespace

extern "C" {

const char* recorded_call() { return last_called; }
const void* recorded_args() { return last_args; }
void forget() { last_called = ""; }
void refuse(int calls) { refusals = calls; }
const char* shardlib_last_error() { return "refused, said the launcher"; }

#define LAUNCHER(NAME, ARGS) \
  int NAME(const ARGS* args, cudaStream_t) { return record(#NAME, args, sizeof *args); }

LAUNCHER(shardlib_attention_forward, AttentionArgs)
LAUNCHER(shardlib_attention_sm80_forward, AttentionArgs)
LAUNCHER(shardlib_attention_delta, AttentionBackwardArgs)
LAUNCHER(shardlib_attention_backward, AttentionBackwardArgs)
LAUNCHER(shardlib_attention_sm80_backward, AttentionBackwardArgs)
LAUNCHER(shardlib_all_gather, shardlib::AllGatherArgs)
LAUNCHER(shardlib_all_to_all, shardlib::AllToAllArgs)
LAUNCHER(shardlib_reduce_scatter, shardlib::ReduceScatterArgs)

int64_t shardlib_attention_backward_workspace(const AttentionBackwardArgs*) { return 4099; }
int64_t shardlib_attention_sm80_backward_workspace(const AttentionBackwardArgs*) { return 0; }

}  // extern "C"
