// Launchers that run nothing: they keep what binding.cpp hands them, for test_binding.py to read. Compiled with binding.cpp
// as its SHARDLIB_EMULATED form.
#include <cstring>

#include "../../cuda/launch.h"

namespace {

const char* last_called = "";
AttentionBackwardArgs last_args;  // of a forward launcher, only `forward`
int refusals;                     // so many calls to come are refused

int record(const char* name, const void* args, size_t size) {
  last_called = name;
  std::memcpy(&last_args, args, size);
  return refusals > 0 ? refusals-- : 0;
}

}  // namespace

extern "C" {

const char* recorded_call() { return last_called; }
const void* recorded_args() { return &last_args; }
void refuse(int calls) { refusals = calls; }
const char* shardlib_last_error() { return "refused, said the launcher"; }

#define FORWARD(NAME) \
  int NAME(const AttentionArgs* args, cudaStream_t) { return record(#NAME, args, sizeof *args); }
#define BACKWARD(NAME) \
  int NAME(const AttentionBackwardArgs* args, cudaStream_t) { return record(#NAME, args, sizeof *args); }

FORWARD(shardlib_attention_forward)
FORWARD(shardlib_attention_sm80_forward)
BACKWARD(shardlib_attention_delta)
BACKWARD(shardlib_attention_backward)
BACKWARD(shardlib_attention_sm80_backward)

int64_t shardlib_attention_backward_workspace(const AttentionBackwardArgs*) { return 4099; }
int64_t shardlib_attention_sm80_backward_workspace(const AttentionBackwardArgs*) { return 0; }

int shardlib_fill(void* out, int64_t bytes, int64_t byte, cudaStream_t) {
  std::memset(out, int(byte), size_t(bytes));
  return record("shardlib_fill", "", 1);
}

}  // extern "C"
