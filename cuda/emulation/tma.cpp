// Tile and bulk copies. A load either lands at once and reports late, or spoils its target at once and lands late: a
// missing wait reads NaN, and a stage that is refilled while it is still being read changes under its reader. A store
// reads its source at one later moment and writes its target at another.
#include "internals.h"

namespace shardlib {
namespace emulation {

// 16-byte chunks change places by the bits above 128 bytes.
uint32_t swizzled(uint32_t address) { return address ^ ((address >> 3) & 0x70); }

struct BulkStore {
  std::function<void(std::vector<unsigned char>&)> read;
  std::function<void(const std::vector<unsigned char>&)> write;
  Cta* cta = nullptr;
  std::vector<unsigned char> held;
  bool has_read = false, has_written = false;

  void do_read() {
    if (has_read) return;
    read(held);
    has_read = true;
    --cta->in_flight;
  }
  void do_write() {
    do_read();
    if (has_written) return;
    write(held);
    has_written = true;
    memory_event();
  }
};

namespace {

struct Tile {
  TensorMap map;
  int at[4];
  unsigned char* shared;  // start of the CTA's shared memory
  uint32_t offset;        // of the tile in it
  unsigned bytes;

  Tile(const TensorMap& map_, const void* tile, int x, int y, int z, int w)
      : map(map_), at{x, y, z, w}, shared(current->shared) {
    bytes = 2 * map.box[0] * map.box[1] * map.box[2] * map.box[3];
    offset = offset_in_shared(tile, bytes, 128, "a tile");
  }

  // Calls visit(shared, global, begin, end) for the tile's 16-byte chunks: bytes [begin, end) lie inside the tensor.
  template <class Visit> void chunks(Visit visit) const {
    const int64_t row = map.box[0] * 2, rows = bytes / row, first = int64_t(at[0]) * 2;
    const int64_t width = int64_t(map.sizes[0]) * 2;
    uint32_t address = offset;
    for (int64_t r = 0; r < rows; ++r) {
      unsigned char* global = map.base + first;
      bool inside = true;
      int64_t rest = r;
      for (int d = 1; d < 4; rest /= map.box[d++]) {
        const int64_t place = at[d] + rest % map.box[d];
        inside = inside && place >= 0 && place < int64_t(map.sizes[d]);
        global += place * int64_t(map.strides[d]);
      }
      for (int64_t i = 0; i < row; i += 16, address += 16) {
        const int64_t begin = std::clamp<int64_t>(-(first + i), 0, 16),
                      end = std::clamp<int64_t>(width - (first + i), begin, 16);
        visit(shared + swizzled(address), global + i, unsigned(begin), unsigned(inside ? end : begin));
      }
    }
  }
};

void issue_store(std::shared_ptr<BulkStore> store) {
  auto& groups = self().bulk_groups;
  if (groups.empty()) groups.emplace_back();
  groups.back().push_back(store);
  store->cta = self().cta;
  ++store->cta->in_flight;
  if (chance(3)) store->do_read();
  later([store] { store->do_write(); });
  give_way(24);
}

}  // namespace

void wait_stores(unsigned latest, bool only_read) {
  auto& groups = self().bulk_groups;
  size_t g = 0;
  for (; g + 1 + latest < groups.size(); ++g)
    for (auto& store : groups[g]) only_read ? store->do_read() : store->do_write();
  if (!only_read) groups.erase(groups.begin(), groups.begin() + long(g));
}

}  // namespace emulation

using namespace emulation;

int make_tensor_map(TensorMap& map, TileType, const void* base, const uint64_t (&sizes)[4],
                    const uint64_t (&strides)[3], const uint32_t (&box)[4]) {
  if (reinterpret_cast<uintptr_t>(base) % 16) return fail(1, "a tensor map needs an address that is a multiple of 16");
  const unsigned row = box[0] * 2;
  if (row > 128 || row % 16) return fail(1, "a tensor map's box is %u bytes wide; 16 to 128, by 16", row);
  map = TensorMap{};
  for (int d = 0; d < 4; ++d) {
    if (box[d] < 1 || box[d] > 256) return fail(1, "a tensor map's box has %u elements in dim %d; 1 to 256", box[d], d);
    if (sizes[d] < 1 || sizes[d] > uint64_t(1) << 32) return fail(1, "a tensor map's dim %d is empty or too large", d);
    if (d > 0 && (strides[d - 1] % 16 || strides[d - 1] >= uint64_t(1) << 40))
      return fail(1, "a tensor map's stride of dim %d is not a multiple of 16 bytes below 2^40", d);
    map.sizes[d] = sizes[d], map.box[d] = box[d];
    map.strides[d] = d == 0 ? 2 : strides[d - 1];
  }
  map.base = static_cast<unsigned char*>(const_cast<void*>(base));
  return 0;
}

void tma_load(void* to, const TensorMap* map, Barrier* barrier, int x, int y, int z, int w) {
  const Tile tile(*map, to, x, y, z, w);
  check_barrier(barrier);
  const auto fetch = [tile] {
    tile.chunks([](unsigned char* shared, const unsigned char* global, unsigned begin, unsigned end) {
      std::memset(shared, 0, 16);
      if (begin < end) std::memcpy(shared + begin, global + begin, end - begin);
    });
  };
  const bool early = chance(2);
  if (early)
    fetch();
  else
    tile.chunks([](unsigned char* shared, const unsigned char*, unsigned, unsigned) { std::memset(shared, 0xff, 16); });
  Cta* cta = self().cta;
  ++cta->in_flight;
  later([=] {
    --cta->in_flight;
    if (!early) fetch();
    complete_bytes(*cta, barrier, tile.bytes);
  });
  give_way(24);
}

void tma_store(const TensorMap* map, const void* from, int x, int y, int z, int w) {
  const Tile tile(*map, from, x, y, z, w);
  auto store = std::make_shared<BulkStore>();
  store->read = [tile](std::vector<unsigned char>& held) {
    tile.chunks([&](unsigned char* shared, unsigned char*, unsigned, unsigned) {
      held.insert(held.end(), shared, shared + 16);
    });
  };
  store->write = [tile](const std::vector<unsigned char>& held) {
    const unsigned char* next = held.data();
    tile.chunks([&](unsigned char*, unsigned char* global, unsigned begin, unsigned end) {
      if (begin < end) std::memcpy(global + begin, next + begin, end - begin);
      next += 16;
    });
  };
  issue_store(std::move(store));
}

void bulk_reduce_add(float* to, const float* from, unsigned bytes) {
  offset_in_shared(from, bytes, 16, "a bulk copy");
  if (reinterpret_cast<uintptr_t>(to) % 16 || bytes % 16) stop("a bulk copy not aligned to 16 bytes");
  auto store = std::make_shared<BulkStore>();
  const auto* source = reinterpret_cast<const unsigned char*>(from);
  store->read = [=](std::vector<unsigned char>& held) { held.assign(source, source + bytes); };
  store->write = [=](const std::vector<unsigned char>& held) {
    const auto* addends = reinterpret_cast<const float*>(held.data());
    for (unsigned i = 0; i < bytes / 4; ++i) to[i] += addends[i];
  };
  issue_store(std::move(store));
}

void bulk_commit() {
  auto& groups = self().bulk_groups;
  if (groups.empty()) groups.emplace_back();
  groups.emplace_back();
}

}  // namespace shardlib
