// A context switch of a few nanoseconds: every emulated CUDA thread runs on a stack of its own.
//
// swapcontext() would do, but enters the kernel to save the signal mask at each switch; it is the form for other
// processors only. A context is nothing but a stack pointer; what a function call must preserve is on its stack.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#if !defined(__x86_64__) && !defined(__aarch64__)
#include <ucontext.h>
#endif

namespace shardlib::emulation {

using Context = void*;  // a stack pointer, or a ucontext_t

#if defined(__x86_64__)

extern "C" void shardlib_switch_context(Context* save, Context load);
// Preserved by the calling convention: rbx, rbp, r12-r15. The rounding mode never changes here.
asm(R"(
.text
.local shardlib_switch_context
.type shardlib_switch_context, @function
shardlib_switch_context:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size shardlib_switch_context, .-shardlib_switch_context
)");

inline void make_context(Context& context, unsigned char* stack, size_t bytes, void (*entry)()) {
  auto top = reinterpret_cast<uintptr_t>(stack + bytes) & ~uintptr_t(63);
  auto* frame = reinterpret_cast<void**>(top - 64);
  std::memset(frame, 0, 64);
  frame[6] = reinterpret_cast<void*>(entry);  // `ret` finds it after six pops; rsp is then 8 modulo 16, as after a call
  context = frame;
}

#elif defined(__aarch64__)

extern "C" void shardlib_switch_context(Context* save, Context load);
// Preserved by the calling convention: x19-x30 and the low halves of v8-v15.
asm(R"(
.text
.local shardlib_switch_context
.type shardlib_switch_context, %function
shardlib_switch_context:
  sub sp, sp, #160
  stp x19, x20, [sp, #0]
  stp x21, x22, [sp, #16]
  stp x23, x24, [sp, #32]
  stp x25, x26, [sp, #48]
  stp x27, x28, [sp, #64]
  stp x29, x30, [sp, #80]
  stp d8, d9, [sp, #96]
  stp d10, d11, [sp, #112]
  stp d12, d13, [sp, #128]
  stp d14, d15, [sp, #144]
  mov x9, sp
  str x9, [x0]
  mov sp, x1
  ldp x19, x20, [sp, #0]
  ldp x21, x22, [sp, #16]
  ldp x23, x24, [sp, #32]
  ldp x25, x26, [sp, #48]
  ldp x27, x28, [sp, #64]
  ldp x29, x30, [sp, #80]
  ldp d8, d9, [sp, #96]
  ldp d10, d11, [sp, #112]
  ldp d12, d13, [sp, #128]
  ldp d14, d15, [sp, #144]
  add sp, sp, #160
  ret
.size shardlib_switch_context, .-shardlib_switch_context
)");

inline void make_context(Context& context, unsigned char* stack, size_t bytes, void (*entry)()) {
  auto top = reinterpret_cast<uintptr_t>(stack + bytes) & ~uintptr_t(63);
  auto* frame = reinterpret_cast<void**>(top - 160);
  std::memset(frame, 0, 160);
  frame[11] = reinterpret_cast<void*>(entry);  // x30, the return address
  context = frame;
}

#else

inline void shardlib_switch_context(Context* save, Context load) {
  if (*save == nullptr) *save = std::calloc(1, sizeof(ucontext_t));
  swapcontext(static_cast<ucontext_t*>(*save), static_cast<ucontext_t*>(load));
}

inline void make_context(Context& context, unsigned char* stack, size_t bytes, void (*entry)()) {
  if (context == nullptr) context = std::calloc(1, sizeof(ucontext_t));
  auto* made = static_cast<ucontext_t*>(context);
  getcontext(made);
  made->uc_stack.ss_sp = stack;
  made->uc_stack.ss_size = bytes;
  made->uc_link = nullptr;
  makecontext(made, entry, 0);
}

#endif

inline void switch_context(Context& save, Context load) { shardlib_switch_context(&save, load); }

}  // namespace shardlib::emulation
