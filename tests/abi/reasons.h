/* Written by bindings/generate.py from include/flashattn.h. Do not edit.
 *
 * Numbers, so that an older header, which lacks the newest names, does as well. */
static const struct {
  const char *name;
  int32_t value;
} reasons[] = {
    {"NONE", 0},
    {"NO_CUDA_BUILD", 1},
    {"NO_DEVICE", 2},
    {"DRIVER_TOO_OLD", 3},
    {"ARCH", 4},
    {"DTYPE", 5},
    {"DTYPE_MIX", 6},
    {"HEAD_DIM_MULTIPLE", 7},
    {"HEAD_DIM_MAX", 8},
    {"HEAD_DIM_PAIR", 9},
    {"HEAD_RATIO", 10},
    {"LAYOUT", 11},
    {"PAGE_SIZE", 12},
    {"MASK_COMBINATION", 13},
    {"BIAS", 14},
    {"DROPOUT", 15},
    {"SINK", 16},
    {"SOFTCAP", 17},
    {"DETERMINISM", 18},
    {"WORKSPACE_LIMIT", 19},
    {"SHARED_MEMORY", 20},
    {"CPU_ISA", 21},
    {"NOT_IN_THIS_BUILD", 22},
    {"OP", 23},
    {"NULL_POINTER", 24},
    {"MISALIGNED", 25},
    {"OVERLAP", 26},
    {"SIZE", 27},
    {"STRIDE", 28},
    {"VALUE", 29},
    {"RESERVED", 30},
    {"STRUCT_SIZE", 31},
    {"LENGTHS", 32},
    {"STREAM", 33},
};
