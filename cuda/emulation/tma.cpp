// Tile and bulk copies. A load either lands at once and reports late, or spoils its target at once and lands late: a
// missing wait reads NaN, and a stage that is refilled while it is still being read changes under its reader. A store
// reads its source at one later moment and writes its target at another.
#include "internals.h"

namespace shardlib {
namespace emulation {

uint32_t swizzled(uint32_t address, Swizzle swizzle) {  // 16-byte chunks change places by the bits above 128 bytes
  switch (swizzle) {
    case Swizzle::b128: return address ^ ((address >> 3) & 0x70);
    case Swizzle::b64: return address ^ ((address >> 3) & 0x30);
    case Swizzle::b32: return address ^ ((address >> 3) & 0x10);
    default: return address;
  }
}

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
  int at[5] = {};
  unsigned char* shared = nullptr;  // start of the CTA's shared memory
  uint32_t offset = 0;              // of the tile in it
  unsigned bytes = 0;

  Tile(const TensorMap& map_, const void* tile, int rank, const int* at_) : map(map_), bytes(map_.element_bytes) {
    if (map.rank != rank) stop("a tile with other coordinates than its tensor map has dims");
    std::copy(at_, at_ + rank, at);
    for (int d = 0; d < rank; ++d) bytes *= map.box[d];
    shared = current->shared;
    offset = offset_in_shared(tile, bytes, 128, "a tile");
  }

  // Calls visit(shared, global, begin, end) for the tile's 16-byte chunks: bytes [begin, end) lie inside the tensor.
  template <class Visit> void chunks(Visit visit) const {
    const int64_t row = map.box[0] * map.element_bytes, rows = bytes / row, first = int64_t(at[0]) * map.element_bytes;
    const int64_t width = int64_t(map.sizes[0]) * map.element_bytes;
    uint32_t address = offset;
    for (int64_t r = 0; r < rows; ++r) {
      unsigned char* global = map.base + first;
      bool inside = true;
      int64_t rest = r;
      for (int d = 1; d < map.rank; rest /= map.box[d++]) {
        const int64_t place = at[d] + rest % map.box[d];
        inside = inside && place >= 0 && place < int64_t(map.sizes[d]);
        global += place * int64_t(map.strides[d]);
      }
      for (int64_t x = 0; x < row; x += 16, address += 16) {
        const int64_t begin = std::clamp<int64_t>(-(first + x), 0, 16),
                      end = std::clamp<int64_t>(width - (first + x), begin, 16);
        visit(shared + swizzled(address, map.swizzle), global + x, unsigned(begin), unsigned(inside ? end : begin));
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

void add_floats(unsigned char* to, const unsigned char* from, unsigned bytes) {
  for (unsigned i = 0; i < bytes; i += 4) {
    float a, b;
    std::memcpy(&a, to + i, 4), std::memcpy(&b, from + i, 4);
    a += b;
    std::memcpy(to + i, &a, 4);
  }
}

void check_bulk(const void* shared, const void* global, unsigned bytes) {
  offset_in_shared(shared, bytes, 16, "a bulk copy");
  if (reinterpret_cast<uintptr_t>(global) % 16 || bytes % 16) stop("a bulk copy not aligned to 16 bytes");
}

}  // namespace

void load_tile(void* to, const TensorMap& map, Barrier* barrier, int rank, const int* at) {
  const Tile tile(map, to, rank, at);
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

void store_tile(const TensorMap& map, const void* from, bool add, int rank, const int* at) {
  const Tile tile(map, from, rank, at);
  if (add && map.type != TileType::f32) stop("only tiles of float are added to global memory");
  auto store = std::make_shared<BulkStore>();
  store->read = [tile](std::vector<unsigned char>& held) {
    tile.chunks([&](unsigned char* shared, unsigned char*, unsigned, unsigned) {
      held.insert(held.end(), shared, shared + 16);
    });
  };
  store->write = [tile, add](const std::vector<unsigned char>& held) {
    const unsigned char* next = held.data();
    tile.chunks([&](unsigned char*, unsigned char* global, unsigned begin, unsigned end) {
      if (add)
        add_floats(global + begin, next + begin, end - begin);
      else if (begin < end)
        std::memcpy(global + begin, next + begin, end - begin);
      next += 16;
    });
  };
  issue_store(std::move(store));
}

void store_bytes(void* to, const void* from, unsigned bytes, bool add) {
  check_bulk(from, to, bytes);
  auto store = std::make_shared<BulkStore>();
  const auto* source = static_cast<const unsigned char*>(from);
  auto* target = static_cast<unsigned char*>(to);
  store->read = [=](std::vector<unsigned char>& held) { held.assign(source, source + bytes); };
  store->write = [=](const std::vector<unsigned char>& held) {
    if (add)
      add_floats(target, held.data(), bytes);
    else
      std::memcpy(target, held.data(), bytes);
  };
  issue_store(std::move(store));
}

void wait_stores(unsigned latest, bool only_read) {
  auto& groups = self().bulk_groups;
  size_t g = 0;
  for (; g + 1 + latest < groups.size(); ++g)
    for (auto& store : groups[g]) only_read ? store->do_read() : store->do_write();
  if (!only_read) groups.erase(groups.begin(), groups.begin() + long(g));
}

}  // namespace emulation

using namespace emulation;

int make_tensor_map(TensorMap& map, TileType type, int rank, const void* base, const uint64_t* sizes,
                    const uint64_t* strides, const uint32_t* box, Swizzle swizzle) {
  const unsigned element = type == TileType::f32 ? 4 : 2;
  if (rank < 1 || rank > 5) return fail(1, "a tensor map has 1 to 5 dims, not %d", rank);
  if (reinterpret_cast<uintptr_t>(base) % 16) return fail(1, "a tensor map needs an address that is a multiple of 16");
  const unsigned row = box[0] * element;
  const unsigned limit = swizzle == Swizzle::b128  ? 128
                         : swizzle == Swizzle::b64 ? 64
                         : swizzle == Swizzle::b32 ? 32
                                                   : 1024;
  if (row > limit || row % 16) return fail(1, "a tensor map's box is %u bytes wide; 16 to %u, by 16", row, limit);
  map = TensorMap{};
  for (int d = 0; d < rank; ++d) {
    if (box[d] < 1 || box[d] > 256) return fail(1, "a tensor map's box has %u elements in dim %d; 1 to 256", box[d], d);
    if (sizes[d] < 1 || sizes[d] > uint64_t(1) << 32) return fail(1, "a tensor map's dim %d is empty or too large", d);
    if (d > 0 && (strides[d - 1] % 16 || strides[d - 1] >= uint64_t(1) << 40))
      return fail(1, "a tensor map's stride of dim %d is not a multiple of 16 bytes below 2^40", d);
    map.sizes[d] = sizes[d], map.box[d] = box[d];
    map.strides[d] = d == 0 ? element : strides[d - 1];
  }
  map.base = static_cast<unsigned char*>(const_cast<void*>(base));
  map.rank = rank, map.element_bytes = element, map.type = type, map.swizzle = swizzle;
  return 0;
}

void bulk_load(void* to, const void* from, unsigned bytes, Barrier* barrier) {
  check_bulk(to, from, bytes);
  check_barrier(barrier);
  Cta* cta = self().cta;
  std::memset(to, 0xff, bytes);
  ++cta->in_flight;
  later([=] {
    --cta->in_flight;
    std::memcpy(to, from, bytes);
    complete_bytes(*cta, barrier, bytes);
  });
  give_way(24);
}

void bulk_commit() {
  auto& groups = self().bulk_groups;
  if (groups.empty()) groups.emplace_back();
  groups.emplace_back();
}

}  // namespace shardlib
