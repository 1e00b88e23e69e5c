// The rows of table.txt for many queries.
#pragma once

#include "cuda/sm90/backward_entry.cuh"
