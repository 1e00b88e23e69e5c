/* Runs the decoder of model.h for several sequences at once: attention by libflashattn, on the CPU
 * or a GPU, over a paged KV cache; the other layers in fp32 on the host. */
#ifndef EXAMPLES_ENGINE_H
#define EXAMPLES_ENGINE_H

#include "model.h"

typedef struct decode_engine decode_engine;

typedef struct {
  int32_t sequences;
  int32_t capacity; /* tokens of a sequence at most */
  int32_t tokens;   /* of a step at most, all sequences together */
  int32_t pages; /* in the pool of each layer, PAGE_SIZE tokens each, which the sequences share */
} engine_limits;

enum { PAGE_SIZE = 16 };

/* Durations, summed over the steps since the last call of engine_take_times. */
typedef struct {
  double attention; /* seconds; on a GPU the copies of q, k, v and o included */
  double rest;
} engine_times;

/* device and weights must outlive it. NULL, with a message, on failure. */
decode_engine* engine_create(compute_device* device, const model* weights, engine_limits limits);
void engine_destroy(decode_engine* engine);

/* Appends tokens [cu_seqlens[b], cu_seqlens[b + 1]), at least one, to each sequence b: a prompt, or
 * one token, or a part of a prompt, or all of these side by side. Writes the logits (sequences,
 * VOCABULARY) of what follows. Returns whether it succeeded, and prints why not; tokens for which
 * there is no room are refused before anything is written. */
int engine_step(decode_engine* engine, const int32_t* tokens, const int32_t* cu_seqlens,
                float* logits);

engine_times engine_take_times(decode_engine* engine);
int32_t engine_pages_in_use(const decode_engine* engine);

/* Describes the kernel of a step of one token a sequence; its texts live as long as the engine.
 * Returns whether it succeeded, and prints why not. */
int engine_plan_info(const decode_engine* engine, flashattn_plan_properties* properties);

#endif
