// A GPU on the host, for tests: multiprocessors are threads of the machine, CUDA threads fibers on
// them. One goes on at a time: which multiprocessor, block, warp and lane is drawn at random, and
// so is the order in which blocks start. Copies, products of warpgroups and stores happen as late
// or as early as the rules allow, so that a missing wait gives a wrong result here too. A block in
// which nobody can go on says who waits for what, and aborts.
//
// It models shared memory, its barriers, and the fence between its two proxies; the copy engine and
// tensor maps, which must have been encoded; clusters of up to 16 blocks; kernels in the order in
// which they are enqueued, of which one that starts early must wait for those before. With
// FLASHATTN_EMULATOR_RACES=1 it finds accesses that nothing puts in an order: to shared memory, see
// races.h; to global memory, see global.h, where releases, acquires and fences of the device, the
// fence of the global proxy, and what kernels know of each other do.
//
// It does not model these. A cluster's blocks are one thread of the machine and always find room;
// every wait at an mbarrier acquires for the cluster. Kernels do not overlap: one that starts early
// finds what the one before has stored, and races say that it might not; without them only a kernel
// that never waits fails, and griddepcontrol.launch_dependents has no effect. Nor do streams, or
// copies by the host. Flags have their last value at once. Lanes of a warp are one actor: races
// among them are not found; nor are those through a pointer into shared memory, all of those of
// more copies at once than there are actors, and all where many touch a word. There are no caches:
// that what ld.global.nc loads is not written meanwhile, only a race tells. Fences and flags of a
// block or of the system do not occur. Where everybody asks for a flag that nobody will store, it
// asks for ever.
//
// FLASHATTN_EMULATOR_SEED: another order, the same for the same seed and, under pytest, test. A
// failure names it.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <functional>

namespace emulator {

// ---- the device: what launches look like to it

constexpr int kMultiprocessors = 4;  // two pairs
constexpr int kSharedBytes = 227 * 1024;

// Starts a kernel on a stream, or adds it to the graph that the stream records.
void enqueue(cudaStream_t stream, std::function<void()> work);
// What starting a kernel fails with, or cudaSuccess. Aborts where no plan has made it ready.
cudaError_t start_error(const void* kernel);
// Runs a grid to its end. cluster: so many neighbours run together, on one thread of the machine.
// early: by the attribute of programmatic stream serialization.
void run_grid(dim3 grid, int threads, int shared_bytes, const std::function<void()>& kernel,
              int cluster = 1, bool early = false);

// ---- what a CUDA thread may do

struct Place {
  uint3 thread, block;
  dim3 threads, blocks;
};
const Place& place();
inline uint32_t lane() { return place().thread.x % 32; }

// The words that the lanes of the warp give, by lane.
struct Words {
  uint32_t word[8];
};
const Words* exchange(const Words& mine);
void warp_sync();
// mma.sync of 16 x 8 x 16: d += a b.
void multiply_warp(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, bool bf16);
void yield();  // for loops that wait for other blocks

// Named barriers of the block. threads: how many arrive; 0: all that still run.
void barrier(int number, int threads, bool wait);

// ---- global memory, beyond plain loads and stores

enum class Order { kRelaxed, kAcquire, kRelease, kBoth };

// Before a number is loaded, stored or changed as one by the thread.
void before_load(const void* at, size_t bytes, Order order);
void before_store(const void* at, size_t bytes, Order order);
void before_change(const void* at, size_t bytes, Order order);

// The compiler does not tell of these.
#define UNTOLD __attribute__((no_sanitize_thread))

template <class T>
UNTOLD T load_as_one(const T* from, Order order) {
  before_load(from, sizeof(T), order);
  return *const_cast<const volatile T*>(from);
}

template <class T>
UNTOLD void store_as_one(T* to, T x, Order order) {
  before_store(to, sizeof(T), order);
  *const_cast<volatile T*>(to) = x;
}

int32_t fetch_add(int32_t* to, int32_t x, Order order);
int32_t fetch_or(int32_t* to, int32_t x, Order order);
void add(float* to, float x);  // relaxed

void fence_gpu();
void fence_async_global();  // of the global proxy
void griddep_wait();        // griddepcontrol.wait

// By the copy engine, while it is at work on one of the copies below.
void engine_reads(const void* from, size_t bytes);
void engine_writes(void* to, const void* from, size_t bytes);
void engine_adds(float* to, const void* from, size_t count);

// ---- shared memory, by its 32-bit addresses

char* dynamic_shared();
uint32_t shared_address(const void* p);
uint32_t own_address(uint32_t address);               // the same place in this block of the cluster
void check_shared(uint32_t address, uint32_t bytes);  // fails where that is not this block's
const char* shared(uint32_t address, uint32_t bytes);  // to be read by this thread
// The copy engine and products may touch what this thread writes after fence_async(), of the shared
// proxy.
void store(uint32_t address, const void* x, uint32_t bytes);
void fence_async();
char* engine_place(uint32_t address, uint32_t bytes);  // to be touched by them

template <class T>
T load(uint32_t address) {
  return *reinterpret_cast<const T*>(shared(address, sizeof(T)));
}

template <class T>
void store(uint32_t address, T x) {
  store(address, &x, sizeof x);
}

void mbarrier_init(uint32_t barrier, uint32_t count);
void mbarrier_arrive(uint32_t barrier, uint32_t bytes);
void mbarrier_wait(uint32_t barrier, uint32_t parity);
bool mbarrier_test(uint32_t barrier, uint32_t parity);

// ---- the cluster

uint32_t cluster_rank();
void cluster_arrive(bool releases = true);
void cluster_wait();
// The address in another block of the cluster, for these alone.
uint32_t mapa(uint32_t address, uint32_t rank);
void mbarrier_arrive_remote(uint32_t barrier);
void st_async(uint32_t to, uint32_t x, uint32_t barrier);
void engine_send(uint32_t to, uint32_t from, uint32_t bytes, uint32_t barrier);

// ---- copies

// cp.async; from: NULL for zeros.
void copy_async(uint32_t to, const void* from, uint32_t bytes);
void copy_commit();
void copy_wait(int pending);

// The copy engine. A load tells the barrier of its bytes; stores come in groups.
void engine_load(uint32_t barrier, uint32_t bytes, std::function<void()> copy);
// The same in each block of the cluster whose bit is set in `ranks`.
void engine_multicast(uint32_t ranks, uint32_t barrier, uint32_t bytes, std::function<void()> copy);
void engine_store(uint32_t from, uint32_t bytes, std::function<void(const char*)> write);
void engine_commit();
void engine_wait(int pending, bool until_written);

// ---- products of a warpgroup: d (64 x columns) += a b

enum class Number { kF16, kBf16, kE4m3 };

struct Product {
  float* d;           // this thread's
  const uint32_t* a;  // this thread's, or NULL: in shared memory
  uint64_t a_matrix, b_matrix;
  int columns;
  Number type;
  bool transpose_a, transpose_b, accumulate;
};
void multiply_fence();
void multiply(const Product& product);
void multiply_commit();
void multiply_wait(int pending);

int compute_capability();  // of the device: 90 is that of an H100
[[noreturn]] void fail(const char* format, ...) __attribute__((format(printf, 1, 2)));

// ---- numbers

float as_float(uint32_t bits, bool bf16);  // of 16
float e4m3_to_float(uint8_t bits);
uint8_t float_to_e4m3(float x);  // to nearest even, saturated

}  // namespace emulator
