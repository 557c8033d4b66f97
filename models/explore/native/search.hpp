// The search: breadth first, level by level, over states that are told apart by their bytes.
//
// With several workers each keeps the states whose bytes hash to it. A level has two parts: everybody looks at their
// states of it, and then takes in what the others have reached of theirs.

#include <atomic>
#include <barrier>
#include <memory>
#include <system_error>
#include <thread>
#include <vector>

namespace search {

static constexpr uint64_t NOBODY = UINT64_MAX;
static constexpr const char* NO_MEMORY = "MemoryError";

static inline uint64_t mix(uint64_t a, uint64_t b) {
    __uint128_t product = static_cast<__uint128_t>(a ^ 0x9e3779b97f4a7c15u) * (b ^ 0xd6e8feb86659fd93u);
    return uint64_t(product) ^ uint64_t(product >> 64);
}
static uint64_t hash_of(const uint8_t* data, size_t size) {
    uint64_t h = size;
    while (size >= 8) {
        uint64_t word;
        memcpy(&word, data, 8);
        h = mix(h, word);
        data += 8;
        size -= 8;
    }
    uint64_t rest = 0;
    memcpy(&rest, data, size);
    return mix(mix(h, rest), 0x2545f4914f6cdd1du);
}

struct State {
    const uint8_t* data;
    uint64_t parent;
    uint32_t size;
    uint32_t move;  // its place among what was possible in the parent
};
struct Arrival {
    uint64_t hash, parent;
    uint32_t size, move;
};
struct Fault {
    uint64_t state;
    uint32_t move;
};

class alignas(128) Shard {  // two workers write no line of memory in common
  public:
    std::vector<State> states;
    std::vector<Fault> faults;
    std::vector<std::vector<uint8_t>> outbox;
    size_t level_begin = 0, level_end = 0;
    uint64_t transitions = 0, place = 0, places = 1;
    uint64_t failed_state = NOBODY;
    uint32_t failed_move = 0;
    const char* failure = nullptr;

    void insert(uint64_t hash, const uint8_t* data, uint32_t size, uint64_t parent, uint32_t move) {
        if (2 * (states.size() + 1) > slots_.size()) widen();
        size_t at = hash & (slots_.size() - 1);
        const uint32_t tag = uint32_t(hash >> 32);
        for (; slots_[at].state; at = (at + 1) & (slots_.size() - 1)) {
            if (slots_[at].tag != tag) continue;
            const State& other = states[slots_[at].state - 1];
            if (other.size == size && memcmp(other.data, data, size) == 0) return;
        }
        if (size > room_) {
            room_ = size > CHUNK ? size : CHUNK;
            chunks_.emplace_back(new uint8_t[room_]);
            next_ = chunks_.back().get();
        }
        memcpy(next_, data, size);
        states.push_back(State{next_, parent, size, move});
        next_ += size;
        room_ -= size;
        slots_[at] = Slot{tag, uint32_t(states.size())};
    }
    size_t owner(uint64_t hash) const { return places == 1 ? 0 : size_t((hash >> 20) % places); }

    void reach(const uint8_t* data, uint32_t size, uint64_t parent, uint32_t move) {
        const uint64_t hash = hash_of(data, size);
        const size_t whose = owner(hash);
        if (whose == place) return insert(hash, data, size, parent, move);
        const Arrival head{hash, parent, size, move};
        auto& box = outbox[whose];
        const size_t before = box.size();
        box.resize(before + sizeof head + size);
        memcpy(box.data() + before, &head, sizeof head);
        memcpy(box.data() + before + sizeof head, data, size);
    }
    void take_in(std::vector<uint8_t>& box) {
        for (size_t at = 0; at < box.size();) {
            Arrival head;
            memcpy(&head, box.data() + at, sizeof head);
            at += sizeof head;
            insert(head.hash, box.data() + at, head.size, head.parent, head.move);
            at += head.size;
        }
        box.clear();
        if (box.capacity() > CHUNK) box.shrink_to_fit();
    }

  private:
    struct Slot { uint32_t tag, state; };
    static constexpr size_t CHUNK = size_t(1) << 20;
    std::vector<Slot> slots_;
    std::vector<std::unique_ptr<uint8_t[]>> chunks_;
    uint8_t* next_ = nullptr;
    size_t room_ = 0;

    void widen() {
        std::vector<Slot> wider(slots_.empty() ? 1024 : 2 * slots_.size());
        for (size_t i = 0; i < states.size(); i++) {
            const uint64_t hash = hash_of(states[i].data, states[i].size);
            size_t at = hash & (wider.size() - 1);
            while (wider[at].state) at = (at + 1) & (wider.size() - 1);
            wider[at] = Slot{uint32_t(hash >> 32), uint32_t(i + 1)};
        }
        slots_ = std::move(wider);
    }
};

class Search {
  public:
    std::vector<Shard> shards;
    std::atomic<bool> stop{false};

    explicit Search(size_t workers) : shards(workers), gate_(std::ptrdiff_t(workers)), arenas_(workers) {
        for (size_t i = 0; i < workers; i++) {
            shards[i].place = i;
            shards[i].places = workers;
            shards[i].outbox.resize(workers);
        }
        try {
            for (auto& arena : arenas_) arena.open();
        } catch (const std::bad_alloc&) {
            for (auto& arena : arenas_) arena.close();
            throw;
        }
        begin_thread(arenas_[0]);
        auto* first = encode(empty_world());
        Shard& home = shards[shards[0].owner(hash_of(first->data, size_t(first->size)))];
        home.insert(hash_of(first->data, size_t(first->size)), first->data, uint32_t(first->size), NOBODY, 0);
        turn();
        try {
            for (size_t i = 1; i < workers; i++) threads_.emplace_back([this, i] { serve(i); });
        } catch (const std::system_error&) {  // no more threads: those that there are must not wait for the others
            for (size_t i = threads_.size() + 1; i < workers; i++) gate_.arrive_and_drop();
            leave();
            throw;
        }
    }
    ~Search() { leave(); }
    void level() {
        if (threads_.empty()) {
            look(shards[0]);
        } else {
            gate_.arrive_and_wait();
            work(0);
        }
        if (!stop) turn();
    }

  private:
    std::barrier<> gate_;
    std::vector<std::thread> threads_;
    std::atomic<bool> ending_{false};
    std::vector<Arena> arenas_;

    void leave() {
        ending_ = true;
        if (!threads_.empty()) gate_.arrive_and_wait();
        for (auto& thread : threads_) thread.join();
        threads_.clear();
        end_thread();
        for (auto& arena : arenas_) arena.close();
    }
    static void begin_thread(const Arena& arena) {
        arena_next = arena.next;
        arena_end = arena.end;
        answers = new AllAnswers();
    }
    static void end_thread() {
        delete answers;
        answers = nullptr;
        arena_next = arena_end = nullptr;
    }
    void turn() {
        for (auto& shard : shards) {
            shard.level_begin = shard.level_end;
            shard.level_end = shard.states.size();
        }
    }
    void serve(size_t place) {
        begin_thread(arenas_[place]);
        for (;;) {
            gate_.arrive_and_wait();
            if (ending_) break;
            work(place);
        }
        end_thread();
    }
    void work(size_t place) {
        look(shards[place]);
        gate_.arrive_and_wait();
        try {
            for (auto& other : shards) shards[place].take_in(other.outbox[place]);
        } catch (const std::bad_alloc&) {
            fail(shards[place], NO_MEMORY, NOBODY, 0);
        }
        gate_.arrive_and_wait();
    }
    void look(Shard& shard) {
        uint64_t state = NOBODY;
        uint32_t place = 0;
        char* const begin = arena_next;
        try {
            auto* machine = first_machine();
            char* const mark = arena_next;
            for (size_t index = shard.level_begin; index < shard.level_end; index++) {
                if (stop.load(std::memory_order_relaxed)) break;
                arena_next = mark;
                state = index * shard.places + shard.place;
                place = 0;
                const State here = shard.states[index];
                List<uint8_t> bytes{const_cast<uint8_t*>(here.data), here.size, here.size};
                auto* world = decode(&bytes);
                auto* moves = possible(world);
                for (; place < uint32_t(moves->size); place++) {
                    // The last move may change the world itself.
                    auto* after = place + 1 == uint32_t(moves->size) ? world : copy_of(world);
                    become(machine, after);
                    shard.transitions++;
                    try {
                        carry_out(machine, moves->data[place]);
                    } catch (const Faulty&) {
                        shard.faults.push_back(Fault{state, place});
                        continue;  // what follows from a broken state proves nothing
                    }
                    auto* out = encode(after);
                    shard.reach(out->data, uint32_t(out->size), state, place);
                }
            }
        } catch (const Raised& raised) {
            fail(shard, raised.what, state, place);
        } catch (const std::bad_alloc&) {
            fail(shard, NO_MEMORY, state, place);
        }
        arena_next = begin;
    }
    void fail(Shard& shard, const char* what, uint64_t state, uint32_t move) {
        shard.failure = what;
        shard.failed_state = state;
        shard.failed_move = move;
        stop = true;
    }
};

}  // namespace search

extern "C" {

void* search_open(uint64_t workers, Int (*ask)(Int, const Int*, Int*)) {
    ask_python = ask;
    try {
        return new search::Search(workers);
    } catch (...) {
        return nullptr;
    }
}
void search_close(void* it) { delete static_cast<search::Search*>(it); }
void search_level(void* it) { static_cast<search::Search*>(it)->level(); }
uint64_t search_waiting(void* it) {
    uint64_t count = 0;
    for (auto& shard : static_cast<search::Search*>(it)->shards) count += shard.level_end - shard.level_begin;
    return count;
}
uint64_t search_count(void* it, uint64_t place) { return static_cast<search::Search*>(it)->shards[place].states.size(); }
uint64_t search_transitions(void* it) {
    uint64_t count = 0;
    for (auto& shard : static_cast<search::Search*>(it)->shards) count += shard.transitions;
    return count;
}
// What kept the search from going on, or null; and where.
const char* search_failure(void* it, uint64_t* state, uint32_t* move) {
    for (auto& shard : static_cast<search::Search*>(it)->shards) {
        if (!shard.failure) continue;
        *state = shard.failed_state;
        *move = shard.failed_move;
        return shard.failure;
    }
    return nullptr;
}
// The bytes of one state, and how it was first reached.
const uint8_t* search_state(void* it, uint64_t place, uint64_t index, uint32_t* size, uint64_t* parent, uint32_t* move) {
    const auto& state = static_cast<search::Search*>(it)->shards[place].states[index];
    *size = state.size;
    *parent = state.parent;
    *move = state.move;
    return state.data;
}
// All states of a shard, one after the other, each with its length in four bytes ahead; returns how many bytes that is.
uint64_t search_dump(void* it, uint64_t place, uint8_t* out) {
    uint64_t total = 0;
    for (const auto& state : static_cast<search::Search*>(it)->shards[place].states) {
        if (out) {
            memcpy(out + total, &state.size, 4);
            memcpy(out + total + 4, state.data, state.size);
        }
        total += 4 + state.size;
    }
    return total;
}
uint64_t search_faults(void* it, uint64_t place) { return static_cast<search::Search*>(it)->shards[place].faults.size(); }
uint64_t search_fault(void* it, uint64_t place, uint64_t number, uint32_t* move) {
    const auto& fault = static_cast<search::Search*>(it)->shards[place].faults[number];
    *move = fault.move;
    return fault.state;
}
}
