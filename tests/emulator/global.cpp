#include "global.h"

#include <dlfcn.h>

#include <array>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <unordered_map>

#include "block.h"

namespace emulator {
namespace {

// Who touched some bytes of a word last, of some.
struct Access {
  Home home = 0;
  uint32_t time = 0;
  uint16_t actor = 0;
  uint8_t bytes = 0;  // a bit each
  bool atomic = false;
};
static_assert(kMostBlocks * kActors <= 65536, "an actor's number");

// Of each kind the last two plain ones, halves of the word perhaps, and one that is atomic.
struct Word {
  Access written[3], read[3];
  bool flag;  // of which flags knows

  bool is_written(uint8_t mask) const {
    return (written[0].bytes | written[1].bytes | written[2].bytes) & mask;
  }
};

constexpr uintptr_t kPage = 4096;
constexpr size_t kTables = size_t{1} << 18, kPages = size_t{1} << 18;

// By page: what is known of its words, or NULL. Two steps, as memory lies anywhere.
std::array<std::array<Word*, kPages>*, kTables> tables;

struct Watched {
  size_t bytes;
  Word* words;
};
std::mutex watched_mutex;
std::unordered_map<void*, Watched> watched;

uint32_t host_wrote = 0;  // the last write by the host, among launches

// What was released there, by address.
std::unordered_map<uintptr_t, SharedClock> flags;

Word** page_of(uintptr_t at) {
  const uintptr_t page = at / kPage;
  std::array<Word*, kPages>* table = tables[page / kPages % kTables];
  return table ? &(*table)[page % kPages] : nullptr;
}

Word* word_at(uintptr_t at) {
  Word** page = page_of(at);
  return page && *page ? *page + at % kPage / 4 : nullptr;
}

void set_pages(char* memory, size_t bytes, Word* words) {
  for (size_t n = 0; n < bytes; n += kPage) {
    const uintptr_t page = reinterpret_cast<uintptr_t>(memory + n) / kPage;
    auto& table = tables[page / kPages % kTables];
    if (!table) table = new std::array<Word*, kPages>();
    (*table)[page % kPages] = words ? words + n / 4 : nullptr;
  }
}

// Of a warp in the code of a kernel, or of a copy.
struct Actor {
  int actor;
  uint32_t time;
  const Clock& known;
  const Clock* proxied;  // NULL: not the copy engine

  const Clock& clock() const { return proxied ? *proxied : known; }
  bool knows(const Access& a) const { return clock().knows(a.home, a.actor, a.time); }
};

std::string who(Home home, int actor) {
  return name_of(actor) + " " + std::to_string(static_cast<uint32_t>(home)) + " of launch " +
         std::to_string(home >> 32);
}

[[noreturn]] void found(const Actor& self, const char* does, uintptr_t at, const Access& other,
                        const char* did, const void* caller) {
  Dl_info info{};
  const char* name = caller && dladdr(caller, &info) && info.dli_sname ? info.dli_sname : "";
  const bool unfenced = self.proxied && self.known.knows(other.home, other.actor, other.time);
  fail("a race: %s %s global address %#zx, which %s %s; %s %s",
       who(self.known.home, self.actor).c_str(), does, static_cast<size_t>(at),
       who(other.home, other.actor).c_str(), did,
       unfenced ? "no fence of the global proxy lies between" : "nothing puts these in an order",
       name);
}

void visit(const Actor& self, uintptr_t at, size_t bytes, bool stores, bool atomic,
           const void* caller) {
  const uintptr_t end = at + bytes;
  for (uintptr_t first = at & ~uintptr_t{3}; first < end; first += 4) {
    Word* const word = word_at(first);
    if (!word) continue;
    uint8_t mask = 15;
    if (first < at) mask = static_cast<uint8_t>(mask << (at - first));
    if (first + 4 > end) mask &= static_cast<uint8_t>(15 >> (first + 4 - end));
    if (!atomic && !word->is_written(mask) && !self.clock().knows(home_of(host_wrote, 0), 0, 0)) {
      fail(
          "a race: %s %s global address %#zx, which work before this kernel wrote; nothing puts "
          "these in an order",
          who(self.known.home, self.actor).c_str(), stores ? "writes" : "reads",
          static_cast<size_t>(first));
    }
    for (const Access& a : word->written) {
      if ((a.bytes & mask) && !(a.atomic && atomic) && !self.knows(a)) {
        found(self, stores ? "writes" : "reads", first, a, "wrote", caller);
      }
    }
    const Access now{self.known.home, self.time, static_cast<uint16_t>(self.actor), mask, atomic};
    Access* const kept = stores ? word->written : word->read;
    if (stores) {
      for (Access& a : word->read) {
        if ((a.bytes & mask) && !(a.atomic && atomic) && !self.knows(a)) {
          found(self, "writes", first, a, "read", caller);
        }
        a.bytes &= static_cast<uint8_t>(~mask);
      }
      if (!atomic) {
        for (Access& a : word->written) a.bytes &= static_cast<uint8_t>(~mask);
        if (word->flag) {
          flags.erase(first);
          word->flag = false;
        }
      }
    }
    if (atomic) {
      if (kept[2].bytes == 0 || self.knows(kept[2]) || draw(2)) kept[2] = now;
      continue;
    }
    // In the place of one that it follows, if there is any.
    Access* place = nullptr;
    for (int n = 0; n < 2; ++n) {
      Access& a = kept[n];
      if (a.bytes == 0 || ((a.bytes & ~mask) == 0 && self.knows(a))) place = &a;
    }
    *(place ? place : &kept[draw(2)]) = now;
  }
}

Actor running_warp(bool loads) {
  const Races& races = running->home->races;
  const Act& act = races.act_of_warp(running->warp);
  return {act.actor - (loads ? kWarps - kLoads : 0), act.time, act.known, nullptr};
}

// One number, and what was released with it.
SharedClock* flag_at(const void* at, bool make) {
  const uintptr_t address = reinterpret_cast<uintptr_t>(at);
  Word* const word = word_at(address);
  if (!word || (!word->flag && !make)) return nullptr;
  word->flag = true;
  return &flags[address];
}

void see(const void* at, Order order) {
  Races& races = running->home->races;
  const SharedClock* flag = flag_at(at, false);
  if (!flag || !*flag) return;
  if (order == Order::kAcquire || order == Order::kBoth) {
    races.of_warp(running->warp).join(**flag);
  } else {
    join(races.fenced(running->warp).seen, *flag);
  }
}

// added: what others released there can still be seen.
void show(const void* at, Order order, bool added) {
  Races& races = running->home->races;
  const int warp = running->warp;
  SharedClock shown = races.fenced(warp).released;
  if (order == Order::kRelease || order == Order::kBoth) {
    shown = std::make_shared<const Clock>(races.of_warp(warp));
    races.advance(warp);
  }
  SharedClock* const flag = flag_at(at, true);
  if (!flag) return;
  if (!added) flag->reset();
  join(*flag, shown);
}

}  // namespace

void watch(void* memory, size_t bytes) {
  if (!finds_races || !memory) return;
  const std::lock_guard<std::mutex> lock(watched_mutex);
  bytes = (bytes + kPage - 1) / kPage * kPage;
  Word* const words = static_cast<Word*>(std::calloc(bytes / 4, sizeof(Word)));
  if (!words) fail("no memory to find races in %zu bytes", bytes);
  watched[memory] = {bytes, words};
  set_pages(static_cast<char*>(memory), bytes, words);
}

void forget(void* memory) {
  const std::lock_guard<std::mutex> lock(watched_mutex);
  const auto found = watched.find(memory);
  if (found == watched.end()) return;
  set_pages(static_cast<char*>(memory), found->second.bytes, nullptr);
  std::free(found->second.words);
  watched.erase(found);
}

void host_writes(const void* to, size_t bytes) {
  if (!finds_races) return;
  const std::lock_guard<std::mutex> lock(one_at_a_time);
  launch.next(false);
  host_wrote = launch.number;
  const uintptr_t first = reinterpret_cast<uintptr_t>(to);
  for (uintptr_t at = first & ~uintptr_t{3}; at < first + bytes; at += 4) {
    Word* const word = word_at(at);
    if (!word) continue;
    for (int n = 0; n < 3; ++n) {
      if (word->written[n].bytes) word->written[n].bytes = 0;
      if (word->read[n].bytes) word->read[n].bytes = 0;
    }
    if (word->flag) flags.erase(at);
    if (word->flag) word->flag = false;
  }
}

void touch(const void* at, size_t bytes, Does what) {
  if (!finds_races || !running) return;
  visit(running_warp(what == Does::kRead), reinterpret_cast<uintptr_t>(at), bytes,
        what != Does::kRead, what == Does::kAdd, nullptr);
}

void touch(const Act* act, const void* at, size_t bytes, Does what) {
  if (!finds_races || !act) return;
  static const Clock nothing;
  const Clock* const proxied = act->proxied ? act->proxied.get() : &nothing;
  visit({act->actor, act->time, act->known, proxied}, reinterpret_cast<uintptr_t>(at), bytes,
        what != Does::kRead, what == Does::kAdd, nullptr);
}

// ---- flags

void before_load(const void* at, size_t bytes, Order order) {
  if (!finds_races || !running) return;
  visit(running_warp(true), reinterpret_cast<uintptr_t>(at), bytes, false, true, nullptr);
  see(at, order);
}

void before_store(const void* at, size_t bytes, Order order) {
  if (!finds_races || !running) return;
  visit(running_warp(false), reinterpret_cast<uintptr_t>(at), bytes, true, true, nullptr);
  show(at, order, false);
}

void before_change(const void* at, size_t bytes, Order order) {
  if (!finds_races || !running) return;
  visit(running_warp(false), reinterpret_cast<uintptr_t>(at), bytes, true, true, nullptr);
  see(at, order);
  show(at, order, true);
}

int32_t fetch_add(int32_t* to, int32_t x, Order order) {
  before_change(to, sizeof x, order);
  return __atomic_fetch_add(to, x, __ATOMIC_SEQ_CST);
}

int32_t fetch_or(int32_t* to, int32_t x, Order order) {
  before_change(to, sizeof x, order);
  return __atomic_fetch_or(to, x, __ATOMIC_SEQ_CST);
}

void add(float* to, float x) {
  touch(to, sizeof x, Does::kAdd);
  *to += x;
}

void fence_gpu() {
  if (!finds_races || !running) return;
  Races& races = running->home->races;
  Clock& known = races.of_warp(running->warp);
  Fenced& fenced = races.fenced(running->warp);
  if (fenced.seen) known.join(*fenced.seen);
  fenced.seen = nullptr;
  fenced.released = std::make_shared<const Clock>(known);
  races.advance(running->warp);
}

void fence_async_global() {
  if (!finds_races || !running) return;
  Races& races = running->home->races;
  races.fenced(running->warp).proxied = std::make_shared<const Clock>(races.of_warp(running->warp));
  races.advance(running->warp);
}

// Apart, for there are many of them and mostly nobody looks for races.
__attribute__((noinline)) static void told(const void* at, size_t bytes, bool stores,
                                           const void* caller) {
  const uintptr_t address = reinterpret_cast<uintptr_t>(at);
  if (!running || !word_at(address)) return;
  visit(running_warp(!stores), address, bytes, stores, false, caller);
}

}  // namespace emulator

// ---- what the compiler calls

#define LOADS_AND_STORES(bytes)                                                  \
  void __tsan_read##bytes(const void* at) { TOUCH(at, bytes, false); }           \
  void __tsan_write##bytes(void* at) { TOUCH(at, bytes, true); }                 \
  void __tsan_unaligned_read##bytes(const void* at) { TOUCH(at, bytes, false); } \
  void __tsan_unaligned_write##bytes(void* at) { TOUCH(at, bytes, true); }
#define TOUCH(at, bytes, stores)                                                         \
  if (__builtin_expect(emulator::finds_races, false)) {                                  \
    emulator::told(at, static_cast<size_t>(bytes), stores, __builtin_return_address(0)); \
  }

extern "C" {

void __tsan_init() {}
LOADS_AND_STORES(1)
LOADS_AND_STORES(2)
LOADS_AND_STORES(4)
LOADS_AND_STORES(8)
LOADS_AND_STORES(16)
void __tsan_read_range(const void* at, unsigned long bytes) { TOUCH(at, bytes, false); }
void __tsan_write_range(void* at, unsigned long bytes) { TOUCH(at, bytes, true); }
void __tsan_vptr_update(void**, void*) {}
void __tsan_vptr_read(void**) {}

}  // extern "C"
