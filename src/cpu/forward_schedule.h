// How the forward pass is divided into tasks. Pure: results do not depend on it.
#pragma once

#include "cpu/job.h"

namespace flashattn::cpu {

// No Q block has fewer rows, unless there are no more.
inline int32_t min_block_rows(const Tiling& tiling) { return 2 * tiling.tile_q; }

// Chooses the Q blocks of a job whose other members are set: large enough to share packed keys,
// small enough to occupy job->threads to the end. shares_tiles: all Q blocks share packed tiles.
void choose_q_blocks(bool shares_tiles, ForwardJob* job);

}  // namespace flashattn::cpu
