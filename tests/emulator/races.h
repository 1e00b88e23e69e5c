// Finds accesses to memory that nothing puts in an order, in whichever order they came (FastTrack:
// Flanagan and Freund 2009). Who touches it: warps, whose lanes count as one; products of
// warpgroups; copies by the engine. Of shared memory it sees what goes through emulator.h, not what
// a kernel does through a pointer; of global memory, see global.h, all.
//
// FLASHATTN_EMULATOR_RACES=1: look for them.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

namespace emulator {

extern const bool finds_races;

// Actors of a block: loads of warps; products of warpgroups, which add up over the rows of a matrix
// or take each row for itself; all else that warps do; and chains of copies, each of which starts
// when its predecessor is known to be done.
constexpr int kLoads = 0, kSums = 32, kByRow = 36, kWarps = 40, kCopies = 72, kActors = 104;

constexpr int kMostBlocks = 16;  // of a cluster

// A vector clock: the latest known time of each actor of a cluster. Actors at the end of which
// nothing is known may be missing.
struct Times {
  std::vector<uint32_t> time;

  void join(const Times& other);
  bool knows(int actor, uint32_t when) const {
    const size_t n = static_cast<size_t>(actor);
    return when <= (n < time.size() ? time[n] : 0);
  }
};

// A cluster of a launch. 0: of none.
using Home = uint64_t;
constexpr Home home_of(uint32_t launch, uint32_t cluster) { return Home{launch} << 32 | cluster; }

// What is known to have been done: by the cluster that is home, by others, and by launches up to
// one that have ended.
struct Clock : Times {
  Home home = 0;
  uint32_t ended = 0;
  std::map<Home, std::shared_ptr<const Times>> others;

  void join(const Clock& other);
  void meet(const Clock& other);  // of the own cluster, only what both know
  using Times::knows;
  bool knows(Home whose, int actor, uint32_t when) const;

 private:
  void join(Home whose, const std::shared_ptr<const Times>& other);
};

// NULL: nothing.
using SharedClock = std::shared_ptr<const Clock>;
void join(SharedClock& to, const SharedClock& other);

// What fences of a warp, and of those it has met, have done with its knowledge.
struct Fenced {
  SharedClock released;  // who sees what it stores relaxed, and then fences, knows that
  SharedClock seen;      // by what it loaded relaxed, known after a fence
  SharedClock proxied;   // of global memory, what comes before all that the copy engine starts

  void join(const Fenced& other);
};

// What somebody does, and what has been done before for sure; that includes the act.
struct Act {
  int actor = 0;  // of the cluster
  uint32_t time = 0;
  Clock known;
  SharedClock proxied;  // of a copy
};

// What a store does to the bytes. kClears: 16 of them become 0.
enum class Change { kNone, kClears, kOther };

std::string name_of(int actor);  // of a cluster

// Of a block's shared memory.
class Races {
 public:
  // rank: of the block in its cluster of so many. bytes: of its shared memory. ended: launches
  // known to have.
  void begin(uint32_t rank, uint32_t cluster, uint32_t bytes, Home home, uint32_t ended);

  int actor(int n) const { return first_ + n; }
  Clock& of_warp(int warp) { return warps_[warp].known; }
  Fenced& fenced(int warp) { return fenced_[warp]; }
  const Act& act_of_warp(int warp) const { return warps_[warp]; }
  // What the warp does from now on is not known to those that have met it.
  void advance(int warp);
  // A copy by the engine, which a warp has asked for. Those of one barrier, if any, end together.
  Act copy_for(int warp, uint32_t barrier);

  // Of so many bytes from an offset on. Fails where another access is in no order with it.
  void read(const Act& act, uint32_t offset, uint32_t bytes);
  // A store that changes nothing is in order with all; who reads the bytes has to know of it or of
  // the store that made them. A product that takes each row for itself may read one before or after
  // it is cleared: nobody uses the result of such a row.
  void write(const Act& act, uint32_t offset, uint32_t bytes, Change change);

 private:
  struct Access {
    uint32_t time = 0;
    int32_t actor = 0;

    bool known(const Clock& clock) const { return clock.knows(actor, time); }
  };
  struct Word {
    Access written, written_again;
    Access filled;               // written, before it was cleared
    Access copied;               // read by a copy
    uint32_t read[kWarps] = {};  // by loads and products
  };

  struct Chain {
    uint32_t time = 0, barrier = 0;  // of the last copy
    int warp = 0;
  };

  [[noreturn]] void found(const Act& act, const char* does, uint32_t word, const char* did,
                          int other) const;

  int first_ = 0;
  Act warps_[kCopies - kWarps];
  Fenced fenced_[kCopies - kWarps];
  Chain chains_[kActors - kCopies];
  std::vector<Word> words_;
};

}  // namespace emulator
