#include "model.h"

#include <math.h>
#include <string.h>

static void randomise(float *weights, size_t count, float size, uint64_t *state) {
  for (size_t n = 0; n < count; ++n) weights[n] = size * random_number(state);
}

/* Uniform in [0.75, 1.25]. */
static void randomise_norm(float *weights, uint64_t *state) {
  for (int c = 0; c < WIDTH; ++c) weights[c] = 1.0f + 0.25f * random_number(state);
}

/* Weights of a matrix that keeps the variance of its input. */
static void randomise_matrix(float *weights, int in, int out, uint64_t *state) {
  randomise(weights, (size_t)in * (size_t)out, sqrtf(3.0f / (float)in), state);
}

model *model_create(uint64_t seed) {
  model *made = allocate(1, sizeof *made);
  if (!made) return NULL;
  uint64_t state = seed;
  randomise(&made->embedding[0][0], (size_t)VOCABULARY * WIDTH, 1.7f, &state);
  for (int n = 0; n < LAYERS; ++n) {
    layer_weights *layer = &made->layers[n];
    randomise_norm(layer->attention_norm, &state);
    randomise_matrix(&layer->qkv[0][0], WIDTH, QKV_WIDTH, &state);
    for (int i = 0; i < WIDTH; ++i) {
      for (int c = 0; c < WIDTH + KV_WIDTH; ++c) layer->qkv[i][c] *= 1.5f; /* Q and K */
    }
    randomise_matrix(&layer->out[0][0], WIDTH, WIDTH, &state);
    randomise_norm(layer->mlp_norm, &state);
    randomise_matrix(&layer->gate_up[0][0], WIDTH, 2 * HIDDEN, &state);
    randomise_matrix(&layer->down[0][0], HIDDEN, WIDTH, &state);
  }
  randomise_norm(made->final_norm, &state);
  randomise_matrix(&made->head[0][0], WIDTH, VOCABULARY, &state);
  return made;
}

void rms_norm(float *y, const float *x, const float *weight, int rows) {
  for (int r = 0; r < rows; ++r, x += WIDTH, y += WIDTH) {
    float sum = 0.0f;
    for (int c = 0; c < WIDTH; ++c) sum += x[c] * x[c];
    const float factor = 1.0f / sqrtf(sum / WIDTH + NORM_EPSILON);
    for (int c = 0; c < WIDTH; ++c) y[c] = x[c] * factor * weight[c];
  }
}

void matmul(float *y, const float *x, const float *w, int rows, int in, int out, int add) {
  enum {
    BLOCK = 8
  }; /* rows that use a row of w while it is in the cache */
  if (!add) memset(y, 0, sizeof(float) * (size_t)rows * (size_t)out);
  for (int first = 0; first < rows; first += BLOCK) {
    const int last = first + BLOCK < rows ? first + BLOCK : rows;
    for (int i = 0; i < in; ++i) {
      const float *from = w + (size_t)i * (size_t)out;
      for (int r = first; r < last; ++r) {
        const float factor = x[(size_t)r * (size_t)in + (size_t)i];
        float *to = y + (size_t)r * (size_t)out;
        for (int o = 0; o < out; ++o) to[o] += factor * from[o];
      }
    }
  }
}

void swiglu(float *y, const float *gate_up, int rows) {
  for (int r = 0; r < rows; ++r, gate_up += 2 * HIDDEN, y += HIDDEN) {
    for (int c = 0; c < HIDDEN; ++c) {
      const float gate = gate_up[c];
      y[c] = gate / (1.0f + expf(-gate)) * gate_up[HIDDEN + c];
    }
  }
}
