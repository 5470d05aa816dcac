// The kernels as torch ops, namespace shardlib_cuda: the only file here that reads torch's headers, and of those only
// the stable ABI's, so that one library serves torch 2.11 and later.
//
// An op has a function from tensors to a launcher's arguments, a schema (STABLE_TORCH_LIBRARY) and its registration for
// CUDA tensors (STABLE_TORCH_LIBRARY_IMPL); the dispatcher refuses tensors elsewhere. Results are written to tensors
// that the caller made. What could make a kernel leave a tensor's memory is checked here; ops/ decides what runs at
// all, and knows the gradients.
//
// With SHARDLIB_EMULATED the same ops take CPU tensors, for tests: namespace shardlib_emulated.
//
// Shapes: q, o [B, H, S, D]; k, v [B, KV, T, D]; lse [B, H, S]; mask, bias [B, H, S, T], broadcast; alibi [H]; key [2].
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string>
#include <vector>

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include "launch.h"

#ifndef SHARDLIB_EMULATED
#include <cuda_runtime_api.h>

#define NAMESPACE shardlib_cuda
#define DEVICE CUDA
// Weak: a torch without CUDA does not have it, and the library has to load there too.
extern "C" __attribute__((weak)) AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device, void** stream);
#else
#define NAMESPACE shardlib_emulated
#define DEVICE CPU
#endif

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using Maybe = std::optional<Tensor>;
using Sizes = std::initializer_list<int64_t>;

// --- what every op needs ---------------------------------------------------------------------------------------------

#ifndef SHARDLIB_EMULATED

// The device of a tensor, made current, and torch's stream on it: where a launch belongs.
class Place {
 public:
  explicit Place(const Tensor& x) : guard_(x.get_device_index()) {
    STD_TORCH_CHECK(aoti_torch_get_current_cuda_stream != nullptr, "shardlib_cuda: this torch has no CUDA");
    const auto found = aoti_torch_get_current_cuda_stream(x.get_device_index(), &stream_);
    STD_TORCH_CHECK(found == AOTI_TORCH_SUCCESS, "shardlib_cuda: torch tells no stream of device ", x.get_device_index());
  }
  cudaStream_t stream() const { return static_cast<cudaStream_t>(stream_); }

 private:
  torch::stable::accelerator::DeviceGuard guard_;
  void* stream_ = nullptr;
};

// The version of CUDA that the kernels were compiled with, as in "13.0".
std::string version() {
  return std::to_string(CUDART_VERSION / 1000) + "." + std::to_string(CUDART_VERSION % 1000 / 10);
}

#else

struct Place {
  explicit Place(const Tensor&) {}
  cudaStream_t stream() const { return nullptr; }
};

std::string version() { return "emulation"; }

#endif

// What a launcher returned.
void check(int code) { STD_TORCH_CHECK(code == 0, "shardlib_cuda: ", shardlib_last_error()); }

// Refuses a tensor that is not on `like`'s device, or not of this dtype and these sizes.
void expect(const char* name, const Tensor& x, const Tensor& like, ScalarType dtype, Sizes sizes) {
  bool same = x.device() == like.device() && x.scalar_type() == dtype && x.dim() == int64_t(sizes.size());
  std::string wanted;
  int64_t d = 0;
  for (const int64_t size : sizes) {
    same = same && x.size(d++) == size;
    wanted += (wanted.empty() ? "" : ", ") + std::to_string(size);
  }
  STD_TORCH_CHECK(same, "shardlib_cuda: ", name, " must be ", torch::headeronly::toString(dtype), " [", wanted,
                  "] on the device of the others");
}

// --- attention -------------------------------------------------------------------------------------------------------

// How the schemas spell what kind of attention it is; ops/attention/variant.py has the same order.
#define VARIANT                                                                                                 \
  "Tensor? mask, Tensor? bias, Tensor? alibi, Tensor? key, bool causal, float scale, int window, float dropout, " \
  "int q_offset, int k_offset, int[]? part"

struct Variant {
  Maybe mask, bias, alibi, key;
  bool causal;
  double scale;
  int64_t window;
  double dropout;
  int64_t q_offset, k_offset;
  std::optional<std::vector<int64_t>> part;  // first batch, first head, and the whole's H, S, T
};

int32_t code(ScalarType dtype) {
  if (dtype == ScalarType::BFloat16) return SHARDLIB_BF16;
  if (dtype == ScalarType::Half) return SHARDLIB_FP16;
  STD_TORCH_CHECK(dtype == ScalarType::Float, "shardlib_cuda: attention takes bf16 and fp16, and a bias of fp32 too");
  return SHARDLIB_F32;
}

// The strides of x; a dim of size 1 that stands for more does not move.
template <int kDims>
void put_strides(int64_t (&strides)[kDims], const Tensor& x, bool broadcast = false) {
  for (int d = 0; d < kDims; ++d) strides[d] = broadcast && x.size(d) == 1 ? 0 : x.stride(d);
}

// A tensor [B, H, S, D] (or k's sizes) of q's dtype with dense rows.
void* rows(const char* name, const Tensor& x, const Tensor& like, const Tensor& q, int64_t (&strides)[3]) {
  expect(name, x, q, q.scalar_type(), {like.size(0), like.size(1), like.size(2), like.size(3)});
  STD_TORCH_CHECK(x.stride(3) == 1 || x.size(3) == 1, "shardlib_cuda: the last dim of ", name, " must be dense");
  put_strides(strides, x);
  return x.data_ptr();
}

// A tensor of one number a row: lse and its gradient.
float* numbers(const char* name, const Tensor& x, const Tensor& q, int64_t (&strides)[3]) {
  expect(name, x, q, ScalarType::Float, {q.size(0), q.size(1), q.size(2)});
  put_strides(strides, x);
  return static_cast<float*>(x.data_ptr());
}

// A mask or bias, or a bias's gradient: every dim is whole or 1.
void* logits(const char* name, const Tensor& x, const AttentionArgs& a, const Tensor& q, ScalarType dtype,
             int64_t (&strides)[4]) {
  const int64_t whole[4] = {a.batch, a.heads, a.queries, a.keys};
  int64_t sizes[4];
  for (int d = 0; d < 4; ++d) sizes[d] = d < x.dim() && x.size(d) == 1 ? 1 : whole[d];
  expect(name, x, q, dtype, {sizes[0], sizes[1], sizes[2], sizes[3]});
  put_strides(strides, x, true);
  return x.data_ptr();
}

AttentionArgs arguments(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& o, const Tensor& lse,
                        const Variant& how) {
  STD_TORCH_CHECK(q.dim() == 4 && k.dim() == 4, "shardlib_cuda: q and k must have 4 dims");
  STD_TORCH_CHECK(k.size(0) == q.size(0) && k.size(3) == q.size(3),
                  "shardlib_cuda: q and k differ in batch or head dim");
  AttentionArgs a = {};
  a.batch = q.size(0), a.heads = q.size(1), a.queries = q.size(2), a.head_dim = q.size(3);
  a.kv_heads = k.size(1), a.keys = k.size(2);
  a.q = rows("q", q, q, q, a.q_strides), a.k = rows("k", k, k, q, a.k_strides), a.v = rows("v", v, k, q, a.v_strides);
  a.o = rows("o", o, q, q, a.o_strides), a.lse = numbers("lse", lse, q, a.lse_strides);
  a.dtype = code(q.scalar_type());
  if (how.mask) a.mask = static_cast<uint8_t*>(logits("mask", *how.mask, a, q, ScalarType::Bool, a.mask_strides));
  if (how.bias) {
    a.bias = logits("bias", *how.bias, a, q, how.bias->scalar_type(), a.bias_strides);
    a.bias_dtype = code(how.bias->scalar_type());
  }
  if (how.alibi) {
    expect("alibi", *how.alibi, q, ScalarType::Float, {a.heads});
    STD_TORCH_CHECK(how.alibi->is_contiguous(), "shardlib_cuda: alibi must be contiguous");
    a.alibi = static_cast<float*>(how.alibi->data_ptr());
  }
  if (how.key) {
    expect("key", *how.key, q, ScalarType::Long, {2});
    STD_TORCH_CHECK(how.key->is_contiguous(), "shardlib_cuda: key must be contiguous");
    a.key = static_cast<int64_t*>(how.key->data_ptr());
  }
  a.causal = how.causal, a.scale = how.scale, a.window = how.window, a.dropout = how.dropout;
  a.q_offset = how.q_offset, a.k_offset = how.k_offset;
  a.global_heads = a.heads, a.global_queries = a.q_offset + a.queries, a.global_keys = a.k_offset + a.keys;
  if (how.part && !how.part->empty()) {
    const std::vector<int64_t>& part = *how.part;
    STD_TORCH_CHECK(part.size() == 5, "shardlib_cuda: part has ", part.size(), " numbers, not 5");
    a.first_batch = part[0], a.first_head = part[1];
    a.global_heads = part[2], a.global_queries = part[3], a.global_keys = part[4];
  }
  return a;
}

template <int (*launcher)(const AttentionArgs*, cudaStream_t)>
void attention_forward(Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, Maybe mask, Maybe bias, Maybe alibi,
                       Maybe key, bool causal, double scale, int64_t window, double dropout, int64_t q_offset,
                       int64_t k_offset, std::optional<std::vector<int64_t>> part) {
  const Variant how{mask, bias, alibi, key, causal, scale, window, dropout, q_offset, k_offset, part};
  const AttentionArgs args = arguments(q, k, v, o, lse, how);
  const Place place(q);
  check(launcher(&args, place.stream()));
}

// Delta, then the gradients. dbias holds zeros on entry.
template <int (*launcher)(const AttentionBackwardArgs*, cudaStream_t),
          int64_t (*workspace)(const AttentionBackwardArgs*)>
void attention_backward(Tensor grad_o, Maybe grad_lse, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, Tensor dq,
                        Tensor dk, Tensor dv, Maybe dbias, bool repeatable, Maybe mask, Maybe bias, Maybe alibi,
                        Maybe key, bool causal, double scale, int64_t window, double dropout, int64_t q_offset,
                        int64_t k_offset, std::optional<std::vector<int64_t>> part) {
  const Variant how{mask, bias, alibi, key, causal, scale, window, dropout, q_offset, k_offset, part};
  AttentionBackwardArgs args = {};
  args.forward = arguments(q, k, v, o, lse, how);
  args.grad_o = rows("grad_o", grad_o, q, q, args.grad_o_strides);
  if (grad_lse) args.grad_lse = numbers("grad_lse", *grad_lse, q, args.grad_lse_strides);
  args.dq = rows("dq", dq, q, q, args.dq_strides);
  args.dk = rows("dk", dk, k, q, args.dk_strides), args.dv = rows("dv", dv, k, q, args.dv_strides);
  if (dbias) {
    void* sums = logits("dbias", *dbias, args.forward, q, ScalarType::Float, args.dbias_strides);
    args.dbias = static_cast<float*>(sums);
  }
  args.repeatable = repeatable;
  const Place place(q);
  const Tensor delta = torch::stable::new_empty(q, {q.size(0), q.size(1), q.size(2)}, ScalarType::Float);
  args.delta = static_cast<float*>(delta.data_ptr());
  const Tensor scratch = torch::stable::new_zeros(q, {(workspace(&args) + 3) / 4}, ScalarType::Float);
  args.workspace = static_cast<float*>(scratch.data_ptr());
  check(shardlib_attention_delta(&args, place.stream()));
  check(launcher(&args, place.stream()));
}

// --- collectives over peer pointers ----------------------------------------------------------------------------------

// `plan` holds the launcher's arguments word for word, as ops/collectives/transport/cuda_args.py lays them out. The tensors out and x say on
// which device and stream.
template <class Args, int (*launcher)(const Args*, cudaStream_t)>
void collective(Tensor out, Tensor x, Tensor plan) {
  STD_TORCH_CHECK(out.device() == x.device(), "shardlib_cuda: out and x are on different devices");
  STD_TORCH_CHECK(plan.is_cpu() && plan.scalar_type() == ScalarType::Long && plan.is_contiguous() &&
                      plan.numel() * sizeof(int64_t) == sizeof(Args),
                  "shardlib_cuda: the plan must be ", sizeof(Args) / sizeof(int64_t), " dense int64 words on the CPU");
  const Place place(out);
  check(launcher(static_cast<const Args*>(plan.const_data_ptr()), place.stream()));
}

}  // namespace

// --- schemas and registration ----------------------------------------------------------------------------------------

#define FORWARD "(Tensor q, Tensor k, Tensor v, Tensor(a!) o, Tensor(b!) lse, " VARIANT ") -> ()"
#define BACKWARD                                                                                             \
  "(Tensor grad_o, Tensor? grad_lse, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, Tensor(a!) dq, "      \
  "Tensor(b!) dk, Tensor(c!) dv, Tensor(d!)? dbias, bool repeatable, " VARIANT ") -> ()"
#define COLLECTIVE "(Tensor(a!) out, Tensor x, Tensor plan) -> ()"

STABLE_TORCH_LIBRARY(NAMESPACE, m) {
  m.def("version() -> str");
  m.def("attention_forward" FORWARD);
  m.def("attention_backward" BACKWARD);
  m.def("attention_sm80_forward" FORWARD);
  m.def("attention_sm80_backward" BACKWARD);
  m.def("all_gather" COLLECTIVE);
  m.def("all_to_all" COLLECTIVE);
  m.def("reduce_scatter" COLLECTIVE);
}

STABLE_TORCH_LIBRARY_IMPL(NAMESPACE, CompositeExplicitAutograd, m) { m.impl("version", TORCH_BOX(&version)); }

STABLE_TORCH_LIBRARY_IMPL(NAMESPACE, DEVICE, m) {
  m.impl("attention_forward", TORCH_BOX(&attention_forward<shardlib_attention_forward>));
  m.impl("attention_backward",
         TORCH_BOX((&attention_backward<shardlib_attention_backward, shardlib_attention_backward_workspace>)));
  m.impl("attention_sm80_forward", TORCH_BOX(&attention_forward<shardlib_attention_sm80_forward>));
  m.impl("attention_sm80_backward",
         TORCH_BOX((&attention_backward<shardlib_attention_sm80_backward,
                                        shardlib_attention_sm80_backward_workspace>)));
  m.impl("all_gather", TORCH_BOX((&collective<shardlib::AllGatherArgs, shardlib_all_gather>)));
  m.impl("all_to_all", TORCH_BOX((&collective<shardlib::AllToAllArgs, shardlib_all_to_all>)));
  m.impl("reduce_scatter", TORCH_BOX((&collective<shardlib::ReduceScatterArgs, shardlib_reduce_scatter>)));
}
