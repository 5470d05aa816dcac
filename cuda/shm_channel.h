// What one process keeps of its channels: the collectives under way, and the staging that the channels share.
#pragma once

#include <deque>
#include <memory>
#include <vector>

#include "shm_blocks.h"
#include "shm_recipe.h"

namespace shm {

struct Op {
    std::shared_ptr<const Recipe> recipe;
    std::vector<char*> tensors;
    int channel;
    uint64_t first;  // its first round's number in the channel
    Sign sign;
    uint64_t staged = 0, reduced = 0, taken = 0;  // rounds
    std::vector<char> got;                        // from whom the round that is being taken has been copied
    Mapped* block = nullptr;                      // of results that all members share
    int fault = 0, culprit = -1;                  // the errno for which it has no result, and the member that met it
    int sleepers = 0;                             // threads of this process that sleep until it is done
    bool done = false;
    bool ended = false;  // its channel was left, or the engine closed: it makes no progress any more
};

class Staging;

// A channel as this process sees it.
struct Member {
    int n = 0, me = 0;
    Staging* staging = nullptr;  // where this process stages its rounds
    std::vector<char*> bases;  // the members' segments
    std::vector<Channel*> peers;
    uint64_t next = 0;                        // round
    uint64_t freed = 0;                       // rounds that all have taken, when last looked
    bool untold = false;                      // rounds were posted, and the peers were not woken yet
    std::deque<std::shared_ptr<Op>> pending;  // in order
    int stranger = -1;  // the first member seen in another collective: nothing is taken in this channel any more
    Sign mine{}, theirs{};

    uint64_t all_taken() {
        uint64_t least = ~uint64_t{0};
        for (Channel* peer : peers) least = std::min(least, peer->taken.load(std::memory_order_acquire));
        return freed = least;
    }
};

// A ring: rounds lie in the order in which they were staged, and are freed in that order.
class Staging {
  public:
    Staging(uint64_t start, uint64_t bytes) : start_(start), size_(bytes / kLine * kLine) {}

    std::deque<std::shared_ptr<Op>> unstaged;  // in the order in which their rounds are staged

    // Whether rounds of `bytes` in all, and of `longest` at most, have room now.
    bool has_room(size_t bytes, size_t longest) {
        release();
        const size_t unused = head_ % size_ + bytes > size_ ? longest : 0;  // at the end of the ring
        return head_ + bytes + unused - tail_ <= size_;
    }

    // Where in the segment there is room for round `number` of the channel, or kNowhere.
    uint64_t allocate(size_t bytes, Member& member, uint64_t number) {
        release();
        uint64_t at = head_;
        if (at % size_ + bytes > size_) at += size_ - at % size_;  // a round is one block of memory
        if (at + bytes - tail_ > size_) return kNowhere;
        head_ = at + bytes;
        held_.push_back({&member, number, head_});
        return start_ + at % size_;
    }

  private:
    struct Held {
        Member* member;
        uint64_t number, end;
    };

    void release() {
        while (!held_.empty()) {
            const Held& oldest = held_.front();
            if (oldest.member->freed <= oldest.number && oldest.member->all_taken() <= oldest.number) break;
            tail_ = oldest.end;
            held_.pop_front();
        }
        if (held_.empty()) head_ = tail_ = 0;  // the memory that is in the caches already
    }

    uint64_t start_, size_, head_ = 0, tail_ = 0;  // head and tail only grow while there is something between them
    std::deque<Held> held_;
};

}  // namespace shm
