// Shared memory, the barriers that lie in it, and copies to and from it.
#include <cstring>

#include "block.h"
#include "global.h"

namespace emulator {

char* dynamic_shared() { return block->shared; }

namespace {

// Of an address, the bits that Block::upper_bits leaves.
constexpr uint32_t kOffset = 0xffffff;

}  // namespace

uint32_t own_address(uint32_t address) { return (address & kOffset) | block->upper_bits; }

uint32_t shared_address(const void* p) {
  const ptrdiff_t at = static_cast<const char*>(p) - block->shared;
  if (at < 0 || at >= kSharedBytes) fail("%p is not in the dynamic shared memory", p);
  return own_address(kSharedBase + static_cast<uint32_t>(at));
}

namespace {

uint32_t offset_of(uint32_t address) { return (address & kOffset) - kSharedBase; }

// Of this block.
char* at(uint32_t address, uint32_t bytes) {
  if (address != own_address(address)) fail("shared address %x is of another block", address);
  const uint32_t offset = offset_of(address);
  if (offset > kSharedBytes || offset + bytes > kSharedBytes) fail("shared address %u", address);
  const uint32_t unit = bytes % 16 == 0 ? 16 : bytes % 8 == 0 ? 8 : bytes % 4 == 0 ? 4 : 1;
  if (address % unit != 0) fail("shared address %u, misaligned for %u bytes", address, bytes);
  return block->shared + offset;
}

thread_local const Act* acting;
thread_local bool acting_writes;

const Act& own_act() { return running->home->races.act_of_warp(running->warp); }

// A copy that the thread asks for, of a barrier or not.
std::shared_ptr<const Act> copy_act(uint32_t barrier) {
  if (!finds_races) return nullptr;
  return std::make_shared<const Act>(running->home->races.copy_for(running->warp, barrier));
}

Change change_of(const char* place, const void* x, uint32_t bytes) {
  static const char zeros[16] = {};
  if (std::memcmp(place, x, bytes) == 0) return Change::kNone;
  return bytes == 16 && std::memcmp(x, zeros, 16) == 0 ? Change::kClears : Change::kOther;
}

}  // namespace

Acting::Acting(const Act* act, bool writes) {
  acting = finds_races ? act : nullptr;
  acting_writes = writes;
}

Acting::~Acting() { acting = nullptr; }

void check_shared(uint32_t address, uint32_t bytes) { at(address, bytes); }

const char* shared(uint32_t address, uint32_t bytes) {
  const char* place = at(address, bytes);
  if (finds_races) block->races.read(own_act(), offset_of(address), bytes);
  return place;
}

void store(uint32_t address, const void* x, uint32_t bytes) {
  char* place = at(address, bytes);
  const uint32_t chunk = offset_of(address) / 16;
  block->unfenced[chunk] = true;
  running->unfenced.push_back(chunk);
  if (finds_races) {
    block->races.write(own_act(), offset_of(address), bytes, change_of(place, x, bytes));
  }
  std::memcpy(place, x, bytes);
}

void fence_async() {
  for (const uint32_t chunk : running->unfenced) block->unfenced[chunk] = false;
  running->unfenced.clear();
}

char* engine_place(uint32_t address, uint32_t bytes) {
  char* place = at(address, bytes);
  const uint32_t first = offset_of(address) / 16;
  for (uint32_t chunk = first; chunk <= first + (bytes - 1) / 16; ++chunk) {
    if (block->unfenced[chunk]) {
      fail("shared address %u meets an engine, without a fence after a thread wrote it", address);
    }
  }
  if (!finds_races || !acting) return place;
  if (acting_writes) {
    block->races.write(*acting, offset_of(address), bytes, Change::kOther);
  } else {
    block->races.read(*acting, offset_of(address), bytes);
  }
  return place;
}

void engine_reads(const void* from, size_t bytes) { touch(acting, from, bytes, Does::kRead); }

void engine_writes(void* to, const void* from, size_t bytes) {
  touch(acting, to, bytes, Does::kWrite);
  std::memcpy(to, from, bytes);
}

void engine_adds(float* to, const void* from, size_t count) {
  touch(acting, to, 4 * count, Does::kAdd);
  for (size_t n = 0; n < count; ++n) {
    float x;
    std::memcpy(&x, static_cast<const char*>(from) + 4 * n, 4);
    to[n] += x;
  }
}

// ---- barriers in shared memory

namespace {

// The 8 bytes of a barrier in shared memory.
struct Mbarrier {
  uint16_t count, pending;
  int32_t bytes : 31;
  uint32_t phase : 1;

  void settle() {
    if (pending != 0 || bytes != 0) return;
    pending = count;
    phase ^= 1;
  }
};
static_assert(sizeof(Mbarrier) == 8, "mbarrier");

Mbarrier& mbarrier_at(uint32_t barrier) {
  return *reinterpret_cast<Mbarrier*>(at(barrier, sizeof(Mbarrier)));
}

// After an arrival, or bytes of the act.
void settle(uint32_t barrier, const Act* act) {
  Mbarrier& b = mbarrier_at(barrier);
  const uint32_t phase = b.phase;
  b.settle();
  if (!finds_races) return;
  Meeting& meeting = block->mbarriers[barrier];
  act ? meeting.arrive(*act) : meeting.arrive();
  if (b.phase != phase) meeting.complete();
}

}  // namespace

void mbarrier_init(uint32_t barrier, uint32_t count) {
  mbarrier_at(barrier) = {static_cast<uint16_t>(count), static_cast<uint16_t>(count), 0, 0};
  block->mbarriers.erase(barrier);
}

void mbarrier_arrive(uint32_t barrier, uint32_t bytes) {
  Mbarrier& b = mbarrier_at(barrier);
  if (b.pending == 0) fail("mbarrier %u has more than %d arrivals", barrier, b.count);
  b.bytes += static_cast<int32_t>(bytes);
  --b.pending;
  settle(barrier, nullptr);
}

void mbarrier_wait(uint32_t barrier, uint32_t parity) {
  const Mbarrier& b = mbarrier_at(barrier);
  wait_until("mbarrier", barrier, [&b, parity] { return b.phase != parity; });
  if (finds_races) block->mbarriers[barrier].leave();
}

bool mbarrier_test(uint32_t barrier, uint32_t parity) {
  if (mbarrier_at(barrier).phase == parity) return false;
  mbarrier_wait(barrier, parity);
  return true;
}

// ---- the cluster

uint32_t mapa(uint32_t address, uint32_t rank) { return (address & kOffset) | (rank + 1) << 24; }

namespace {

// For a time, the block of a remote address is at work in place of this one.
struct Visit {
  Block* const before = block;
  uint32_t address;

  explicit Visit(uint32_t remote) {
    const uint32_t rank = remote >> 24;
    if (rank == 0 || rank > block->cluster->blocks.size()) fail("remote address %x", remote);
    block = block->cluster->blocks[rank - 1];
    address = own_address(remote);
    if (block->threads_live == 0) fail("a block of the cluster that has ended is written to");
  }
  ~Visit() { block = before; }
};

void count_bytes(uint32_t barrier, uint32_t bytes, const Act* act) {
  mbarrier_at(barrier).bytes -= static_cast<int32_t>(bytes);
  settle(barrier, act);
}

void write(const std::function<void()>& copy, const Act* act) {
  const Acting writing(act, true);
  copy();
}

// Bytes that have left this block.
void deliver(uint32_t to, const std::vector<char>& data, uint32_t barrier, const Act* act) {
  const uint32_t bytes = static_cast<uint32_t>(data.size());
  {
    const Visit there(to);
    const Acting writing(act, true);
    std::memcpy(engine_place(there.address, bytes), data.data(), bytes);
  }
  const Visit there(barrier);
  count_bytes(there.address, bytes, act);
}

}  // namespace

void mbarrier_arrive_remote(uint32_t barrier) {
  const Visit there(barrier);
  mbarrier_arrive(there.address, 0);
}

void st_async(uint32_t to, uint32_t x, uint32_t barrier) {
  std::vector<char> data(sizeof x);
  std::memcpy(data.data(), &x, sizeof x);
  const auto act = copy_act(barrier);
  // It is read at once: the block may end before it arrives.
  block->transfers.push_back({{[] {}, [=] { deliver(to, data, barrier, act.get()); }}, 1});
}

void engine_send(uint32_t to, uint32_t from, uint32_t bytes, uint32_t barrier) {
  const auto data = std::make_shared<std::vector<char>>(bytes);
  const auto act = copy_act(barrier);
  block->transfers.push_back({{[=] {
                                 const Acting reading(act.get(), false);
                                 std::memcpy(data->data(), engine_place(from, bytes), bytes);
                               },
                               [=] { deliver(to, *data, barrier, act.get()); }},
                              0});
}

void engine_multicast(uint32_t ranks, uint32_t barrier, uint32_t bytes,
                      std::function<void()> copy) {
  for (uint32_t rank = 0; ranks >> rank != 0; ++rank) {
    if (!(ranks >> rank & 1)) continue;
    const auto act = copy_act(mapa(barrier, rank));
    block->transfers.push_back({{[=] {
                                  const Visit there(mapa(barrier, rank));
                                  write(copy, act.get());
                                  count_bytes(there.address, bytes, act.get());
                                }},
                                0});
  }
}

// ---- cp.async

void copy_async(uint32_t to, const void* from, uint32_t bytes) {
  char* place = at(to, bytes);
  if (reinterpret_cast<uintptr_t>(from) % bytes != 0) fail("cp.async from misaligned %p", from);
  auto copy = [=] {
    if (from) {
      std::memcpy(place, from, bytes);
    } else {
      std::memset(place, 0, bytes);
    }
  };
  const auto mark = [=] {
    if (!finds_races) return;
    block->races.write(own_act(), offset_of(to), bytes, Change::kOther);
    if (from) touch(from, bytes, Does::kRead);
  };
  mark();
  // Others may see it when this thread has waited for it, not before.
  const bool now = draw(2);
  if (now) copy();
  if (now && !finds_races) return;
  running->copies.back().push_back([=] {
    if (!now) copy();
    mark();
  });
}

void copy_commit() { running->copies.emplace_back(); }

void copy_wait(int pending) {
  // The last one is not committed.
  while (static_cast<int>(running->copies.size()) - 1 > pending) {
    for (const auto& copy : running->copies.front()) copy();
    running->copies.pop_front();
  }
}

// ---- the copy engine

void engine_load(uint32_t barrier, uint32_t bytes, std::function<void()> copy) {
  const auto act = copy_act(barrier);
  block->transfers.push_back({{[=] {
                                write(copy, act.get());
                                count_bytes(barrier, bytes, act.get());
                              }},
                              0});
}

void engine_store(uint32_t from, uint32_t bytes, std::function<void(const char*)> write) {
  const std::shared_ptr<StoreGroup> group = running->open_store;
  const auto data = std::make_shared<std::vector<char>>(bytes);
  ++group->reading;
  ++group->writing;
  const auto reads = copy_act(0), writes = copy_act(0);
  if (finds_races) {
    group->reads.push_back(reads);
    group->writes.push_back(writes);
  }
  block->transfers.push_back({{[=] {
                                 const Acting reading(reads.get(), false);
                                 std::memcpy(data->data(), engine_place(from, bytes), bytes);
                                 --group->reading;
                               },
                               [=] {
                                 const Acting writing(writes.get(), true);
                                 write(data->data());
                                 --group->writing;
                               }},
                              0});
}

void engine_commit() {
  running->stores.push_back(running->open_store);
  running->open_store = std::make_shared<StoreGroup>();
}

void engine_wait(int pending, bool until_written) {
  const size_t count = running->stores.size();
  for (size_t n = 0; n + pending < count; ++n) {
    const std::shared_ptr<StoreGroup> group = running->stores[n];
    wait_until(until_written ? "stores to be done" : "stores to have read", n,
               [=] { return (until_written ? group->writing : group->reading) == 0; });
    Clock& known = block->races.of_warp(running->warp);
    for (const auto& act : group->reads) known.join(act->known);
    group->reads.clear();
    if (!until_written) continue;
    for (const auto& act : group->writes) known.join(act->known);
  }
  // Not those that it has yet to wait for, even if they are done.
  while (until_written && running->stores.size() > static_cast<size_t>(pending)) {
    running->stores.pop_front();
  }
}

}  // namespace emulator
