// The tensor memory accelerator: tiles between global and shared memory, finished at a random later moment.
//
// A load either lands at once and reports late, or spoils its target at once and lands late: a missing wait reads
// NaN, and a stage that is refilled while it is still being read changes under its reader.
#pragma once
#include "sync.h"

namespace shardlib {

enum class TileType { bf16, fp16, f32 };
enum class Swizzle { none, b32, b64, b128 };

// What cuTensorMapEncodeTiled encodes. Sizes, strides (bytes; of dims 1 and up) and the box are innermost first.
struct alignas(64) TensorMap {
  unsigned char* base = nullptr;
  int rank = 0;
  unsigned element_bytes = 0;
  TileType type = TileType::bf16;
  Swizzle swizzle = Swizzle::none;
  uint64_t sizes[5] = {}, strides[5] = {};
  uint32_t box[5] = {};
};

inline int make_tensor_map(TensorMap& map, TileType type, int rank, const void* base, const uint64_t* sizes,
                           const uint64_t* strides, const uint32_t* box, Swizzle swizzle) {
  const unsigned element = type == TileType::f32 ? 4 : 2;
  if (rank < 1 || rank > 5) return fail(1, "a tensor map has 1 to 5 dims, not %d", rank);
  if (reinterpret_cast<uintptr_t>(base) % 16) return fail(1, "a tensor map needs an address that is a multiple of 16");
  const unsigned row = box[0] * element;
  const unsigned limit = swizzle == Swizzle::b128 ? 128 : swizzle == Swizzle::b64 ? 64 : swizzle == Swizzle::b32 ? 32 : 1024;
  if (row > limit || row % 16) return fail(1, "a tensor map's box is %u bytes wide; 16 to %u, by 16", row, limit);
  map = TensorMap{};
  for (int d = 0; d < rank; ++d) {
    if (box[d] < 1 || box[d] > 256) return fail(1, "a tensor map's box has %u elements in dim %d; 1 to 256", box[d], d);
    if (sizes[d] < 1 || sizes[d] > (uint64_t(1) << 32)) return fail(1, "a tensor map's dim %d is empty or too large", d);
    if (d > 0 && (strides[d - 1] % 16 || strides[d - 1] >= (uint64_t(1) << 40)))
      return fail(1, "a tensor map's stride of dim %d is not a multiple of 16 bytes below 2^40", d);
    map.sizes[d] = sizes[d], map.box[d] = box[d];
    map.strides[d] = d == 0 ? element : strides[d - 1];
  }
  map.base = static_cast<unsigned char*>(const_cast<void*>(base));
  map.rank = rank, map.element_bytes = element, map.type = type, map.swizzle = swizzle;
  return 0;
}

namespace emulation {

// 16-byte chunks change places by the address bits above 128 bytes.
inline uint32_t swizzled(uint32_t address, Swizzle swizzle) {
  switch (swizzle) {
    case Swizzle::b128: return address ^ ((address >> 3) & 0x70);
    case Swizzle::b64: return address ^ ((address >> 3) & 0x30);
    case Swizzle::b32: return address ^ ((address >> 3) & 0x10);
    default: return address;
  }
}

struct Tile {
  TensorMap map;
  int at[5] = {};
  unsigned char* shared = nullptr;  // start of the CTA's shared memory
  uint32_t offset = 0;              // of the tile in it
  unsigned bytes = 0;

  // Calls visit(shared byte, global byte or null where the box leaves the tensor, bytes) for 16-byte chunks.
  template <class Visit> void chunks(Visit visit) const {
    const unsigned row = map.box[0] * map.element_bytes, rows = bytes / row;
    uint32_t address = offset;
    for (unsigned r = 0; r < rows; ++r) {
      const unsigned char* from = map.base;
      bool inside = true;
      unsigned rest = r;
      for (int d = 1; d < map.rank; ++d) {
        const int64_t c = int64_t(at[d]) + rest % map.box[d];
        rest /= map.box[d];
        inside = inside && c >= 0 && uint64_t(c) < map.sizes[d];
        from += c * int64_t(map.strides[d]);
      }
      for (unsigned x = 0; x < row; x += 16, address += 16) {
        const int64_t column = at[0] + int64_t(x / map.element_bytes), left = int64_t(map.sizes[0]) - column;
        const int64_t valid = !inside || column < 0 ? 0 : std::max<int64_t>(0, std::min<int64_t>(left * map.element_bytes, 16));
        visit(shared + swizzled(address, map.swizzle), from + column * map.element_bytes, unsigned(valid));
      }
    }
  }

  void fetch() const {
    chunks([](unsigned char* to, const unsigned char* from, unsigned valid) {
      std::memset(to, 0, 16);
      std::memcpy(to, from, valid);
    });
  }
  void spoil() const {
    chunks([](unsigned char* to, const unsigned char*, unsigned) { std::memset(to, 0xff, 16); });
  }
};

template <class... C> inline Tile make_tile(const TensorMap& map, const void* shared, C... coordinates) {
  Tile tile;
  Cta& cta = *current->cta;
  tile.map = map;
  if (map.rank != int(sizeof...(C))) stop("a tile has other coordinates than its tensor map has dims");
  const int at[] = {int(coordinates)...};
  std::copy(at, at + map.rank, tile.at);
  tile.bytes = map.element_bytes;
  for (int d = 0; d < map.rank; ++d) tile.bytes *= map.box[d];
  const auto offset = static_cast<const unsigned char*>(shared) - cta.shared;
  const unsigned align = 128;
  if (offset < 0 || size_t(offset) + tile.bytes > cta.shared_bytes) stop("a tile that does not lie in shared memory");
  if (offset % align) stop("a tile in shared memory that is not aligned to 128 bytes");
  tile.shared = cta.shared, tile.offset = uint32_t(offset);
  return tile;
}

// A store from shared memory: it reads its source at some moment and writes its target at another.
struct BulkStore {
  std::function<void(std::vector<unsigned char>&)> read;
  std::function<void(const std::vector<unsigned char>&)> write;
  std::vector<unsigned char> held;
  bool has_read = false, has_written = false;
  unsigned* unread = nullptr;  // counts this CTA's stores that have not read their source
  void do_read() {
    if (has_read) return;
    read(held);
    has_read = true;
    --*unread;
  }
  void do_write() {
    do_read();
    if (!has_written) write(held), memory_event();
    has_written = true;
  }
};

inline void issue_store(std::shared_ptr<BulkStore> store) {
  if (current->bulk_groups.empty()) current->bulk_groups.emplace_back();
  current->bulk_groups.back().push_back(store);
  store->unread = &current->cta->in_flight;
  ++*store->unread;
  if (chance(3)) store->do_read();
  machine->later.push_back([store] { store->do_write(); });
  give_way();
}

inline void add_floats(unsigned char* to, const unsigned char* from, unsigned bytes) {
  for (unsigned i = 0; i < bytes; i += 4) {
    float a, b;
    std::memcpy(&a, to + i, 4), std::memcpy(&b, from + i, 4);
    a += b;
    std::memcpy(to + i, &a, 4);
  }
}

inline void store_tile(const Tile& tile, bool add) {
  auto store = std::make_shared<BulkStore>();
  if (add && tile.map.type != TileType::f32) stop("tiles of float only are added in global memory");
  store->read = [tile](std::vector<unsigned char>& held) {
    tile.chunks([&](unsigned char* at, const unsigned char*, unsigned) { held.insert(held.end(), at, at + 16); });
  };
  store->write = [tile, add](const std::vector<unsigned char>& held) {
    size_t i = 0;
    tile.chunks([&](unsigned char*, const unsigned char* to, unsigned valid) {
      auto* target = const_cast<unsigned char*>(to);
      if (add)
        add_floats(target, held.data() + i, valid);
      else
        std::memcpy(target, held.data() + i, valid);
      i += 16;
    });
  };
  issue_store(std::move(store));
}

inline void check_bulk(const void* shared, const void* global, unsigned bytes) {
  const auto offset = static_cast<const unsigned char*>(shared) - current->cta->shared;
  if (offset < 0 || size_t(offset) + bytes > current->cta->shared_bytes) stop("a bulk copy outside shared memory");
  if (offset % 16 || reinterpret_cast<uintptr_t>(global) % 16 || bytes % 16) stop("a bulk copy not aligned to 16 bytes");
}

}  // namespace emulation

inline void tma_prefetch(const TensorMap*) {}

template <class... C> inline void tma_load(void* to, const TensorMap* map, Barrier* barrier, C... coordinates) {
  using namespace emulation;
  Cta* cta = current->cta;
  const Tile tile = make_tile(*map, to, coordinates...);
  barrier_state(*cta, barrier);
  const bool early = chance(2);
  early ? tile.fetch() : tile.spoil();
  ++cta->in_flight;
  machine->later.push_back([=] {
    --cta->in_flight;
    if (!early) tile.fetch();
    barrier_complete_bytes(*cta, barrier, tile.bytes);
  });
  give_way();
}

template <class... C> inline void tma_store(const TensorMap* map, const void* from, C... coordinates) {
  emulation::store_tile(emulation::make_tile(*map, from, coordinates...), false);
}
template <class... C> inline void tma_reduce_add(const TensorMap* map, const void* from, C... coordinates) {
  emulation::store_tile(emulation::make_tile(*map, from, coordinates...), true);
}

inline void bulk_load(void* to, const void* from, unsigned bytes, Barrier* barrier) {
  using namespace emulation;
  check_bulk(to, from, bytes);
  Cta* cta = current->cta;
  std::memset(to, 0xff, bytes);
  ++cta->in_flight;
  machine->later.push_back([=] {
    --cta->in_flight;
    std::memcpy(to, from, bytes);
    barrier_complete_bytes(*cta, barrier, bytes);
  });
  give_way();
}

inline void bulk_store(void* to, const void* from, unsigned bytes) {
  emulation::check_bulk(from, to, bytes);
  auto store = std::make_shared<emulation::BulkStore>();
  store->read = [=](std::vector<unsigned char>& held) {
    held.assign(static_cast<const unsigned char*>(from), static_cast<const unsigned char*>(from) + bytes);
  };
  store->write = [=](const std::vector<unsigned char>& held) { std::memcpy(to, held.data(), bytes); };
  emulation::issue_store(std::move(store));
}

inline void bulk_reduce_add(float* to, const float* from, unsigned bytes) {
  emulation::check_bulk(from, to, bytes);
  auto store = std::make_shared<emulation::BulkStore>();
  store->read = [=](std::vector<unsigned char>& held) {
    const auto* bytes_from = reinterpret_cast<const unsigned char*>(from);
    held.assign(bytes_from, bytes_from + bytes);
  };
  store->write = [=](const std::vector<unsigned char>& held) {
    emulation::add_floats(reinterpret_cast<unsigned char*>(to), held.data(), bytes);
  };
  emulation::issue_store(std::move(store));
}

inline void bulk_commit() {
  auto& groups = emulation::current->bulk_groups;
  if (groups.empty()) groups.emplace_back();
  groups.emplace_back();
}

// All but this thread's N latest groups have read their shared memory.
template <int N> inline void bulk_wait_read() {
  auto& groups = emulation::current->bulk_groups;
  for (size_t g = 0; g + 1 + N < groups.size(); ++g)
    for (auto& store : groups[g]) store->do_read();
}

// All but this thread's N latest groups have written global memory.
template <int N> inline void bulk_wait() {
  auto& groups = emulation::current->bulk_groups;
  size_t g = 0;
  for (; g + 1 + N < groups.size(); ++g)
    for (auto& store : groups[g]) store->do_write();
  groups.erase(groups.begin(), groups.begin() + long(g));
}

inline void fence_async_shared() {}

}  // namespace shardlib
