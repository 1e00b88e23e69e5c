#include "threaded.h"

#include <stdlib.h>
#include <string.h>

#include "flashattn.h"

enum {
  HEADS = 4,
  SEQ = 72,
  DIM = 32,
  SIZE = SEQ * HEADS * DIM,
  RESULTS = 4 * SIZE + HEADS * SEQ /* o, dq, dk, dv, lse */
};

int threaded_run(uint64_t *digest) {
  flashattn_desc desc = {.struct_size = sizeof desc};
  flashattn_forward_args forward = {.struct_size = sizeof forward};
  flashattn_backward_args backward = {.struct_size = sizeof backward};
  flashattn_plan *plan = NULL;
  desc.ops = FLASHATTN_OP_FORWARD | FLASHATTN_OP_BACKWARD;
  desc.dtype = FLASHATTN_DTYPE_F32;
  desc.heads_q = HEADS;
  desc.dim_qk = DIM;
  desc.mask = FLASHATTN_MASK_CAUSAL;
  desc.features = FLASHATTN_FEATURE_LSE;
  desc.threads = THREADED;
  forward.shape.batch = 1;
  forward.shape.seqlen_q = forward.shape.seqlen_kv = SEQ;
  if (flashattn_plan_create(&desc, &plan) != FLASHATTN_OK) return 0;
  int64_t bytes = 0, more = 0;
  flashattn_workspace_size(plan, FLASHATTN_OP_FORWARD, &forward.shape, &bytes);
  flashattn_workspace_size(plan, FLASHATTN_OP_BACKWARD, &forward.shape, &more);
  if (more > bytes) bytes = more;
  float *inputs = malloc(4 * SIZE * sizeof *inputs);
  float *results = malloc(RESULTS * sizeof *results);
  void *workspace = malloc((size_t)bytes + 1);
  int good = inputs && results && workspace;
  if (good) {
    uint32_t seed = 1;
    for (int n = 0; n < 4 * SIZE; ++n) {
      seed = seed * 1664525u + 1013904223u;
      inputs[n] = (float)(seed >> 8) / 8388608.0f - 1.0f;
    }
    memset(results, 0xFF, RESULTS * sizeof *results);
    forward.inputs.q.data = inputs;
    forward.inputs.k.data = inputs + SIZE;
    forward.inputs.v.data = inputs + 2 * SIZE;
    forward.o.data = results;
    forward.lse = results + 4 * SIZE;
    backward.shape = forward.shape;
    backward.inputs = forward.inputs;
    backward.o = forward.o;
    backward.lse = forward.lse;
    backward.dout.data = inputs + 3 * SIZE;
    backward.dq.data = results + SIZE;
    backward.dk.data = results + 2 * SIZE;
    backward.dv.data = results + 3 * SIZE;
    good = flashattn_forward(plan, &forward, workspace, bytes, NULL) == FLASHATTN_OK &&
           flashattn_backward(plan, &backward, workspace, bytes, NULL) == FLASHATTN_OK;
    *digest = 14695981039346656037u; /* FNV-1a */
    for (int n = 0; n < RESULTS; ++n) {
      uint32_t bits;
      memcpy(&bits, results + n, sizeof bits);
      *digest = (*digest ^ bits) * 1099511628211u;
      good &= results[n] == results[n]; /* written */
    }
  }
  free(workspace);
  free(results);
  free(inputs);
  flashattn_plan_destroy(plan);
  return good;
}
