// Collectives of processes on one machine: the functions that ops/collectives/transport/shm_world.py calls. shm_engine.h says how they work.
#include "shm_engine.h"

using Held = std::shared_ptr<const shm::Recipe>;

extern "C" {

size_t shm_start() { return shm::Engine::start(); }
int shm_channels() { return shm::kChannels; }

// `base`: this process's segment, of zeros. `asking`: four words that stay; they say what is begun (see Sign).
void* shm_open_engine(char* base, size_t bytes, uint64_t* asking) { return new shm::Engine(base, bytes, asking); }
void shm_close_engine(void* engine) { delete static_cast<shm::Engine*>(engine); }

// Ends all running ops; every waiting thread returns. The engine and its segment stay until it is deleted.
void shm_end(void* engine) { static_cast<shm::Engine*>(engine)->close(); }

void shm_join(void* engine, int channel, int n, int me, char* const* bases, uint64_t first) {
    static_cast<shm::Engine*>(engine)->join(channel, n, me, bases, first);
}

void shm_set_ring(void* engine, int channel, uint64_t start, uint64_t bytes) {
    static_cast<shm::Engine*>(engine)->set_ring(channel, start, bytes);
}

int shm_has_room(void* engine, int channel, uint64_t bytes, uint64_t rounds, uint64_t longest) {
    return static_cast<shm::Engine*>(engine)->has_room(channel, bytes, rounds, longest);
}

void shm_leave(void* engine, int channel) { static_cast<shm::Engine*>(engine)->leave(channel); }
uint64_t shm_posted(void* engine) { return static_cast<shm::Engine*>(engine)->posted(); }
uint64_t shm_rounds() { return shm::kRounds; }

void* shm_recipe(const int64_t* words, int op) { return new Held(shm::read_recipe(words, op)); }
void shm_drop_recipe(void* recipe) { delete static_cast<Held*>(recipe); }

// A ticket; 0 when the channel was left. The tensors must stay, and what is read stay the same, until it is done.
uint64_t shm_begin(void* engine, int channel, void* recipe, char* const* tensors, int count) {
    return static_cast<shm::Engine*>(engine)->begin(channel, *static_cast<Held*>(recipe), tensors, count);
}

// `block`: null, or what all members share now; shm_give gives it back. `base`: its memory. `fault`: of an op for which
// memory was missing, the errno and the member that met it.
int shm_finish(void* engine, uint64_t ticket, int64_t nanoseconds, void** block, char** base, int* fault) {
    shm::Mapped* shared = nullptr;
    shm::Fault why;
    const int answer = static_cast<shm::Engine*>(engine)->finish(ticket, nanoseconds, &shared, &why);
    *block = shared;
    *base = shared ? shared->base : nullptr;
    fault[0] = why.error;
    fault[1] = why.culprit;
    return answer;
}

void shm_give(void* block) { shm::Blocks::give(static_cast<shm::Mapped*>(block)); }

int shm_stranger(void* engine, uint64_t ticket, uint64_t* signs) {
    return static_cast<shm::Engine*>(engine)->stranger(ticket, signs);
}

int shm_advance(void* engine) { return static_cast<shm::Engine*>(engine)->advance(); }
int shm_done(void* engine, uint64_t ticket) { return static_cast<shm::Engine*>(engine)->is_done(ticket); }
int shm_lacks(void* engine, uint64_t ticket) { return static_cast<shm::Engine*>(engine)->lacks(ticket); }
}
