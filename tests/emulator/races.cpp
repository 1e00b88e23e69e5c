#include "races.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "block.h"

namespace emulator {
namespace {

bool asked() {
  const char* text = std::getenv("FLASHATTN_EMULATOR_RACES");
  return text && std::strcmp(text, "1") == 0;
}

}  // namespace

std::string name_of(int actor) {
  const int n = actor % kActors;
  const std::string who = n < kSums    ? "warp " + std::to_string(n - kLoads)
                          : n < kWarps ? "a product of warpgroup " + std::to_string((n - kSums) % 4)
                          : n < kCopies ? "warp " + std::to_string(n - kWarps)
                                        : "a copy";
  return who + " of block " + std::to_string(actor / kActors) + " of the cluster";
}

const bool finds_races = asked();

void Times::join(const Times& other) {
  if (time.size() < other.time.size()) time.resize(other.time.size());
  for (size_t n = 0; n < other.time.size(); ++n) time[n] = std::max(time[n], other.time[n]);
}

void Clock::join(Home whose, const std::shared_ptr<const Times>& other) {
  std::shared_ptr<const Times>& mine = others[whose];
  if (!mine) {
    mine = other;
  } else if (mine != other) {
    const auto both = std::make_shared<Times>(*mine);
    both->join(*other);
    mine = both;
  }
}

void Clock::join(const Clock& other) {
  if (other.home == 0) return;
  if (home == 0) {
    *this = other;
    return;
  }
  ended = std::max(ended, other.ended);
  if (other.home == home) {
    Times::join(other);
  } else {
    join(other.home, std::make_shared<const Times>(other));
  }
  for (const auto& [whose, times] : other.others) {
    if (whose == home) {
      Times::join(*times);
    } else {
      join(whose, times);
    }
  }
}

bool Clock::knows(Home whose, int actor, uint32_t when) const {
  if (whose >> 32 <= ended) return true;
  if (whose == home) return knows(actor, when);
  const auto found = others.find(whose);
  return found != others.end() && found->second->knows(actor, when);
}

void join(SharedClock& to, const SharedClock& other) {
  if (!other || to == other) return;
  if (!to) {
    to = other;
    return;
  }
  const auto both = std::make_shared<Clock>(*to);
  both->join(*other);
  to = both;
}

void Fenced::join(const Fenced& other) {
  emulator::join(released, other.released);
  emulator::join(seen, other.seen);
  emulator::join(proxied, other.proxied);
}

void Clock::meet(const Clock& other) {
  for (size_t n = 0; n < time.size(); ++n) time[n] = std::min(time[n], other.time[n]);
}

void Races::begin(uint32_t rank, uint32_t cluster, uint32_t bytes, Home home, uint32_t ended) {
  first_ = static_cast<int>(rank) * kActors;
  Clock first;
  first.time.resize(cluster * kActors);
  first.home = home;
  first.ended = ended;
  const SharedClock shared = std::make_shared<const Clock>(first);
  for (int n = 0; n < kCopies - kWarps; ++n) {
    warps_[n] = {actor(kWarps + n), 0, first, nullptr};
    fenced_[n] = {nullptr, nullptr, shared};
    advance(n);
  }
  for (Chain& chain : chains_) chain = {};
  words_.resize(kSharedBytes / 4);
  std::fill(words_.begin(), words_.begin() + (bytes + 3) / 4, Word());
}

void Races::advance(int warp) {
  Act& act = warps_[warp];
  ++act.time;
  act.known.time[actor(kLoads + warp)] = act.known.time[actor(kWarps + warp)] = act.time;
}

Act Races::copy_for(int warp, uint32_t barrier) {
  Act act{0, 0, of_warp(warp), fenced(warp).proxied};
  advance(warp);
  constexpr int kChains = kActors - kCopies;
  int free = kChains - 1;  // takes more where all are at work: of those some races are not seen
  for (int n = kChains - 1; n >= 0; --n) {
    Chain& chain = chains_[n];
    act.actor = actor(kCopies + n);
    const bool at_work = chain.time > act.known.time[act.actor];
    if (at_work && barrier && chain.barrier == barrier && chain.warp == warp) {
      act.time = act.known.time[act.actor] = chain.time;
      return act;
    }
    if (!at_work) free = n;
  }
  act.actor = actor(kCopies + free);
  act.time = act.known.time[act.actor] = ++chains_[free].time;
  chains_[free].barrier = barrier;
  chains_[free].warp = warp;
  return act;
}

void Races::found(const Act& act, const char* does, uint32_t word, const char* did,
                  int other) const {
  fail("a race: %s %s shared address %u, which %s %s; nothing puts these in an order",
       name_of(act.actor).c_str(), does, kSharedBase + 4 * word, name_of(other).c_str(), did);
}

void Races::read(const Act& act, uint32_t offset, uint32_t bytes) {
  const int own = act.actor - first_, reader = own < kWarps ? own : own - kWarps + kLoads;
  const bool by_rows = own >= kByRow && own < kWarps;
  for (uint32_t n = offset / 4; n <= (offset + bytes - 1) / 4; ++n) {
    Word& word = words_[n];
    const auto follows = [&act](const Access& a) { return a.time != 0 && a.known(act.known); };
    if (!word.written.known(act.known) && !follows(word.written_again) &&
        !(by_rows && follows(word.filled))) {
      found(act, "reads", n, "wrote", word.written.actor);
    }
    if (own < kCopies) {
      word.read[reader] = act.time;
    } else {
      word.copied = {act.time, act.actor};
    }
  }
}

void Races::write(const Act& act, uint32_t offset, uint32_t bytes, Change change) {
  const int readers = change == Change::kClears ? kByRow : kWarps;
  for (uint32_t n = offset / 4; n <= (offset + bytes - 1) / 4; ++n) {
    Word& word = words_[n];
    if (change == Change::kNone) {
      if (word.written_again.time == 0) {
        word.written_again = {act.time, act.actor};
      } else if (!word.written.known(act.known) && !word.written_again.known(act.known)) {
        word.written = {};  // a third: whoever reads is taken to know of one
      }
      continue;
    }
    for (const Access& before : {word.written, word.written_again}) {
      if (!before.known(act.known)) found(act, "writes", n, "wrote", before.actor);
    }
    if (!word.copied.known(act.known)) found(act, "writes", n, "read", word.copied.actor);
    const uint32_t* known = act.known.time.data() + first_;
    for (int a = 0; a < readers; ++a) {
      if (word.read[a] > known[a]) found(act, "writes", n, "read", first_ + a);
    }
    if (change != Change::kClears) {
      word.filled = {};
    } else if (word.filled.time == 0) {
      word.filled = word.written;
    }
    word.written = {act.time, act.actor};
    word.written_again = {};
  }
}

}  // namespace emulator
