/* A decoder that answers several users at once:  decode [cpu|cuda [TOKENS]]
 *
 * Prompts of different lengths are read in one packed step (prefill), TOKENS tokens are generated
 * for each, one a step; then every user says something more, which is appended to the cache, and as
 * many tokens follow. Weights are random, of a fixed seed: there is nothing to read in the tokens,
 * but greedy decoding must choose those that the same model in float64 (reference.c) chooses.
 *
 * Prints the speed, and how far the logits are from the reference. Exits with 0 if every token is
 * the reference's and the logits are as close as fp32 makes them. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine.h"

enum {
  SEQUENCES = 8,
  TURNS = 2,
  MAX_TOKENS = 1000 /* generated a turn */
};

#define MAX_DEVIATION 1e-3 /* of a logit; their standard deviation is about 1 */

static const int32_t kPromptTokens[TURNS][SEQUENCES] = {
    {1, 57, 7, 113, 33, 31, 17, 16},
    {5, 1, 19, 12, 17, 2, 33, 9},
};

typedef struct {
  int32_t generated; /* tokens a turn and sequence */
  int32_t *prompts[TURNS][SEQUENCES];
  int32_t *chosen; /* (TURNS, generated, SEQUENCES) */
  float *logits;   /* (TURNS, generated, SEQUENCES, VOCABULARY) */
} conversation;

static size_t place_of(const conversation *talk, int turn, int step, int b) {
  return ((size_t)turn * (size_t)talk->generated + (size_t)step) * SEQUENCES + (size_t)b;
}

static int create_conversation(conversation *talk, int32_t generated) {
  uint64_t state = 4;
  talk->generated = generated;
  for (int turn = 0; turn < TURNS; ++turn) {
    for (int b = 0; b < SEQUENCES; ++b) {
      const int32_t count = kPromptTokens[turn][b];
      int32_t *tokens = talk->prompts[turn][b] = allocate((size_t)count, sizeof *tokens);
      if (!tokens) return 0;
      for (int32_t n = 0; n < count; ++n) {
        tokens[n] = (int32_t)((random_number(&state) + 1.0f) / 2.0f * VOCABULARY);
      }
    }
  }
  const size_t places = place_of(talk, TURNS, 0, 0);
  talk->chosen = allocate(places, sizeof *talk->chosen);
  talk->logits = allocate(places * VOCABULARY, sizeof *talk->logits);
  return talk->chosen && talk->logits;
}

static void free_conversation(conversation *talk) {
  for (int n = 0; n < TURNS * SEQUENCES; ++n) free(talk->prompts[n / SEQUENCES][n % SEQUENCES]);
  free(talk->chosen);
  free(talk->logits);
}

/* ---- By the engine ---- */

static int32_t largest_of(const float *logits) {
  int32_t best = 0;
  for (int32_t n = 1; n < VOCABULARY; ++n) {
    if (logits[n] > logits[best]) best = n;
  }
  return best;
}

static int step(decode_engine *engine, conversation *talk, int turn, int n, const int32_t *tokens,
                const int32_t *cu_seqlens) {
  float *logits = talk->logits + place_of(talk, turn, n, 0) * VOCABULARY;
  if (!engine_step(engine, tokens, cu_seqlens, logits)) return 0;
  for (int b = 0; b < SEQUENCES; ++b) {
    talk->chosen[place_of(talk, turn, n, b)] = largest_of(logits + (size_t)b * VOCABULARY);
  }
  return 1;
}

/* Packs the last generated tokens and the prompts of a turn. Returns the number of tokens. */
static int32_t pack_prompts(const conversation *talk, int turn, int32_t *tokens,
                            int32_t *cu_seqlens) {
  int32_t total = 0;
  for (int b = 0; b < SEQUENCES; ++b) {
    cu_seqlens[b] = total;
    if (turn > 0) tokens[total++] = talk->chosen[place_of(talk, turn - 1, talk->generated - 1, b)];
    memcpy(tokens + total, talk->prompts[turn][b],
           sizeof(int32_t) * (size_t)kPromptTokens[turn][b]);
    total += kPromptTokens[turn][b];
  }
  cu_seqlens[SEQUENCES] = total;
  return total;
}

static void print_speed(const char *what, engine_times times, int32_t steps, int32_t tokens) {
  printf(
      "%-8s %4d tokens in %2d step%s  %7.0f tokens/s; a step: attention %7.0f us, the rest %7.0f "
      "us\n",
      what, tokens, steps, steps == 1 ? ": " : "s:", tokens / (times.attention + times.rest),
      1e6 * times.attention / steps, 1e6 * times.rest / steps);
}

static int run_turn(decode_engine *engine, conversation *talk, int turn, int32_t *tokens) {
  int32_t cu_seqlens[SEQUENCES + 1];
  const int32_t total = pack_prompts(talk, turn, tokens, cu_seqlens);
  if (!step(engine, talk, turn, 0, tokens, cu_seqlens)) return 0;
  print_speed(turn ? "append" : "prefill", engine_take_times(engine), 1, total);
  for (int b = 0; b <= SEQUENCES; ++b) cu_seqlens[b] = b;
  for (int n = 1; n < talk->generated; ++n) {
    const int32_t *last = talk->chosen + place_of(talk, turn, n - 1, 0);
    if (!step(engine, talk, turn, n, last, cu_seqlens)) return 0;
  }
  const int32_t steps = talk->generated - 1;
  if (steps > 0) print_speed("decode", engine_take_times(engine), steps, steps * SEQUENCES);
  return 1;
}

static int run_engine(conversation *talk, compute_device *device, const model *weights) {
  engine_limits limits = {.sequences = SEQUENCES};
  for (int b = 0; b < SEQUENCES; ++b) {
    int32_t length = 0;
    for (int turn = 0; turn < TURNS; ++turn) length += kPromptTokens[turn][b] + talk->generated;
    if (length > limits.capacity) limits.capacity = length;
    limits.pages += (length + PAGE_SIZE - 1) / PAGE_SIZE;
    limits.tokens += length;
  }
  int32_t *tokens = allocate((size_t)limits.tokens, sizeof *tokens);
  decode_engine *engine = tokens ? engine_create(device, weights, limits) : NULL;
  flashattn_plan_properties info;
  int good = engine && engine_plan_info(engine, &info);
  if (good) {
    printf("%d sequences; %d layers, %d heads on %d of %d, fp32; kernel %s (%s)\n%s\n", SEQUENCES,
           LAYERS, HEADS, KV_HEADS, DIM, info.kernel, info.backend, info.why);
  }
  for (int turn = 0; good && turn < TURNS; ++turn) good = run_turn(engine, talk, turn, tokens);
  if (good) {
    printf("%d pages of %d tokens a layer; the longest sequence alone would take %d\n",
           engine_pages_in_use(engine), PAGE_SIZE, (limits.capacity + PAGE_SIZE - 1) / PAGE_SIZE);
  }
  engine_destroy(engine);
  free(tokens);
  return good;
}

/* ---- By the reference ---- */

typedef struct {
  double deviation; /* the largest of a logit */
  double margin;    /* the smallest by which a token was chosen */
  int wrong;        /* tokens */
} comparison;

/* Returns the token that the reference chooses. */
static int32_t compare(comparison *result, const double *want, const float *got) {
  int32_t best = 0;
  for (int32_t n = 1; n < VOCABULARY; ++n) {
    if (want[n] > want[best]) best = n;
  }
  for (int32_t n = 0; n < VOCABULARY; ++n) {
    const double deviation = fabs(want[n] - (double)got[n]);
    if (!(deviation <= result->deviation)) result->deviation = deviation; /* NaN, too */
    if (n != best) result->margin = fmin(result->margin, want[best] - want[n]);
  }
  return best;
}

static int check_sequence(comparison *result, const conversation *talk, const model *weights,
                          int b) {
  double logits[VOCABULARY];
  int32_t capacity = 0, next = 0;
  for (int turn = 0; turn < TURNS; ++turn) capacity += kPromptTokens[turn][b] + talk->generated;
  reference *sequence = reference_create(weights, capacity);
  if (!sequence) return 0;
  for (int turn = 0; turn < TURNS; ++turn) {
    if (turn > 0) reference_append(sequence, next, logits);
    for (int32_t n = 0; n < kPromptTokens[turn][b]; ++n) {
      reference_append(sequence, talk->prompts[turn][b][n], logits);
    }
    for (int n = 0; n < talk->generated; ++n) {
      if (n > 0) reference_append(sequence, next, logits);
      const size_t place = place_of(talk, turn, n, b);
      next = compare(result, logits, talk->logits + place * VOCABULARY);
      result->wrong += next != talk->chosen[place];
    }
  }
  reference_destroy(sequence);
  return 1;
}

int main(int argc, char **argv) {
  const long generated = argc > 2 ? strtol(argv[2], NULL, 10) : 32;
  if (argc > 3 || generated < 1 || generated > MAX_TOKENS) {
    fprintf(stderr, "usage: decode [cpu|cuda [TOKENS]], TOKENS from 1 to %d\n", MAX_TOKENS);
    return 2;
  }
  conversation talk = {.generated = 0};
  comparison result = {.margin = INFINITY};
  model *weights = model_create(1);
  compute_device *device = device_open(argc > 1 ? argv[1] : NULL);
  int good = weights && device && create_conversation(&talk, (int32_t)generated) &&
             run_engine(&talk, device, weights);
  for (int b = 0; good && b < SEQUENCES; ++b) good = check_sequence(&result, &talk, weights, b);
  if (good) {
    const int tokens = (int)place_of(&talk, TURNS, 0, 0);
    printf(
        "%d of %d tokens are those of the float64 reference; a logit deviates by at most %.1e, "
        "and the closest choice was by %.1e\n",
        tokens - result.wrong, tokens, result.deviation, result.margin);
    good = result.wrong == 0 && result.deviation < MAX_DEVIATION;
  }
  free_conversation(&talk);
  device_close(device);
  free(weights);
  return good ? 0 : 1;
}
