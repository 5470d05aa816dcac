// wgmma products. From issue to the wait that covers it, a product's accumulators hold NaN; shared memory and the
// registers of A are read at some moment between the two. So a missing wait, a stage that is released too early or a
// register of A that is overwritten too soon changes the result. Registers must be pinned between their last write and
// the fence: a product must find in them what they held then.
#include <deque>

#include "internals.h"

namespace shardlib {
namespace emulation {

struct Accumulator {
  int columns = 0;
  std::vector<float> value;    // [64][columns]
  float* registers[128] = {};  // of each thread, spoiled while products are in flight
};

struct Product {
  Issue first;  // by the first thread; all others' must be the same but for their registers
  const uint32_t* fragments[128] = {};
  std::shared_ptr<Accumulator> target;
  unsigned issued = 0;
};

struct Warpgroup {
  std::deque<Product> products;  // those that not every thread has waited for
  uint64_t gone = 0;             // how many came before products.front()
  uint64_t executed = 0;         // products [0, executed) are computed
  Waiters waiters;
  struct Threads {
    uint64_t issued = 0, waited = 0;
    std::vector<uint64_t> groups;  // the number of products issued when each group was committed
    std::vector<std::pair<std::shared_ptr<Accumulator>, uint64_t>> spoiled;  // and the index of its last product
    std::map<const void*, std::vector<unsigned char>> pinned;  // what registers held, since the last group
    bool fenced = false;
  } threads[128];
};

namespace {

Warpgroup& warpgroup() {
  auto& slot = self().cta->warpgroups[current->rank / 128];
  if (!slot) slot = std::make_shared<Warpgroup>();
  return *slot;
}

// An operand in shared memory, by its descriptor.
struct Operand {
  uint32_t start, leading, stride;
  bool along_k;  // k is the contiguous dim

  Operand(uint64_t bits, Major major) : along_k(major == Major::k) {
    start = uint32_t(bits & 0x3fff) << 4;
    leading = uint32_t(bits >> 16 & 0x3fff) << 4;
    stride = uint32_t(bits >> 32 & 0x3fff) << 4;
    if (bits >> 62 != 1) stop("a wgmma descriptor of a tile without the 128-byte swizzle");
    if ((bits >> 49 & 7) != 0) stop("a wgmma descriptor with a base offset: tiles here are aligned to their swizzle");
  }

  // Of element (i, k): i counts rows of A or columns of B, k is 0 to 15.
  uint32_t address(unsigned i, unsigned k) const {
    return swizzled(start + (along_k ? i % 8 * 128 + i / 8 * stride + k * 2
                                     : i % 64 * 2 + i / 64 * leading + k % 8 * 128 + k / 8 * stride));
  }

  // Writes element (i, k) to out[i * i_step + k * k_step].
  void read(unsigned rows, float* out, unsigned i_step, unsigned k_step, float (*decode)(uint16_t)) const {
    for (unsigned outer = 0; outer < (along_k ? rows : 16); ++outer)
      for (unsigned inner = 0; inner < (along_k ? 16 : rows); inner += 8) {
        const unsigned i = along_k ? outer : inner, k = along_k ? inner : outer;
        const uint32_t at = address(i, k);
        if (at < kSharedBase || at - kSharedBase + 16 > self().cta->shared_bytes)
          stop("wgmma reads outside shared memory");
        uint16_t bits[8];
        std::memcpy(bits, current->shared + (at - kSharedBase), 16);
        for (unsigned e = 0; e < 8; ++e)
          out[i * i_step + k * k_step + e * (along_k ? k_step : i_step)] = decode(bits[e]);
      }
  }
};

void execute(const Product& product) {
  static float a[64 * 16], b[16 * 256];
  const Issue& p = product.first;
  const int columns = p.columns;
  if (p.fragment) {
    for (unsigned t = 0; t < 128; ++t)
      for (unsigned i = 0; i < 8; ++i) {
        const unsigned row = t / 32 * 16 + t % 32 / 4 + i / 2 % 2 * 8, k = i / 4 * 8 + t % 4 * 2 + i % 2;
        a[row * 16 + k] = p.decode(uint16_t(product.fragments[t][i / 2] >> 16 * (i % 2)));
      }
  } else {
    Operand(p.a, p.a_major).read(64, a, 16, 1, p.decode);
  }
  Operand(p.b, p.b_major).read(unsigned(columns), b, 1, unsigned(columns), p.decode);
  float* __restrict__ c = product.target->value.data();
  if (!p.accumulate) std::fill(c, c + 64 * columns, 0.0f);
  for (int row = 0; row < 64; ++row, c += columns)
    for (int k = 0; k < 16; ++k)
      for (int n = 0; n < columns; ++n) c[n] += a[row * 16 + k] * b[k * columns + n];
}

void execute_up_to(Warpgroup& group, uint64_t end) {
  while (group.executed < end) execute(group.products[group.executed++ - group.gone]);
}

// Calls move(register, place in the 64 x N matrix) for one thread's part of an accumulator.
template <class Move> void each_register(int columns, unsigned t, Move move) {
  for (unsigned i = 0; i < unsigned(columns) / 2; ++i) {
    const unsigned row = t / 32 * 16 + t % 32 / 4 + i / 2 % 2 * 8;
    move(i, row * unsigned(columns) + i / 4 * 8 + t % 4 * 2 + i % 2);
  }
}

bool alike(const Issue& x, const Issue& y) {
  return x.columns == y.columns && x.a == y.a && x.b == y.b && !x.fragment == !y.fragment &&
         x.accumulate == y.accumulate && x.a_major == y.a_major && x.b_major == y.b_major;
}

void check_pinned(const Warpgroup::Threads& thread, const void* registers) {
  const auto found = thread.pinned.find(registers);
  if (found == thread.pinned.end() || std::memcmp(found->second.data(), registers, found->second.size()))
    stop("registers of wgmma that were not pinned between their last write and the fence");
}

// The thread's part of a product's accumulator; spoils its registers when no product has them yet.
std::shared_ptr<Accumulator> take_registers(Product& p, Warpgroup::Threads& thread, const Issue& issue) {
  const unsigned t = current->rank % 128;
  for (auto& [accumulator, last] : thread.spoiled)
    if (accumulator->registers[t] == issue.registers) {
      last = thread.issued;
      return accumulator;
    }
  if (!p.target) {
    p.target = std::make_shared<Accumulator>();
    p.target->columns = issue.columns;
    p.target->value.resize(size_t(64 * issue.columns));
  }
  check_pinned(thread, issue.registers);
  p.target->registers[t] = issue.registers;
  each_register(issue.columns, t, [&](unsigned i, unsigned at) {
    p.target->value[at] = issue.registers[i];
    issue.registers[i] = NAN;
  });
  thread.spoiled.emplace_back(p.target, thread.issued);
  return p.target;
}

}  // namespace

void pin(const void* registers, size_t bytes) {
  auto& thread = warpgroup().threads[current->rank % 128];
  const auto* held = static_cast<const unsigned char*>(registers);
  if (!thread.fenced) thread.pinned[registers].assign(held, held + bytes);
}

void issue(const Issue& issue) {
  Warpgroup& group = warpgroup();
  const unsigned t = current->rank % 128;
  auto& thread = group.threads[t];
  if (!thread.fenced) stop("wgmma without a wgmma_fence before the first product of a group");
  if (issue.fragment) check_pinned(thread, issue.fragment);
  if (group.gone + group.products.size() == thread.issued) {
    group.products.emplace_back();
    group.products.back().first = issue;
  }
  Product& p = group.products[thread.issued - group.gone];
  if (!alike(p.first, issue)) stop("threads of one warpgroup issue different wgmma operations");
  const auto mine = take_registers(p, thread, issue);
  if (p.target && p.target != mine) stop("threads of one warpgroup accumulate into different registers");
  if (mine->columns != issue.columns) stop("wgmma operations of different widths into one accumulator");
  p.target = mine;
  p.fragments[t] = issue.fragment;
  ++thread.issued;
  if (++p.issued == 128) {
    wake(group.waiters);
    if (chance(2)) execute_up_to(group, thread.issued);
  }
  give_way(64);
}

void wait_products(unsigned latest) {
  Warpgroup& group = warpgroup();
  const unsigned t = current->rank % 128;
  auto& thread = group.threads[t];
  if (thread.groups.size() <= latest) return;
  const uint64_t end = thread.groups[thread.groups.size() - 1 - latest];
  while (group.executed < end) {
    if (group.products[end - 1 - group.gone].issued == 128)
      execute_up_to(group, end);
    else
      wait_in(group.waiters, {"its warpgroup to issue wgmma %lu", end - 1});
  }
  thread.groups.erase(thread.groups.begin(), thread.groups.end() - latest);
  for (size_t i = 0; i < thread.spoiled.size();) {
    auto& [accumulator, last] = thread.spoiled[i];
    if (last >= end) {
      ++i;
      continue;
    }
    each_register(accumulator->columns, t,
                  [&](unsigned r, unsigned at) { accumulator->registers[t][r] = accumulator->value[at]; });
    thread.spoiled.erase(thread.spoiled.begin() + long(i));
  }
  thread.waited = end;
  uint64_t all = end;
  for (auto& other : group.threads) all = std::min(all, other.waited);
  for (; group.gone < all; ++group.gone) group.products.pop_front();
  give_way(24);
}

}  // namespace emulation

using namespace emulation;

uint64_t wgmma_descriptor(const void* tile, unsigned leading, unsigned stride) {
  return uint64_t((shared_offset(tile) & 0x3ffff) >> 4) | uint64_t((leading & 0x3ffff) >> 4) << 16 |
         uint64_t((stride & 0x3ffff) >> 4) << 32 | uint64_t(1) << 62;
}

void wgmma_fence() { warpgroup().threads[current->rank % 128].fenced = true; }

void wgmma_commit() {
  auto& thread = warpgroup().threads[current->rank % 128];
  thread.groups.push_back(thread.issued);
  thread.fenced = false;
  thread.pinned.clear();
}

}  // namespace shardlib
