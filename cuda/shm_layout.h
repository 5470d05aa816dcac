// What processes share: the header of every process's segment, which all map.
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <climits>
#include <cstdint>

#include "shm_copy.h"

namespace shm {

constexpr int kChannels = 64;
constexpr uint64_t kRounds = 64;  // of one channel that one member has posted and others have not taken
constexpr uint32_t kBlocks = 4096;  // that a process has made and not dropped
constexpr int kSpins = 20;        // looks, about half a microsecond apart, before a waiting process sleeps
constexpr uint64_t kNowhere = ~uint64_t{0};

// Identifies a round's collective. Members whose rounds of one number have different signs are out of step.
struct Sign {
    uint64_t event;     // the calls of programs that the ranks have made together; 0: none is running
    uint64_t program;   // a digest of the program
    uint64_t line;      // a digest of the line that calls it
    uint64_t position;  // collectives that this call has begun before
    uint64_t size;      // a digest of the kind of collective and its bytes

    bool operator!=(const Sign& other) const {
        return event != other.event || program != other.program || line != other.line || position != other.position ||
               size != other.size;
    }
};

struct Round {
    uint64_t staged;  // the offset of its slots in the segment
    uint64_t fault;   // the errno of this member's failed reservation for a shared result, or 0
    uint64_t own;     // the offset of the last slot, the member's own: an all-reduce's slice
    Sign sign;
};

struct Channel {
    alignas(kLine) std::atomic<uint64_t> posted;
    alignas(kLine) std::atomic<uint64_t> reduced;
    alignas(kLine) std::atomic<uint64_t> taken;
    alignas(kLine) Round rounds[kRounds];
    std::atomic<uint64_t> claims[kRounds];  // the first member's: the block of a shared result, by first round
};

// Memory of shared results: bytes of the file of the process that owns the header.
struct Block {
    std::atomic<uint32_t> held;     // members that have not given it back; kNone: there is no block
    std::atomic<uint32_t> version;  // blocks that have used this entry
    std::atomic<uint64_t> start, size;
};
constexpr uint32_t kNone = ~uint32_t{0};

enum Event : uint32_t { kNews = 1, kRoom = 2 };

struct Header {
    // A sleeping thread has set the event that it waits for in `wants`, and sleeps until `rings` changes.
    alignas(kLine) std::atomic<uint32_t> rings;
    std::atomic<uint32_t> wants;
    int32_t pid, file;
    std::atomic<int64_t> idle;    // bytes of blocks that no member holds
    std::atomic<uint32_t> count;  // of blocks that were ever used
    Block blocks[kBlocks];
    Channel channels[kChannels];
};
static_assert(std::atomic<uint64_t>::is_always_lock_free && std::atomic<uint32_t>::is_always_lock_free,
              "counters are shared between processes");

// Wakes all threads that sleep in the process of this header.
inline void wake(Header* header) {
    header->rings.fetch_add(1, std::memory_order_release);
    syscall(SYS_futex, &header->rings, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

inline void ring(Header* header, Event event) {
    std::atomic_thread_fence(std::memory_order_seq_cst);  // what was stored before is seen, or `wants` is
    if (header->wants.load(std::memory_order_relaxed) & event) {
        header->wants.store(0, std::memory_order_relaxed);
        wake(header);
    }
}

}  // namespace shm
