// wgmma: 64 x N x 16 products of a warpgroup, decoded from the real descriptor bits and carried out late.
//
// From issue to the wait that covers it, a product's accumulators hold NaN; shared memory and the registers of A are
// read at some moment between the two. So a missing wait, an early release of a stage or a register of A that is
// overwritten too soon changes the result.
#pragma once
#include <array>
#include <deque>

#include "tma.h"

namespace shardlib {

enum class Major { k, mn };

namespace emulation {

struct Accumulator {
  int columns = 0;
  std::vector<float> value;      // [64][columns]
  float* registers[128] = {};    // of each thread, poisoned while products are in flight
};

struct Product {
  int columns = 0;
  uint64_t a = 0, b = 0;
  bool a_in_registers = false, accumulate = false;
  Major a_major = Major::k, b_major = Major::k;
  float (*decode)(uint16_t) = nullptr;
  const uint32_t* fragments[128] = {};
  std::shared_ptr<Accumulator> target;
  unsigned issued = 0;
  uint64_t key() const {
    return a * 1000003u ^ b * 7919u ^ uint64_t(columns) << 40 ^ uint64_t(a_in_registers) << 50 ^ uint64_t(accumulate) << 51;
  }
};

struct Warpgroup {
  std::deque<Product> products;  // those that not every thread has waited for
  uint64_t first = 0;            // index of products.front()
  uint64_t executed = 0;         // products [0, executed) are computed
  Waiters waiters;
  struct Thread {
    uint64_t issued = 0, waited = 0;
    std::vector<uint64_t> groups;  // number of products issued when each group was committed
    std::vector<std::pair<std::shared_ptr<Accumulator>, uint64_t>> poisoned;  // and its last product's index
    bool fenced = false;
  } threads[128];
};

inline Warpgroup& warpgroup() {
  auto& slot = current->cta->warpgroups[current->rank / 128];
  if (!slot) slot = std::make_shared<Warpgroup>();
  return *slot;
}

// Byte address of 8 neighbouring elements (along the contiguous dim) of an operand, relative to the descriptor.
struct Operand {
  uint32_t start, leading, stride;
  Swizzle swizzle;
  Major major;

  explicit Operand(uint64_t bits, Major major_) : major(major_) {
    start = uint32_t(bits & 0x3fff) << 4;
    leading = uint32_t(bits >> 16 & 0x3fff) << 4;
    stride = uint32_t(bits >> 32 & 0x3fff) << 4;
    const unsigned layout = unsigned(bits >> 62);
    swizzle = layout == 1 ? Swizzle::b128 : layout == 2 ? Swizzle::b64 : layout == 3 ? Swizzle::b32 : Swizzle::none;
    if ((bits >> 49 & 7) != 0) stop("a wgmma descriptor with a base offset; tiles here are aligned to their swizzle");
  }

  // Element (i, k): i counts rows of A or columns of B, k is 0 to 15.
  uint32_t address(unsigned i, unsigned k) const {
    const unsigned width = swizzle == Swizzle::b128 ? 64 : swizzle == Swizzle::b64 ? 32 : swizzle == Swizzle::b32 ? 16 : 8;
    uint32_t offset;
    if (major == Major::k) {
      offset = (i % 8) * width * 2 + (i / 8) * stride + (k % width) * 2 + (k / width) * leading;
    } else if (swizzle == Swizzle::none) {
      offset = (i % 8) * 2 + (i / 8) * stride + (k % 8) * 16 + (k / 8) * leading;
    } else {
      offset = (i % width) * 2 + (i / width) * leading + (k % 8) * width * 2 + (k / 8) * stride;
    }
    return swizzled(start + offset, swizzle);
  }

  // Writes element (i, k) to out[i * i_step + k * k_step].
  void read(unsigned rows, float* out, unsigned i_step, unsigned k_step, float (*decode)(uint16_t)) const {
    const Cta& cta = *current->cta;
    const bool along_k = major == Major::k;
    for (unsigned outer = 0; outer < (along_k ? rows : 16); ++outer)
      for (unsigned inner = 0; inner < (along_k ? 16 : rows); inner += 8) {
        const unsigned i = along_k ? outer : inner, k = along_k ? inner : outer;
        const uint32_t at = address(i, k);
        if (at < kSharedBase || at - kSharedBase + 16 > cta.shared_bytes) stop("wgmma reads outside shared memory");
        uint16_t bits[8];
        std::memcpy(bits, cta.shared + (at - kSharedBase), 16);
        float* to = out + i * i_step + k * k_step;
        for (unsigned e = 0; e < 8; ++e) to[e * (along_k ? k_step : i_step)] = decode(bits[e]);
      }
  }
};

inline void execute(Product& p) {
  static float a[64 * 16], b[16 * 256];
  if (p.a_in_registers) {
    for (unsigned t = 0; t < 128; ++t)
      for (unsigned r = 0; r < 4; ++r)
        for (unsigned half = 0; half < 2; ++half) {
          const unsigned row = t / 32 * 16 + t % 32 / 4 + (r & 1) * 8, k = t % 4 * 2 + half + (r >> 1) * 8;
          a[row * 16 + k] = p.decode(uint16_t(p.fragments[t][r] >> (16 * half)));
        }
  } else {
    Operand(p.a, p.a_major).read(64, a, 16, 1, p.decode);
  }
  Operand(p.b, p.b_major).read(unsigned(p.columns), b, 1, unsigned(p.columns), p.decode);
  float* c = p.target->value.data();
  if (!p.accumulate) std::fill(c, c + 64 * p.columns, 0.0f);
  for (int row = 0; row < 64; ++row, c += p.columns)
    for (int k = 0; k < 16; ++k) {
      const float x = a[row * 16 + k];
      const float* y = b + k * p.columns;
      for (int n = 0; n < p.columns; ++n) c[n] += x * y[n];
    }
}

inline void execute_up_to(Warpgroup& group, uint64_t end) {
  while (group.executed < end) execute(group.products[group.executed++ - group.first]);
}

// Moves one thread's part of a 64 x N accumulator between the matrix and its registers.
template <class Move> inline void each_register(int columns, unsigned t, Move move) {
  for (int i = 0; i < columns / 2; ++i) {
    const unsigned row = t / 32 * 16 + t % 32 / 4 + unsigned(i >> 1 & 1) * 8;
    move(i, row * unsigned(columns) + unsigned(i / 4 * 8) + t % 4 * 2 + unsigned(i & 1));
  }
}

inline void issue(Product product, float* registers, const uint32_t* fragment) {
  Warpgroup& group = warpgroup();
  const unsigned t = current->rank % 128;
  auto& thread = group.threads[t];
  if (!thread.fenced) stop("wgmma without a wgmma_fence before the first product of a group");
  if (group.first + group.products.size() == thread.issued) group.products.push_back(product);
  Product& p = group.products[thread.issued - group.first];
  if (p.key() != product.key()) stop("threads of one warpgroup issue different wgmma operations");
  std::shared_ptr<Accumulator> mine;
  for (auto& [accumulator, last] : thread.poisoned)
    if (accumulator->registers[t] == registers) mine = accumulator, last = thread.issued;
  if (!mine) {
    if (!p.target) {
      p.target = std::make_shared<Accumulator>();
      p.target->columns = p.columns;
      p.target->value.resize(size_t(64 * p.columns));
    }
    mine = p.target;
    mine->registers[t] = registers;
    each_register(p.columns, t, [&](int i, unsigned at) { mine->value[at] = registers[i], registers[i] = NAN; });
    thread.poisoned.emplace_back(mine, thread.issued);
  }
  if (p.target && p.target != mine) stop("threads of one warpgroup accumulate into different registers");
  p.target = mine;
  if (mine->columns != p.columns) stop("wgmma operations of different widths into one accumulator");
  p.fragments[t] = fragment;
  ++thread.issued;
  if (++p.issued == 128) {
    if (!group.waiters.empty()) wake(group.waiters);
    if (chance(2)) execute_up_to(group, thread.issued);
  }
  give_way(64);
}

}  // namespace emulation

// A tile in shared memory as wgmma reads it. Offsets in bytes. K-major: `stride` is from 8 rows to the next 8, `leading`
// counts without swizzle only. MN-major with swizzle: `leading` is from one swizzle width to the next along MN, `stride`
// from 8 of k to the next 8.
inline uint64_t wgmma_descriptor(const void* tile, unsigned leading, unsigned stride, Swizzle swizzle = Swizzle::b128) {
  const uint64_t layout = swizzle == Swizzle::b128 ? 1 : swizzle == Swizzle::b64 ? 2 : swizzle == Swizzle::b32 ? 3 : 0;
  return uint64_t((emulation::shared_offset(tile) & 0x3ffff) >> 4) | uint64_t((leading & 0x3ffff) >> 4) << 16 |
         uint64_t((stride & 0x3ffff) >> 4) << 32 | layout << 62;
}

inline void wgmma_fence() {
  emulation::warpgroup().threads[emulation::current->rank % 128].fenced = true;
}

template <class T, int N, Major A = Major::k, Major B = Major::k>
inline void wgmma(float (&d)[N / 2], uint64_t a, uint64_t b, bool accumulate) {
  static_assert(N % 16 == 0 && N >= 16 && N <= 256);
  emulation::Product p;
  p.columns = N, p.a = a, p.b = b, p.accumulate = accumulate, p.a_major = A, p.b_major = B;
  p.decode = [](uint16_t bits) { return to_float(T{bits}); };
  emulation::issue(p, d, nullptr);
}

template <class T, int N, Major B = Major::k>
inline void wgmma(float (&d)[N / 2], const uint32_t (&a)[4], uint64_t b, bool accumulate) {
  static_assert(N % 16 == 0 && N >= 16 && N <= 256);
  emulation::Product p;
  p.columns = N, p.b = b, p.a_in_registers = true, p.accumulate = accumulate, p.b_major = B;
  p.decode = [](uint16_t bits) { return to_float(T{bits}); };
  emulation::issue(p, d, a);
}

inline void wgmma_commit() {
  auto& thread = emulation::warpgroup().threads[emulation::current->rank % 128];
  thread.groups.push_back(thread.issued);
  thread.fenced = false;
}

// All but the N latest groups are complete: their accumulators may be read, their operands overwritten.
template <int N> inline void wgmma_wait() {
  using namespace emulation;
  Warpgroup& group = warpgroup();
  const unsigned t = current->rank % 128;
  auto& thread = group.threads[t];
  if (thread.groups.size() <= N) return;
  const uint64_t end = thread.groups[thread.groups.size() - 1 - N];
  while (group.executed < end) {
    if (group.products[end - 1 - group.first].issued == 128)
      execute_up_to(group, end);
    else
      wait_in(group.waiters, {"its warpgroup to issue wgmma %lu", end - 1});
  }
  thread.groups.erase(thread.groups.begin(), thread.groups.end() - N);
  for (size_t i = 0; i < thread.poisoned.size();) {
    auto& [accumulator, last] = thread.poisoned[i];
    if (last >= end) {
      ++i;
      continue;
    }
    each_register(accumulator->columns, t, [&](int r, unsigned at) { accumulator->registers[t][r] = accumulator->value[at]; });
    thread.poisoned.erase(thread.poisoned.begin() + long(i));
  }
  thread.waited = end;
  uint64_t all = end;
  for (auto& other : group.threads) all = std::min(all, other.waited);
  while (group.first < all) group.products.pop_front(), ++group.first;
  give_way();
}

// Keeps the compiler from moving accumulators across a fence or a wait.
template <int R> inline void wgmma_keep(float (&)[R]) {}
template <int R> inline void wgmma_keep(uint32_t (&)[R]) {}

}  // namespace shardlib
