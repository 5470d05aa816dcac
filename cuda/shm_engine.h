// Collectives of processes on one machine, over memory that all of them map.
//
// Every process has one segment: a header, with a doorbell and a block of counters for every channel (a group of
// ranks), and the staging memory, a ring that its channels share. A collective ("op") consists of rounds. All
// members of the channel divide it equally, so they only exchange a round's number:
//
//   stage   pack this member's part of a round into the ring, record its offset, then `posted` = round + 1
//   reduce  (all-reduce in two steps) when all have posted: reduce this member's slice into the ring, then `reduced`
//   take    when the others have: copy this member's slots to the result, then `taken` = round + 1
//
// Results that are never overwritten (`shares`) are built once for all members: a round's bytes are written to their
// place in a block of memory (shm_blocks.h) instead of the ring, and the members only wait for them.
//
// A round's memory is free when all members have taken it. A member's slot for member j is number (j - i - 1) mod n:
// its own slot is the last one, which may be missing.
//
// A round names its collective (Sign). A member compares it with its own before it takes or reduces a round: ranks that
// run different programs detect it, and get no values.
//
// A member that lacks the memory for a shared result reports the error in its rounds. All members take those rounds to
// the end, so that later ops can go on, and all get the error for this op.
//
// No deadlock: starting an op never blocks. Staging follows the order in which this process started its ops, over all
// channels, and a thread that waits for one op progresses all of them. So the oldest running op can always finish, if
// processes start the ops that they share in the same order.
//
// Messages of one process to another have a channel with a ring of its own: they are ops in which one member sends.
// Collectives do not wait for their room, nor they for that of collectives. Both members count the messages of a channel.
#pragma once

#include <sched.h>
#include <time.h>

#include <cerrno>
#include <mutex>
#include <unordered_map>

#include "shm_channel.h"
#include "shm_reduce.h"

namespace shm {

enum Answer : int { kLate, kDone, kOutOfStep, kNoMemory, kEnded };

// Why an op has no result: the errno, and the member that met it.
struct Fault {
    int error = 0, culprit = -1;
};

class Engine {
  public:
    // `asking` are the first four words of the signs of what is begun, as the caller last set them.
    Engine(char* base, size_t bytes, uint64_t* asking)
        : base_(base),
          asking_(asking),
          header_(reinterpret_cast<Header*>(base)),
          blocks_(header_) {
        rings_.emplace_back(start(), bytes - start());
    }

    ~Engine() {
        for (auto& [ticket, op] : ops_)
            if (op->block) Blocks::give(op->block);
    }

    static size_t start() { return (sizeof(Header) + 4095) / 4096 * 4096; }

    // `first` is the channel's first round: the same on all members, and beyond all rounds of earlier groups in it.
    void join(int channel, int n, int me, char* const* bases, uint64_t first) {
        std::lock_guard<std::mutex> hold(mutex_);
        Member& m = members_[channel];
        m = Member{};
        m.n = n;
        m.me = me;
        m.next = m.freed = first;
        m.staging = &rings_.front();
        m.bases.assign(bases, bases + n);
        for (char* b : m.bases) m.peers.push_back(&reinterpret_cast<Header*>(b)->channels[channel]);
        Channel& mine = *m.peers[me];
        for (auto* counter : {&mine.posted, &mine.reduced, &mine.taken}) counter->store(first, std::memory_order_release);
    }

    // Stages the channel's rounds in a ring of their own, at `start` in the segment.
    void set_ring(int channel, uint64_t start, uint64_t bytes) {
        std::lock_guard<std::mutex> hold(mutex_);
        members_[channel].staging = &rings_.emplace_back(start, bytes);
    }

    // Whether an op of so many bytes and rounds, `longest` bytes at most in each, would be staged when it begins.
    bool has_room(int channel, uint64_t bytes, uint64_t rounds, uint64_t longest) {
        std::lock_guard<std::mutex> hold(mutex_);
        Member& m = members_[channel];
        return m.n && m.staging->unstaged.empty() && m.next + rounds - m.all_taken() <= kRounds &&
               m.staging->has_room(bytes, longest);
    }

    // Gives the channel up: ops under way in it end without results.
    void leave(int channel) {
        std::lock_guard<std::mutex> hold(mutex_);
        end(members_[channel]);
        wake_sleepers();
    }

    // Ends all ops: whoever waits returns, and nothing touches the peers' memory any more.
    void close() {
        std::lock_guard<std::mutex> hold(mutex_);
        for (auto& [index, m] : members_) end(m);
        wake_sleepers();
    }

    // The highest number of a round that this process has posted, over all channels that it is or was in.
    uint64_t posted() {
        std::lock_guard<std::mutex> hold(mutex_);
        uint64_t most = 0;
        for (const Channel& channel : header_->channels) most = std::max(most, channel.posted.load());
        return most;
    }

    // The op's ticket; 0 when this channel was left.
    uint64_t begin(int channel, std::shared_ptr<const Recipe> recipe, char* const* tensors, int count) {
        std::lock_guard<std::mutex> hold(mutex_);
        Member& m = members_[channel];
        if (!m.n) return 0;
        auto op = std::make_shared<Op>();
        op->recipe = std::move(recipe);
        op->tensors.assign(tensors, tensors + count);
        op->channel = channel;
        op->first = m.next;
        const bool shares_ring = m.staging == &rings_.front();
        const uint64_t position = shares_ring ? asking_[3]++ : 0;
        op->sign = {asking_[0], asking_[1], asking_[2], position, op->recipe->size()};
        op->got.assign(m.n, 0);
        m.next += op->recipe->rounds;
        m.pending.push_back(op);
        m.staging->unstaged.push_back(op);
        uint64_t ticket = ++tickets_;
        ops_[ticket] = op;
        while (stage_next()) {
        }
        announce();
        // What others wait for is done now and not only when this process waits: slices of all-reduces, and room.
        for (auto& [index, other] : members_) reduce_ahead(other);
        if (!shares_ring || lacks_room()) push(nullptr);  // the sender of a message has nothing more to do
        return ticket;
    }

    // Whether the op is done; waits for that at most `patience` nanoseconds. `block`: what it shares, which the caller
    // then holds. Any number of threads may wait at a time; each moves on the ops of all.
    Answer finish(uint64_t ticket, int64_t patience, Mapped** block, Fault* fault) {
        std::unique_lock<std::mutex> hold(mutex_);
        const auto entry = ops_.find(ticket);
        if (entry == ops_.end()) return kDone;
        const std::shared_ptr<Op> op = entry->second;
        const Member& m = members_[op->channel];
        for (int idle = 0; !push(op.get()); ++idle) {
            if (op->ended) return kEnded;
            if (m.stranger >= 0) return kOutOfStep;
            if (idle < kSpins) {
                pause(idle);
                continue;
            }
            const uint32_t seen = header_->rings.load(std::memory_order_acquire);
            header_->wants.store(kNews | (lacks_room() ? kRoom : Event{}), std::memory_order_relaxed);
            std::atomic_thread_fence(std::memory_order_seq_cst);
            if (push(op.get()) || m.stranger >= 0) continue;
            const bool late = sleep(hold, *op, seen, patience);
            if (late && !push(op.get()) && !op->ended && m.stranger < 0) return kLate;
            idle = 0;
        }
        if (sleepers_) push(nullptr);  // what is left for others to move on, since nobody else is awake
        if (!ops_.erase(ticket)) return kDone;  // another thread has it
        if (op->fault) {
            if (op->block) Blocks::give(op->block);
            *fault = {op->fault, op->culprit};
            return kNoMemory;
        }
        *block = op->block;
        return kDone;
    }

    // Of a ticket that is out of step: the member that runs something else, and both signs, this member's first.
    int stranger(uint64_t ticket, uint64_t* signs) {
        std::lock_guard<std::mutex> hold(mutex_);
        const auto entry = ops_.find(ticket);
        if (entry == ops_.end()) return -1;
        const Member& m = members_[entry->second->channel];
        for (const Sign* s : {&m.mine, &m.theirs})
            for (uint64_t word : {s->event, s->program, s->line, s->position, s->size}) *signs++ = word;
        return m.stranger;
    }

    // Moves all ops on as far as they go now; whether some still run.
    bool advance() {
        std::lock_guard<std::mutex> hold(mutex_);
        push(nullptr);
        for (const auto& [index, m] : members_)
            if (!m.pending.empty()) return true;
        return false;
    }

    bool is_done(uint64_t ticket) {
        std::lock_guard<std::mutex> hold(mutex_);
        const auto entry = ops_.find(ticket);
        return entry == ops_.end() || entry->second->done;
    }

    // The first member that the op waits for, or -1.
    int lacks(uint64_t ticket) {
        std::lock_guard<std::mutex> hold(mutex_);
        const auto entry = ops_.find(ticket);
        if (entry == ops_.end()) return -1;
        const Op& op = *entry->second;
        Member& m = members_[op.channel];
        const uint64_t last = op.first + op.recipe->rounds;
        for (int step = 0; step < 3; ++step)
            for (int i = 0; i < m.n; ++i) {
                const Channel* peer = m.peers[i];
                const auto& counter = step == 0 ? peer->posted : step == 1 ? peer->reduced : peer->taken;
                const bool counts = step != 1 || op.recipe->how == kReduceGather;
                const uint64_t due = step == 2 ? last : op.first + op.taken + 1;
                if (i != m.me && counts && counter.load(std::memory_order_acquire) < due) return i;
            }
        return -1;
    }

  private:
    // Ends what is under way in a channel.
    void end(Member& m) {
        for (const auto& op : m.pending) {
            op->ended = true;
            if (op->block) Blocks::give(op->block);
            op->block = nullptr;
        }
        const auto gone = [](const std::shared_ptr<Op>& op) { return op->ended; };
        if (m.staging) {
            auto& unstaged = m.staging->unstaged;
            unstaged.erase(std::remove_if(unstaged.begin(), unstaged.end(), gone), unstaged.end());
        }
        m = Member{};
    }

    // Sleeps until a peer, or another thread of this process, rings; true if that took longer than `patience`.
    bool sleep(std::unique_lock<std::mutex>& hold, Op& op, uint32_t seen, int64_t patience) {
        const timespec limit{patience / 1000000000, patience % 1000000000};
        ++sleepers_, ++op.sleepers;
        hold.unlock();
        const long woken = syscall(SYS_futex, &header_->rings, FUTEX_WAIT, seen, &limit, nullptr, 0);
        const bool late = woken == -1 && errno == ETIMEDOUT;
        hold.lock();
        --sleepers_, --op.sleepers;
        return late;
    }

    // Peers ring for what they do. What this process does itself, its sleeping threads learn by this.
    void wake_sleepers() {
        if (sleepers_) wake(header_);
    }

    // Whatever can be done now, until `target` is done; whether it is.
    bool push(const Op* target) {
        for (bool moved = true; moved && !(target && target->done);) {
            moved = stage_next();
            announce();
            for (auto& [index, m] : members_) {
                if (reduce_ahead(m)) moved = true;
                while (!m.pending.empty() && take_next(m, *m.pending.front())) {
                    moved = true;
                    if (!m.pending.front()->done) break;  // stage the next round before the next one is taken
                    m.pending.pop_front();
                }
            }
        }
        return target && target->done;
    }

    static void pause(int idle) {
        if (idle % 16 == 15) {
            sched_yield();
            return;
        }
        for (int i = 0; i < 32; ++i) {
#if defined(__x86_64__)
            __builtin_ia32_pause();
#elif defined(__aarch64__)
            asm volatile("yield");
#endif
        }
    }

    // Staging ----------------------------------------------------------------------------------------------------

    // Wake those who wait for what has been staged: once for many rounds, as waking costs more than a round.
    void announce() {
        for (auto& [index, m] : members_) {
            if (m.untold) tell(m, kNews);
            m.untold = false;
        }
    }

    // Stages a round in each ring; whether any was.
    bool stage_next() {
        bool moved = false;
        for (Staging& ring : rings_) {
            if (ring.unstaged.empty()) continue;
            Op& op = *ring.unstaged.front();
            if (!stage(op)) continue;
            moved = true;
            if (op.staged == op.recipe->rounds) ring.unstaged.pop_front();
        }
        return moved;
    }

    bool lacks_room() const {
        return std::any_of(rings_.begin(), rings_.end(), [](const Staging& ring) { return !ring.unstaged.empty(); });
    }

    bool stage(Op& op) {
        const Recipe& r = *op.recipe;
        Member& m = members_[op.channel];
        Channel& mine = *m.peers[m.me];
        const uint64_t number = op.first + op.staged;
        if (number - m.freed >= kRounds && number - m.all_taken() >= kRounds) return false;
        if (r.shares && !op.block && !op.fault) share(m, op);
        const size_t needs = r.shares ? 0 : stage_bytes(r, op.staged);
        Round round{0, op.culprit == m.me ? static_cast<uint64_t>(op.fault) : 0, 0, op.sign};
        if (r.shares) {
            if (!op.block) {
                // it has no memory for this member's part
            } else if (const size_t length = r.length(r.sends[0], op.staged))
                own_copy(r.sends[0], r.receives[r.me], op, op.staged, length);
        } else if (needs) {
            const uint64_t at = m.staging->allocate(needs, m, number);
            if (at == kNowhere) return false;
            round.staged = at;
            round.own = at + (r.slots() - 1) * r.slot;
        }
        for (int j = 0; !r.shares && j < static_cast<int>(r.sends.size()); ++j) {
            const Segment& s = r.sends[j];
            const size_t length = r.length(s, op.staged), from = s.begin + op.staged * r.slot;
            if (length && (r.shared() || j != r.me || r.keeps_own))
                pack(*s.stream, op.tensors.data(), from, from + length,
                     base_ + round.staged + r.place(r.me, j) * r.slot);
        }
        mine.rounds[number % kRounds] = round;
        mine.posted.store(number + 1, std::memory_order_release);
        ++op.staged;
        m.untold |= needs || r.shares || r.how != kCopy;  // nobody waits for a member that sends nothing in a copy
        return true;
    }

    // Finds where the results lie, once: in a block that all members share. Where that fails, the op does.
    void share(Member& m, Op& op) {
        const Recipe& r = *op.recipe;
        op.block = blocks_.share(m.bases, m.peers[0]->claims[op.first % kRounds], m.me, op.first, r.shares, op.fault);
        if (!op.block) {
            op.culprit = m.me;
            return;
        }
        char** outs = op.tensors.data() + op.tensors.size() - r.places.size();
        for (size_t k = 0; k < r.places.size(); ++k) outs[k] = op.block->base + r.places[k];
    }

    static size_t stage_bytes(const Recipe& r, uint64_t round) {
        return r.shared() ? (r.length(r.sends[0], round) + kLine - 1) / kLine * kLine : r.slots() * r.slot;
    }

    // Taking -----------------------------------------------------------------------------------------------------

    // Moves the op on by a round, or by part of one; whether anything was done.
    bool take_next(Member& m, Op& op) {
        if (op.taken == op.staged) return false;
        return op.recipe->how == kReduce ? reduce_round(m, op) : copy_round(m, op);
    }

    // Reduces this member's slices of the channel's all-reduces, in order, as far as the others have posted.
    bool reduce_ahead(Member& m) {
        bool moved = false;
        for (const auto& op : m.pending) {
            if (op->recipe->how != kReduceGather) continue;
            while (op->reduced < op->staged && all_posted(m, *op, op->reduced)) {
                reduce_slice(m, *op);
                moved = true;
            }
            if (op->reduced < op->recipe->rounds) break;
        }
        return moved;
    }

    // Whether all members have posted the op's round `round`, each for this very collective.
    bool all_posted(Member& m, const Op& op, uint64_t round) {
        for (const Channel* peer : m.peers)
            if (peer->posted.load(std::memory_order_acquire) <= op.first + round) return false;
        for (int i = 0; i < m.n; ++i)
            if (!same(m, op, i, round)) return false;
        return true;
    }

    // Whether a round that member i has posted is of this collective. If not, this channel stands still from now on.
    bool same(Member& m, const Op& op, int i, uint64_t round) {
        const Sign& theirs = m.peers[i]->rounds[(op.first + round) % kRounds].sign;
        if (m.stranger >= 0) return false;
        if (!(theirs != op.sign)) return true;
        m.stranger = i;
        m.mine = op.sign;
        m.theirs = theirs;
        wake_sleepers();
        return false;
    }

    // Where member i's bytes for this member lie in the op's round `round`.
    const char* source(const Member& m, const Op& op, int i, uint64_t round) const {
        const Recipe& r = *op.recipe;
        const Round& at = m.peers[i]->rounds[(op.first + round) % kRounds];
        return m.bases[i] + at.staged + r.place(i, r.me) * r.slot;
    }

    bool copy_round(Member& m, Op& op) {
        const Recipe& r = *op.recipe;
        const uint64_t number = op.first + op.taken;
        bool moved = false;
        int left = 0;
        for (int k = 1; k <= m.n; ++k) {  // every member begins with another one
            const int i = (m.me + k) % m.n;
            if (op.got[i]) continue;
            const Segment& s = r.receives[i];
            const size_t length = r.length(s, op.taken);
            if (length || r.shares) {  // a stranger may write to a block, too, whatever it should send
                const Channel& peer = *m.peers[i];
                const bool gathers = r.how == kReduceGather;
                if ((gathers ? peer.reduced : peer.posted).load(std::memory_order_acquire) <= number) {
                    ++left;
                    continue;
                }
                if (!same(m, op, i, op.taken)) return moved;
                const size_t from = s.begin + op.taken * r.slot;
                if (r.shares) {  // it has put it there, or could not
                    const uint64_t fault = peer.rounds[number % kRounds].fault;
                    if (fault && !op.fault) op.fault = static_cast<int>(fault), op.culprit = i;
                } else if (gathers && i == m.me) {
                    // reduce_slice has put it there
                } else if (!gathers && i == m.me && !r.shared() && !r.keeps_own) {
                    own_copy(r.sends[m.me], s, op, op.taken, length);
                } else {
                    const char* bytes = gathers ? m.bases[i] + peer.rounds[number % kRounds].own
                                                : source(m, op, i, op.taken);
                    unpack(*s.stream, op.tensors.data(), from, from + length, bytes, r.past_caches);
                }
            }
            op.got[i] = 1;
            moved = true;
        }
        if (left == 0) took(m, op);
        return moved;
    }

    // This member's piece for itself, or for all, which was not staged: from where it is to its place in the results.
    void own_copy(const Segment& sent, const Segment& out, Op& op, uint64_t round, size_t length) {
        const size_t at = round * op.recipe->slot, shift = sent.begin + at, from = out.begin + at;
        const bool past_caches = op.recipe->past_caches;
        alignas(kLine) char tile[kTile];
        each_part(*sent.stream, shift, shift + length, nullptr, [&](const Piece& p, size_t a, size_t b, char*) {
            const size_t step = p.contiguous() ? b - a : kTile;
            for (size_t here = a; here < b; here += step) {
                const size_t stop = std::min(b, here + step), to = from + (p.start + here - shift);
                const char* flat = op.tensors[p.tensor] + p.offset + here;
                if (!p.contiguous()) {
                    move_piece<true>(p, op.tensors[p.tensor], here, stop, tile, false);
                    flat = tile;
                }
                unpack(*out.stream, op.tensors.data(), to, to + (stop - here), flat, past_caches);
            }
        });
        if (past_caches) stream_fence();
    }

    bool reduce_round(Member& m, Op& op) {
        const Recipe& r = *op.recipe;
        if (!all_posted(m, op, op.taken)) return false;
        const Segment& out = r.receives[0];
        const size_t length = r.length(out, op.taken), from = out.begin + op.taken * r.slot;
        if (length) combine(m, op, op.taken, out, from, length, nullptr);
        took(m, op);
        return true;
    }

    void reduce_slice(Member& m, Op& op) {
        const Recipe& r = *op.recipe;
        const Segment& out = r.receives[m.me];
        const size_t length = r.length(out, op.reduced), from = out.begin + op.reduced * r.slot;
        Channel& mine = *m.peers[m.me];
        const uint64_t number = op.first + op.reduced;
        if (length) combine(m, op, op.reduced, out, from, length, base_ + mine.rounds[number % kRounds].own);
        mine.reduced.store(number + 1, std::memory_order_release);
        ++op.reduced;
        tell(m, kNews);
    }

    // Reduce bytes [from, from + length) of the result's stream, whose pieces are contiguous, and copy them to `slot`.
    void combine(Member& m, Op& op, uint64_t round, const Segment& out, size_t from, size_t length, char* slot) {
        const Recipe& r = *op.recipe;
        std::vector<const char*> base(m.n), at(m.n);
        for (int i = 0; i < m.n; ++i) base[i] = source(m, op, i, round);
        const bool own_staged = r.keeps_own || r.shared();
        const Segment& sent = r.shared() ? r.sends[0] : r.sends[m.me];
        const size_t shift = sent.begin + round * r.slot;  // in the stream that was sent, as `from` in the result's
        alignas(kLine) char tile[kTile];
        each_part(*out.stream, from, from + length, nullptr, [&](const Piece& p, size_t a, size_t b, char*) {
            const size_t element = element_size(p.dtype);
            char* to = op.tensors[p.tensor] + p.offset;
            for (size_t here = a; here < b; here += kTile) {
                const size_t some = std::min(kTile, b - here);
                const size_t flat = p.start + here - from;
                for (int i = 0; i < m.n; ++i) at[i] = base[i] + flat;
                if (!own_staged) at[m.me] = own_bytes(*sent.stream, op, shift + flat);
                if (!slot && !r.past_caches) {
                    reduce(p.dtype, r.kind, at.data(), m.n, to + here, some / element);
                    continue;
                }
                reduce(p.dtype, r.kind, at.data(), m.n, tile, some / element);
                if (slot) std::memcpy(slot + flat, tile, some);
                r.past_caches ? stream_copy(to + here, tile, some) : (void)std::memcpy(to + here, tile, some);
            }
        });
    }

    static const char* own_bytes(const Stream& stream, const Op& op, size_t at) {
        for (const Piece& p : stream)
            if (at < p.start + p.bytes) return op.tensors[p.tensor] + p.offset + (at - p.start);
        return nullptr;
    }

    void took(Member& m, Op& op) {
        std::fill(op.got.begin(), op.got.end(), 0);
        if (op.recipe->past_caches) stream_fence();
        ++op.taken;
        m.peers[m.me]->taken.store(op.first + op.taken, std::memory_order_release);
        tell(m, kRoom);
        op.done = op.taken == op.recipe->rounds;
        if (!op.done) return;
        if (op.culprit == m.me) blocks_.forgo(m.bases, m.peers[0]->claims[op.first % kRounds], op.first);
        if (op.sleepers) wake_sleepers();
    }

    void tell(const Member& m, Event event) {
        for (int i = 0; i < m.n; ++i)
            if (i != m.me) ring(reinterpret_cast<Header*>(m.bases[i]), event);
    }

    std::mutex mutex_;
    char* base_;
    uint64_t* asking_;
    Header* header_;
    std::deque<Staging> rings_;  // the first is shared by channels that have none of their own
    Blocks blocks_;
    std::unordered_map<int, Member> members_;
    int sleepers_ = 0;  // threads that sleep in `finish`
    std::unordered_map<uint64_t, std::shared_ptr<Op>> ops_;
    uint64_t tickets_ = 0;
};

}  // namespace shm
