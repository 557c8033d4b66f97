// What the translated sources stand on: numbers, lists, dictionaries and sets that behave as Python's do.
//
// Everything lives in an arena of its thread, which is emptied after each state that has been looked at. Nothing is
// freed one by one, and sharing is what it is in Python: a variable is a pointer.

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>
#include <tuple>
#include <type_traits>
#include <utility>
#include <sys/mman.h>

typedef int64_t Int;
static constexpr Int NONE = INT64_MIN;  // None, where an int or a string may be None

struct Faulty {};  // the machine's own exception
struct Raised { const char* what; };  // Python would have raised something else

[[noreturn, gnu::cold, gnu::noinline]] static void raise(const char* what) { throw Raised{what}; }

// -- the arena ---------------------------------------------------------------------------------------------------------

static constexpr size_t ARENA = size_t(1) << 30;  // address space; only what is used takes memory

struct Arena {
    char* next = nullptr;
    char* end = nullptr;
    char* begin = nullptr;
    void open() {
        void* room = mmap(nullptr, ARENA, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (room == MAP_FAILED) throw std::bad_alloc();
        begin = next = static_cast<char*>(room);
        end = begin + ARENA;
    }
    void close() { if (begin) munmap(begin, ARENA); begin = next = end = nullptr; }
};

// What a thread has of its own is few bytes: those that are reached without a call are scarce, and every library takes
// of them. Where there are none left, the code is compiled once more to do without.
#ifdef WITHOUT_STATIC_TLS
#define OWN static __thread
#else
#define OWN __attribute__((tls_model("initial-exec"))) static __thread
#endif
OWN char* arena_next;
OWN char* arena_end;

[[gnu::always_inline]] static inline void* take_room(size_t bytes) {
    char* room = arena_next;
    bytes = (bytes + 7) & ~size_t(7);
    if (__builtin_expect(size_t(arena_end - room) < bytes, 0)) raise("one move takes more memory than there is");
    arena_next = room + bytes;
    return room;
}
template <class T> static inline T* make() { return new (take_room(sizeof(T))) T(); }

// -- numbers -----------------------------------------------------------------------------------------------------------

static inline Int add(Int a, Int b) { Int r; if (__builtin_add_overflow(a, b, &r)) raise("overflow"); return r; }
static inline Int sub(Int a, Int b) { Int r; if (__builtin_sub_overflow(a, b, &r)) raise("overflow"); return r; }
static inline Int mul(Int a, Int b) { Int r; if (__builtin_mul_overflow(a, b, &r)) raise("overflow"); return r; }
static inline Int neg(Int a) { return sub(0, a); }
static inline Int floordiv(Int a, Int b) {
    if (b == 0) raise("ZeroDivisionError");
    Int q = a / b;
    return (a % b != 0 && ((a < 0) != (b < 0))) ? q - 1 : q;
}
static inline Int mod(Int a, Int b) {
    if (b == 0) raise("ZeroDivisionError");
    Int r = a % b;
    return (r != 0 && ((r < 0) != (b < 0))) ? r + b : r;
}
static inline Int shift_left(Int a, Int by) {
    if (by < 0 || by > 62 || a > (INT64_MAX >> by) || a < (INT64_MIN >> by)) raise("overflow");
    return Int(uint64_t(a) << by);
}
static inline Int shift_right(Int a, Int by) {
    if (by < 0) raise("ValueError: negative shift count");
    return a >> (by > 63 ? 63 : by);
}
static inline Int text_of(Int number) {  // str(number): digits are their own number, see constants.py
    if (number < 0) raise("the text of a negative number has no number");
    return number;
}
static inline uint8_t byte_of(Int value) {
    if (uint64_t(value) > 255) raise("ValueError: byte must be in range(0, 256)");
    return uint8_t(value);
}

template <class T> struct Opt {  // a value or None
    bool has = false;
    T value{};
    T get() const { return value; }
};

struct Range {
    Int start, stop, step;
};
static inline Range range(Int start, Int stop, Int step) {
    if (step == 0) raise("ValueError: range() arg 3 must not be zero");
    return Range{start, stop, step};
}
static inline bool together(bool more, bool also) {  // zip(strict=True)
    if (more != also) raise("ValueError: zip() arguments are not of one length");
    return more;
}
static inline bool goes_on(const Range& r, Int at) { return r.step > 0 ? at < r.stop : at > r.stop; }

// -- equality ----------------------------------------------------------------------------------------------------------

template <class T> struct List;
template <class K, class V> struct Dict;
template <class T> struct Set;
template <class T> static inline std::enable_if_t<std::is_arithmetic_v<T>, bool> eq(T a, T b) { return a == b; }
template <class... T> static bool eq(const std::tuple<T...>& a, const std::tuple<T...>& b);
template <class T> static bool eq(List<T>* a, List<T>* b);
template <class K, class V> static bool eq(Dict<K, V>* a, Dict<K, V>* b);
template <class T> static bool eq(Set<T>* a, Set<T>* b);
template <class T> static inline bool eq(const Opt<T>& a, const Opt<T>& b) {
    return a.has == b.has && (!a.has || eq(a.value, b.value));
}

// -- lists, tuples and bytes -------------------------------------------------------------------------------------------

template <class T> struct List {
    T* data;
    Int size;
    Int room;

    static List* make(Int room = 0) {
        char* at = static_cast<char*>(take_room(sizeof(List) + size_t(room) * sizeof(T)));
        return new (at) List{reinterpret_cast<T*>(at + sizeof(List)), 0, room};
    }
    static List* of(const T* items, Int count) {
        List* list = make(count);
        if (count) memcpy(static_cast<void*>(list->data), items, size_t(count) * sizeof(T));
        list->size = count;
        return list;
    }
    List* copy() const { return of(data, size); }
    void grow(Int least) {
        Int wanted = room < 4 ? 4 : 2 * room;
        if (wanted < least) wanted = least;
        T* fresh = static_cast<T*>(take_room(size_t(wanted) * sizeof(T)));
        if (size) memcpy(static_cast<void*>(fresh), data, size_t(size) * sizeof(T));
        data = fresh;
        room = wanted;
    }
    void append(T item) {
        if (size == room) grow(size + 1);
        data[size++] = item;
    }
    void extend(const List* other) { splice(size, size, other); }
    T& at(Int place) const {
        if (place < 0) place += size;
        if (uint64_t(place) >= uint64_t(size)) raise("IndexError: list index out of range");
        return data[place];
    }
    static Int bound(Int place, Int size) {
        if (place < 0) place += size;
        return place < 0 ? 0 : place > size ? size : place;
    }
    List* slice(Int from, Int to) const {
        from = bound(from, size);
        to = bound(to, size);
        return of(data + from, to > from ? to - from : 0);
    }
    void splice(Int from, Int to, const List* other) {  // self[from:to] = other
        from = bound(from, size);
        to = bound(to, size);
        if (to < from) to = from;
        Int more = other->size, after = size - to, whole = from + more + after;
        const T* items = other->data;
        if (other == this) items = of(data, size)->data;
        if (whole > room) grow(whole);
        if (after) memmove(static_cast<void*>(data + from + more), data + to, size_t(after) * sizeof(T));
        if (more) memcpy(static_cast<void*>(data + from), items, size_t(more) * sizeof(T));
        size = whole;
    }
    void insert(Int place, T item) {
        List one{&item, 1, 1};
        place = bound(place, size);
        splice(place, place, &one);
    }
    T pop(Int place) {
        if (size == 0) raise("IndexError: pop from empty list");
        T item = at(place);
        if (place < 0) place += size;
        memmove(static_cast<void*>(data + place), data + place + 1, size_t(size - place - 1) * sizeof(T));
        size--;
        return item;
    }
    bool contains(const T& item) const {
        for (Int i = 0; i < size; i++) if (eq(data[i], item)) return true;
        return false;
    }
    Int index(const T& item) const {
        for (Int i = 0; i < size; i++) if (eq(data[i], item)) return i;
        raise("ValueError: not in list");
    }
    void remove(const T& item) { pop(index(item)); }
    List* repeat(Int times) const {
        List* list = make(times > 0 ? size * times : 0);
        for (Int i = 0; i < times; i++) list->extend(this);
        return list;
    }
    List* plus(const List* other) const {
        List* list = make(size + other->size);
        list->extend(this);
        list->extend(other);
        return list;
    }
    List* reversed() const {
        List* list = make(size);
        for (Int i = size; i-- > 0;) list->append(data[i]);
        return list;
    }
    template <class Key> void sort(Key key) {  // stable, as Python's; lists here are short
        for (Int i = 1; i < size; i++) {
            T item = data[i];
            auto its = key(item);
            Int j = i;
            for (; j > 0 && its < key(data[j - 1]); j--) data[j] = data[j - 1];
            data[j] = item;
        }
    }
};

template <class T> static bool eq(List<T>* a, List<T>* b) {
    if (a == b) return true;
    if (!a || !b || a->size != b->size) return false;
    for (Int i = 0; i < a->size; i++) if (!eq(a->data[i], b->data[i])) return false;
    return true;
}
template <class Tuple, size_t... I> static inline bool eq_parts(const Tuple& a, const Tuple& b, std::index_sequence<I...>) {
    return (eq(std::get<I>(a), std::get<I>(b)) && ...);
}
template <class... T> static bool eq(const std::tuple<T...>& a, const std::tuple<T...>& b) {
    return eq_parts(a, b, std::index_sequence_for<T...>());
}

static inline List<uint8_t>* bytes_of(const List<Int>* items) {
    auto* list = List<uint8_t>::make(items->size);
    for (Int i = 0; i < items->size; i++) list->append(byte_of(items->data[i]));
    return list;
}
static inline List<Int>* ints_of(const List<uint8_t>* items) {
    auto* list = List<Int>::make(items->size);
    for (Int i = 0; i < items->size; i++) list->data[i] = items->data[i];
    list->size = items->size;
    return list;
}

static inline List<List<Int>*>* product(Int values, Int places) {  // itertools.product(range(values), repeat=places)
    auto* all = List<List<Int>*>::make();
    auto* now = List<Int>::make(places);
    if (places < 0) raise("ValueError: repeat argument cannot be negative");
    if (places > 0 && values <= 0) return all;
    for (Int i = 0; i < places; i++) now->append(0);
    for (;;) {
        all->append(now->copy());
        Int i = places - 1;
        while (i >= 0 && ++now->data[i] == values) now->data[i--] = 0;
        if (i < 0) return all;
    }
}

static inline Int hash_slot(Int key) { return Int((uint64_t(key) * 0x9e3779b97f4a7c15u) >> 40); }

// -- dictionaries and sets: small, in the order of insertion -----------------------------------------------------------

template <class K, class V> struct Dict {
    struct Entry { K key; V value; };
    Entry* data = nullptr;
    Int size = 0;
    Int room = 0;
    const int16_t* slots = nullptr;  // of a large constant: places by hash, plus 1 (0: none); a power of two of them
    Int last_slot = 0;

    static Dict* make() { return ::make<Dict>(); }
    Int place(const K& key) const {
        if constexpr (std::is_same_v<K, Int>) {
            if (slots) {
                for (Int at = hash_slot(key) & last_slot; slots[at]; at = (at + 1) & last_slot)
                    if (data[slots[at] - 1].key == key) return slots[at] - 1;
                return -1;
            }
        }
        for (Int i = 0; i < size; i++) if (eq(data[i].key, key)) return i;
        return -1;
    }
    V* find(const K& key) const {
        Int at = place(key);
        return at < 0 ? nullptr : &data[at].value;
    }
    V& at(const K& key) const {
        V* found = find(key);
        if (!found) raise("KeyError");
        return *found;
    }
    V get(const K& key, V otherwise) const {
        V* found = find(key);
        return found ? *found : otherwise;
    }
    V& set(const K& key, V value) {
        if (V* found = find(key)) return *found = value;
        if (slots) raise("a constant is changed");
        if (size == room) {
            Int wanted = room ? 2 * room : 4;
            Entry* fresh = static_cast<Entry*>(take_room(size_t(wanted) * sizeof(Entry)));
            if (size) memcpy(static_cast<void*>(fresh), data, size_t(size) * sizeof(Entry));
            data = fresh;
            room = wanted;
        }
        data[size] = Entry{key, value};
        return data[size++].value;
    }
    V& setdefault(const K& key, V value) {
        V* found = find(key);
        return found ? *found : set(key, value);
    }
    bool drop(const K& key) {
        Int at = place(key);
        if (at < 0) return false;
        if (slots) raise("a constant is changed");
        memmove(static_cast<void*>(data + at), data + at + 1, size_t(size - at - 1) * sizeof(Entry));
        size--;
        return true;
    }
    void remove(const K& key) { if (!drop(key)) raise("KeyError"); }
    Dict* copy() const {
        Dict* twin = make();
        twin->data = static_cast<Entry*>(take_room(size_t(size) * sizeof(Entry)));
        if (size) memcpy(static_cast<void*>(twin->data), data, size_t(size) * sizeof(Entry));
        twin->size = twin->room = size;
        return twin;
    }
    bool contains(const K& key) const { return find(key) != nullptr; }
};
template <class K, class V> static bool eq(Dict<K, V>* a, Dict<K, V>* b) {
    if (a == b) return true;
    if (!a || !b || a->size != b->size) return false;
    for (Int i = 0; i < a->size; i++) {
        V* found = b->find(a->data[i].key);
        if (!found || !eq(*found, a->data[i].value)) return false;
    }
    return true;
}

template <class T> struct Set {  // never iterated over: Python's order is its own
    T* data = nullptr;
    Int size = 0;
    Int room = 0;

    static Set* make() { return ::make<Set>(); }
    bool contains(const T& item) const {
        for (Int i = 0; i < size; i++) if (eq(data[i], item)) return true;
        return false;
    }
    void add(const T& item) {
        if (contains(item)) return;
        List<T> list{data, size, room};
        list.append(item);
        data = list.data;
        size = list.size;
        room = list.room;
    }
    void update(const List<T>* items) { for (Int i = 0; i < items->size; i++) add(items->data[i]); }
    void update(const Set* items) { for (Int i = 0; i < items->size; i++) add(items->data[i]); }
    Set* copy() const {
        Set* twin = make();
        twin->update(this);
        return twin;
    }
    Set* plus(const Set* other) const {
        Set* both = copy();
        both->update(other);
        return both;
    }
};
template <class T> static bool eq(Set<T>* a, Set<T>* b) {
    if (a == b) return true;
    if (!a || !b || a->size != b->size) return false;
    for (Int i = 0; i < a->size; i++) if (!b->contains(a->data[i])) return false;
    return true;
}

// -- truth -------------------------------------------------------------------------------------------------------------

template <class T> static inline bool filled(T* items) { return items && items->size; }

// -- questions asked in Python -----------------------------------------------------------------------------------------

static Int (*ask_python)(Int question, const Int* numbers, Int* answer) = nullptr;
static constexpr Int MOST_NUMBERS = 256;

// Answers by the numbers that were asked with. They outlive every state, and a thread has its own.
template <size_t N, class R> struct Answers {
    struct Slot { Int numbers[N]; R answer; bool used; };
    Slot* slots = nullptr;
    size_t count = 0, used = 0;

    ~Answers() { free(slots); }
    static size_t hash(const Int* numbers) {
        uint64_t h = 0x9e3779b97f4a7c15u;
        for (size_t i = 0; i < N; i++) { h = (h ^ uint64_t(numbers[i])) * 0xd6e8feb86659fd93u; h ^= h >> 32; }
        return size_t(h);
    }
    Slot* slot(const Int* numbers) {
        size_t at = hash(numbers) & (count - 1);
        while (slots[at].used && memcmp(slots[at].numbers, numbers, N * sizeof(Int)) != 0) at = (at + 1) & (count - 1);
        return &slots[at];
    }
    void widen() {
        Slot* old = slots;
        size_t before = count;
        count = count ? 2 * count : 64;
        slots = static_cast<Slot*>(calloc(count, sizeof(Slot)));
        if (!slots) throw std::bad_alloc();
        for (size_t i = 0; i < before; i++) if (old[i].used) *slot(old[i].numbers) = old[i];
        free(old);
    }
    template <class Read> R ask(Int question, const Int (&numbers)[N], Read read) {
        if (count) {
            Slot* found = slot(numbers);
            if (found->used) return found->answer;
        }
        if (2 * (used + 1) > count) widen();
        Int answer[MOST_NUMBERS];
        if (ask_python(question, numbers, answer) < 0) raise("Python");
        const Int* at = answer;
        Slot* found = slot(numbers);
        memcpy(found->numbers, numbers, N * sizeof(Int));
        found->answer = read(at);
        found->used = true;
        used++;
        return found->answer;
    }
};
static inline Int read_number(const Int*& at) { return *at++; }
static inline List<Int>* read_list(const Int*& at) {
    Int size = *at++;
    char* room = static_cast<char*>(malloc(sizeof(List<Int>) + size_t(size) * sizeof(Int)));
    if (!room) throw std::bad_alloc();
    auto* list = new (room) List<Int>{reinterpret_cast<Int*>(room + sizeof(List<Int>)), size, size};
    memcpy(list->data, at, size_t(size) * sizeof(Int));
    at += size;
    return list;
}
