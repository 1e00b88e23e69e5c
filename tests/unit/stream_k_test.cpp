// Items cut into shares: every step of every item is in one piece, no two pieces have one number,
// those of an item follow each other, and no ticket has more than its share.
#include "cuda/host/schedule/stream_k.h"

#include <climits>
#include <initializer_list>
#include <vector>

#include "check.h"

using namespace flashattn;

namespace {

bool right(int32_t items, int32_t steps, int32_t workers, int32_t cost, int32_t least = 0) {
  const StreamK cut = StreamK::of(items, steps, workers, cost, least);
  if (cut.tickets == items) return cut.whole == items && cut.items_cut() == 0 && !cut.pieces();
  if (cut.whole % workers != 0 || cut.items_cut() != items - cut.whole) return false;
  if (cut.tickets - cut.whole > workers || cut.share.divisor < cost) return false;
  std::vector<int32_t> done(static_cast<size_t>(cut.items_cut()));  // steps
  std::vector<int32_t> found(done.size());                          // pieces
  int32_t last = -1;                                                // number of a piece
  for (int32_t ticket = cut.whole; ticket < cut.tickets; ++ticket) {
    if (!cut.cuts(ticket)) return false;
    int32_t length = 0;
    bool more = true;
    for (int second = 0; second < 2 && more; ++second) {
      const StreamK::Piece piece = cut.piece(ticket, second != 0);
      const auto n = static_cast<size_t>(piece.cut);
      if (n >= done.size() || piece.item != cut.whole + piece.cut) return false;
      if (piece.begin != done[n] || piece.begin >= piece.end || piece.end > steps) return false;
      if (piece.number <= last || piece.number != piece.first + found[n]) return false;
      last = piece.number;
      length += piece.end - piece.begin;
      done[n] = piece.end;
      if ((++found[n] == piece.count) != (done[n] == steps)) return false;
      more = piece.more;
    }
    if (more || length > cut.share.divisor) return false;
  }
  for (const int32_t n : done) {
    if (n != steps) return false;
  }
  return last < cut.pieces();
}

}  // namespace

int main() {
  for (int32_t items = 0; items <= 40; ++items) {
    for (int32_t steps = 1; steps <= 30; ++steps) {
      for (const int32_t workers : {1, 2, 5, 7, 16, 132}) {
        for (const int32_t cost : {1, 2, 4}) CHECK(right(items, steps, workers, cost));
      }
    }
  }
  // 16k tokens, heads * dim = 2048, on 132 multiprocessors: 15.5 rounds of D = 128, 31.03 of 64.
  CHECK(StreamK::of(2048, 52, 132, 4, 12).share.divisor == 27);
  CHECK(StreamK::of(4096, 64, 132, 4, 12).share.divisor == 4);
  CHECK(StreamK::of(2048, 8, 132, 4, 0).tickets == 2048);  // too short
  CHECK(StreamK::of(2048, 16, 132, 4, 7).tickets > 2048 - 68);
  CHECK(StreamK::of(2048, 16, 132, 4, 12).tickets == 2048);  // too little saved
  CHECK(StreamK::of(100, 1000, 132, 4, 12).whole == 0);
  CHECK(right(131, INT32_MAX / 132, 132, 4) && right(131, INT32_MAX, 132, 4));
  CHECK(StreamK::of(5, 100, 0, 1, 0).tickets == 5);
  return check_report();
}
