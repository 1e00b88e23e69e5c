// Hopper backward with a block mask: which kernels take its blocks, workspace and launch of what
// finds the tiles that it does not hide.
#pragma once

#include "core/bump_allocator.h"
#include "cuda/host/kernel_setup.h"
#include "cuda/kernels/sm90/table.h"

namespace flashattn::cuda::sm90 {

// Whether the kernel takes the problem's blocks: see BackwardEntry::whole_blocks.
bool takes_blocks(const BackwardEntry& entry, const Problem& problem);

// Whether the kernel's numbers of Q tiles, see kCoordHead, have bits enough for a shape.
bool fits_q_coord(const BackwardEntry& entry, const Problem& problem, const Shape& shape);

cudaError_t preload_block_mask();

// Sets the params' lists of Q tiles and block_mask, whose arrays it takes from the workspace. All
// other params except pointers are set.
void take_q_tile_lists(const BackwardEntry& entry, int32_t multiprocessors, BackwardParams* params,
                       WorkspaceAllocator* workspace);

// Launches the kernel that fills block_mask, if there is a block mask.
cudaError_t launch_block_mask(const BackwardParams& params, cudaStream_t stream);

}  // namespace flashattn::cuda::sm90
