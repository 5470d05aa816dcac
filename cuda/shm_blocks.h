// Blocks: memory in which the members of a channel build one result together, and read it without a copy.
//
// The first member of such a collective takes a free block of any member, or makes one, and publishes it in a claim
// that the others read. Every member holds the block until its tensors in it are freed. A process keeps up to kIdle
// bytes of free blocks for later results, and drops the rest.
//
// All blocks of a process are in one file, at offsets that are never reused: they take one descriptor, and any member
// can drop a block.
#pragma once

#include <fcntl.h>
#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <memory>
#include <unordered_map>
#include <vector>

#include "shm_layout.h"

namespace shm {

constexpr int64_t kIdle = int64_t{128} << 20;
constexpr uint64_t kPage = 4096;
constexpr uint64_t kStep = uint64_t{1} << 20;

// A claim: the number of the round (40 bits, one more than it), the member (12), and which of its blocks (12).
struct Claim {
    uint64_t round;
    uint32_t member, index;

    static Claim of(uint64_t word) {
        return {word >> 24, static_cast<uint32_t>(word >> 12 & 0xfff), static_cast<uint32_t>(word & 0xfff)};
    }
    uint64_t word() const { return round << 24 | uint64_t{member} << 12 | index; }
    static uint64_t tag(uint64_t number) { return (number + 1) & ((uint64_t{1} << 40) - 1); }
};
static_assert(kBlocks <= 0x1000, "a claim has 12 bits for a block");

// A block as this process sees it.
struct Mapped {
    Header* owner = nullptr;
    Block* block = nullptr;
    int file = -1;
    char* base = nullptr;
    uint64_t start = 0, size = 0;
    uint32_t version = 0;
    std::atomic<int> held{0};  // by this process

    void unmap() {
        if (base && !held.load()) munmap(base, size);  // else tensors still read it
        base = nullptr;
    }
};

class Blocks {
  public:
    explicit Blocks(Header* own) : own_(own) {
        own_->pid = getpid();
        own_->file = files_[own_] = memfd_create("shardlib-block", MFD_CLOEXEC);
    }

    ~Blocks() {
        for (auto& [block, mapped] : mapped_) mapped->unmap();
        for (auto& [owner, file] : files_)
            if (file >= 0) close(file);
    }

    // The block of the result that begins in round `number`, held for this member. Where memory is missing it is null,
    // and `fault` the errno; the block that others find without this member is then left by `forgo`.
    Mapped* share(const std::vector<char*>& members, std::atomic<uint64_t>& claims, int me, uint64_t number,
                  uint64_t bytes, int& fault) {
        uint64_t word = claims.load(std::memory_order_acquire);
        if (Claim::of(word).round != Claim::tag(number)) {
            Claim mine{Claim::tag(number), 0, 0};
            if (!idle(members, bytes, mine) && !make(static_cast<uint32_t>(members.size()), bytes, me, mine, fault))
                return nullptr;
            if (claims.compare_exchange_strong(word, mine.word(), std::memory_order_acq_rel)) {
                word = mine.word();
            } else {  // another member was first
                rest(*reinterpret_cast<Header*>(members[mine.member]), at(members, mine));
            }
        }
        const Claim claim = Claim::of(word);
        Mapped* mapped = map(reinterpret_cast<Header*>(members[claim.member]), at(members, claim), fault);
        if (mapped && mapped->size < bytes) {  // of members that are out of step, who will find that out
            Claim apart{0, 0, 0};
            if (!make(1, bytes, me, apart, fault)) return nullptr;
            mapped = map(own_, own_->blocks[apart.index], fault);
        }
        if (mapped) mapped->held.fetch_add(1);
        return mapped;
    }

    static void give(Mapped* mapped) {
        const int file = mapped->file;
        mapped->held.fetch_sub(1);
        release(*mapped->owner, *mapped->block, file);
    }

    // Leaves the block of the result that begins in round `number`, which this member could not share. To be called when
    // all members have come to the result; where none of them had memory, there is no block.
    void forgo(const std::vector<char*>& members, const std::atomic<uint64_t>& claims, uint64_t number) {
        const Claim claim = Claim::of(claims.load(std::memory_order_acquire));
        if (claim.round != Claim::tag(number)) return;
        Header* owner = reinterpret_cast<Header*>(members[claim.member]);
        release(*owner, at(members, claim), owner == own_ ? own_->file : -1);
    }

  private:
    // One member holds the block no more. Without a descriptor of its file the block stays for the next result.
    static void release(Header& owner, Block& block, int file) {
        const auto size = static_cast<int64_t>(block.size.load());
        if (block.held.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
        if (owner.idle.fetch_add(size) + size > kIdle && file >= 0) drop(owner, block, file);
    }

    static Block& at(const std::vector<char*>& members, const Claim& claim) {
        return reinterpret_cast<Header*>(members[claim.member])->blocks[claim.index];
    }

    // Takes a block that nobody holds, not much larger than what is needed, for all members.
    static bool idle(const std::vector<char*>& members, uint64_t bytes, Claim& claim) {
        for (uint32_t i = 0; i < members.size(); ++i) {
            Header* header = reinterpret_cast<Header*>(members[i]);
            const uint32_t count = header->count.load(std::memory_order_acquire);
            for (uint32_t k = 0; k < count; ++k) {
                Block& block = header->blocks[k];
                uint32_t nobody = 0;
                if (block.held.load(std::memory_order_relaxed) || !fits(block, bytes)) continue;
                if (!block.held.compare_exchange_strong(nobody, static_cast<uint32_t>(members.size()))) continue;
                if (fits(block, bytes)) {
                    header->idle.fetch_sub(static_cast<int64_t>(block.size.load()));
                    claim.member = i;
                    claim.index = k;
                    return true;
                }
                block.held.store(0, std::memory_order_release);
            }
        }
        return false;
    }

    static bool fits(const Block& block, uint64_t bytes) {
        const uint64_t size = block.size.load(std::memory_order_acquire);
        return size >= bytes && size <= bytes + bytes / 4 + kPage;
    }

    // Gives back what was taken for a claim that came too late.
    static void rest(Header& owner, Block& block) {
        const auto size = static_cast<int64_t>(block.size.load());
        block.held.store(0, std::memory_order_release);
        owner.idle.fetch_add(size);
    }

    // Drops a block if nobody holds it. Its pages go now, whoever maps them still.
    static void drop(Header& owner, Block& block, int file) {
        uint32_t nobody = 0;
        if (!block.held.compare_exchange_strong(nobody, 1)) return;
        const uint64_t size = block.size.load();
        owner.idle.fetch_sub(static_cast<int64_t>(size));
        clear(file, block.start.load(), size);
        block.held.store(kNone, std::memory_order_release);
    }

    static void clear(int file, uint64_t start, uint64_t size) {
        fallocate(file, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(start),
                  static_cast<off_t>(size));
    }

    // Reserves so many bytes at the end of the file: step by step, since a signal may undo what a step has done.
    bool reserve(uint64_t size, int& fault) {
        for (uint64_t at = 0; at < size;) {
            const uint64_t step = std::min(kStep, size - at);
            const int error = posix_fallocate(own_->file, static_cast<off_t>(end_ + at), static_cast<off_t>(step));
            if (error == EINTR) continue;
            if (error) {
                if (at) clear(own_->file, end_, at);
                return fault = error, false;
            }
            at += step;
        }
        return true;
    }

    // A new block of this process, held by `holders`.
    bool make(uint32_t holders, uint64_t bytes, int me, Claim& claim, int& fault) {
        const uint64_t size = (bytes + kPage - 1) / kPage * kPage;
        drop_idle(size);
        uint32_t k = 0;
        const uint32_t count = own_->count.load();
        while (k < count && own_->blocks[k].held.load() != kNone) ++k;
        if (k == kBlocks) return fault = ENOBUFS, false;
        if (own_->file < 0) return fault = EMFILE, false;
        if (!reserve(size, fault)) return false;
        Block& block = own_->blocks[k];
        block.start.store(end_);
        block.size.store(size);
        block.version.fetch_add(1);
        block.held.store(holders, std::memory_order_release);
        if (k == count) own_->count.store(count + 1, std::memory_order_release);
        end_ += size;
        claim.member = static_cast<uint32_t>(me);
        claim.index = k;
        return true;
    }

    // Drops idle blocks of this process until they and one of `size` bytes may be kept.
    void drop_idle(uint64_t size) {
        for (uint32_t k = own_->count.load(); k-- > 0 && own_->idle.load() + static_cast<int64_t>(size) > kIdle;) {
            Block& block = own_->blocks[k];
            if (!block.held.load()) drop(*own_, block, own_->file);
        }
    }

    Mapped* map(Header* owner, Block& block, int& fault) {
        auto& mapped = mapped_[&block];
        if (!mapped) mapped = std::make_unique<Mapped>();
        const uint32_t version = block.version.load(std::memory_order_acquire);
        if (mapped->base && mapped->version == version) return mapped.get();
        mapped->unmap();
        const int file = file_of(owner);
        if (file < 0) return fault = errno, nullptr;
        const uint64_t start = block.start.load(), size = block.size.load();
        void* base = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, file,
                          static_cast<off_t>(start));
        if (base == MAP_FAILED) return fault = errno, nullptr;
        mapped->owner = owner;
        mapped->block = &block;
        mapped->file = file;
        mapped->base = static_cast<char*>(base);
        mapped->start = start;
        mapped->size = size;
        mapped->version = version;
        return mapped.get();
    }

    int file_of(Header* owner) {
        const auto found = files_.find(owner);
        if (found != files_.end()) return found->second;
        char path[64];
        std::snprintf(path, sizeof path, "/proc/%d/fd/%d", owner->pid, owner->file);
        const int file = open(path, O_RDWR | O_CLOEXEC);
        return file < 0 ? file : files_[owner] = file;
    }

    Header* own_;
    uint64_t end_ = 0;  // of this process's file
    std::unordered_map<Header*, int> files_;
    std::unordered_map<Block*, std::unique_ptr<Mapped>> mapped_;
};

}  // namespace shm
