// The rows of table.txt for large heads.
#pragma once

#include "cuda/sm90/backward_entry.cuh"
