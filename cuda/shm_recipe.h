// What one member does in a collective: made once for a kind of call, and then used by every call of that kind.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "shm_copy.h"

namespace shm {

enum How : int64_t { kCopy, kReduce, kReduceGather };

// An interval of a stream: what goes to one member, or comes from one.
struct Segment {
    const Stream* stream = nullptr;
    size_t begin = 0, length = 0;
};

struct Recipe {
    int n, me;
    How how;
    int kind;
    size_t slot;      // bytes of a segment that are moved in a round
    uint64_t rounds;  // enough for the longest segment of any member
    bool keeps_own;   // the own slot is staged (its pieces are strided, or all members read one slot)
    bool past_caches;
    int op;         // which collective it is
    size_t shares;  // bytes of results that all members share in one block, or 0
    std::vector<size_t> places;  // of these results there
    std::vector<Stream> streams;
    std::vector<Segment> sends;     // one for each member, or a single one for all
    std::vector<Segment> receives;  // by member; one only when all contributions are reduced to it

    bool shared() const { return sends.size() == 1; }
    int slots() const { return shared() ? 1 : n - 1 + (keeps_own || how == kReduceGather); }
    // The same on all members.
    uint64_t size() const {
        uint64_t mixed = static_cast<uint64_t>(op) * 1024 + static_cast<uint64_t>(how) * 16 + kind;
        for (uint64_t part : {static_cast<uint64_t>(slot), rounds, static_cast<uint64_t>(shares)}) mixed = mixed * 0x9e3779b97f4a7c15 + part;
        return mixed;
    }
    int place(int owner, int reader) const { return shared() ? 0 : (reader - owner - 1 + n) % n; }
    size_t length(const Segment& s, uint64_t round) const {
        size_t at = round * slot;
        return s.length > at ? std::min(slot, s.length - at) : 0;
    }
};

// A recipe as ops/collectives/transport/shm_streams.py writes it: whole numbers, one after the other.
inline std::shared_ptr<const Recipe> read_recipe(const int64_t* w, int op) {
    auto r = std::make_shared<Recipe>();
    r->op = op;
    r->n = static_cast<int>(*w++);
    r->me = static_cast<int>(*w++);
    r->how = static_cast<How>(*w++);
    r->kind = static_cast<int>(*w++);
    r->slot = *w++;
    r->rounds = *w++;
    r->keeps_own = *w++;
    r->past_caches = *w++;
    r->shares = *w++;
    r->places.resize(*w++);
    for (size_t& place : r->places) place = *w++;
    r->streams.resize(*w++);
    for (Stream& stream : r->streams) {
        stream.resize(*w++);
        for (Piece& p : stream) {
            p.tensor = static_cast<int>(*w++);
            p.dtype = static_cast<int>(*w++);
            p.start = *w++;
            p.bytes = *w++;
            p.offset = *w++;
            p.run = *w++;
            p.dims = static_cast<int>(*w++);
            for (int d = 0; d < p.dims; ++d) p.size[d] = *w++;
            for (int d = 0; d < p.dims; ++d) p.stride[d] = *w++;
        }
    }
    for (auto* segments : {&r->sends, &r->receives}) {
        segments->resize(*w++);
        for (Segment& s : *segments) {
            s.stream = &r->streams[*w++];
            s.begin = *w++;
            s.length = *w++;
        }
    }
    return r;
}

}  // namespace shm
