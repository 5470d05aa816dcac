// cp.async lands when it is waited for, or at its commit by chance; fragments pass between the lanes of a warp.
#include "internals.h"

namespace shardlib {
namespace emulation {
namespace {

void finish_copies(std::vector<CopyInFlight>& group) {
  for (auto& copy : group) {
    std::memset(copy.to, 0, 16);
    std::memcpy(copy.to, copy.from, copy.valid);
  }
  group.clear();
}

struct Fragments {
  uint32_t a[4], b[2];
};
struct Row {
  void* to;
  uint32_t words[4];
};

}  // namespace

void wait_copies(unsigned latest) {
  auto& groups = self().copy_groups;
  size_t g = 0;
  for (; g + 1 + latest < groups.size(); ++g) finish_copies(groups[g]);
  groups.erase(groups.begin(), groups.begin() + long(g));
}

void load_matrices(uint32_t (&out)[4], const void* row, bool transposed) {
  const unsigned lane = current->lane;
  offset_in_shared(row, 16, 16, "a matrix row");
  auto* slots = exchange(kFullMask, &row, sizeof row, transposed ? 11 : 10);
  for (unsigned m = 0; m < 4; ++m) {
    out[m] = 0;
    for (unsigned half = 0; half < 2; ++half) {
      const unsigned r = transposed ? lane % 4 * 2 + half : lane / 4, c = transposed ? lane / 4 : lane % 4 * 2 + half;
      uint16_t element;
      std::memcpy(&element, from_lane<const unsigned char*>(slots, int(m * 8 + r)) + 2 * c, 2);
      out[m] |= uint32_t(element) << (16 * half);
    }
  }
  exchange(kFullMask, &row, sizeof row, 9);  // all lanes have read before any goes on to overwrite the rows
}

void multiply(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], float (*decode)(uint16_t)) {
  const Fragments sent = {{a[0], a[1], a[2], a[3]}, {b[0], b[1]}};
  auto* slots = exchange(kFullMask, &sent, sizeof sent, 40);
  const unsigned lane = current->lane;
  float rows[2][16], columns[2][16];  // of this lane: rows lane / 4 (+ 8) of a, columns 2 (lane % 4) (+ 1) of b
  for (unsigned quad = 0; quad < 4; ++quad) {
    const auto left = from_lane<Fragments>(slots, int(lane / 4 * 4 + quad));
    for (unsigned i = 0; i < 8; ++i)
      rows[i / 2 % 2][i / 4 * 8 + quad * 2 + i % 2] = decode(uint16_t(left.a[i / 2] >> i % 2 * 16));
    for (unsigned c = 0; c < 2; ++c) {
      const auto right = from_lane<Fragments>(slots, int((lane % 4 * 2 + c) * 4 + quad));
      for (unsigned i = 0; i < 4; ++i)
        columns[c][i / 2 * 8 + quad * 2 + i % 2] = decode(uint16_t(right.b[i / 2] >> i % 2 * 16));
    }
  }
  for (unsigned i = 0; i < 4; ++i) {
    float sum = 0;
    for (unsigned k = 0; k < 16; ++k) sum += rows[i / 2][k] * columns[i % 2][k];
    d[i] += sum;
  }
}

}  // namespace emulation

using namespace emulation;

void stmatrix_x4(void* row, const uint32_t (&in)[4]) {
  offset_in_shared(row, 16, 16, "a matrix row");
  const Row sent = {row, {in[0], in[1], in[2], in[3]}};
  auto* slots = exchange(kFullMask, &sent, sizeof sent, 30);
  const unsigned m = current->lane / 8, r = current->lane % 8;
  for (unsigned c = 0; c < 8; ++c) {  // this lane writes the row whose address it gave
    const auto value = uint16_t(from_lane<Row>(slots, int(r * 4 + c / 2)).words[m] >> (16 * (c % 2)));
    std::memcpy(static_cast<unsigned char*>(row) + 2 * c, &value, 2);
  }
  exchange(kFullMask, &row, sizeof row, 9);  // rows of other lanes may be read from here on
}

void cp_async_16(void* to, const void* from, unsigned valid) {
  offset_in_shared(to, 16, 16, "a cp.async");
  if (valid > 16 || (valid && reinterpret_cast<uintptr_t>(from) % 16)) stop("cp.async from an unaligned address");
  auto& groups = self().copy_groups;
  if (groups.empty()) groups.emplace_back();
  std::memset(to, 0xff, 16);
  groups.back().push_back({to, from, valid});
}

void cp_async_commit() {
  auto& groups = self().copy_groups;
  if (groups.empty()) groups.emplace_back();
  if (chance(4)) finish_copies(groups.back());
  groups.emplace_back();
  give_way(24);
}

}  // namespace shardlib
