/* The decoder in float64, as its formulas say: a token at a time, all scores of a head in memory.
 * It shares the weights with the engine, and no code. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "model.h"

struct reference {
  const model *weights;
  int length;
  double *scores;         /* (capacity) */
  double *keys[LAYERS];   /* (capacity, KV_WIDTH), rotated */
  double *values[LAYERS]; /* (capacity, KV_WIDTH) */
};

reference *reference_create(const model *weights, int capacity) {
  reference *made = allocate(1, sizeof *made);
  if (!made) return NULL;
  made->weights = weights;
  made->scores = allocate((size_t)capacity, sizeof(double));
  int complete = made->scores != NULL;
  for (int n = 0; n < LAYERS && complete; ++n) {
    made->keys[n] = allocate((size_t)capacity * KV_WIDTH, sizeof(double));
    made->values[n] = allocate((size_t)capacity * KV_WIDTH, sizeof(double));
    complete = made->keys[n] && made->values[n];
  }
  if (complete) return made;
  reference_destroy(made);
  return NULL;
}

void reference_destroy(reference *sequence) {
  if (!sequence) return;
  for (int n = 0; n < LAYERS; ++n) {
    free(sequence->keys[n]);
    free(sequence->values[n]);
  }
  free(sequence->scores);
  free(sequence);
}

static void normalised(double *y, const double *x, const float *weight) {
  double sum = 0.0;
  for (int c = 0; c < WIDTH; ++c) sum += x[c] * x[c];
  const double rms = sqrt(sum / WIDTH + (double)NORM_EPSILON);
  for (int c = 0; c < WIDTH; ++c) y[c] = x[c] / rms * (double)weight[c];
}

static void product(double *y, const double *x, const float *w, int in, int out) {
  for (int o = 0; o < out; ++o) y[o] = 0.0;
  for (int i = 0; i < in; ++i) {
    for (int o = 0; o < out; ++o) y[o] += x[i] * (double)w[(size_t)i * (size_t)out + (size_t)o];
  }
}

/* Turns the pairs (c, c + DIM / 2) of a head (Su et al. 2021). */
static void rotate(double *head, int position) {
  for (int c = 0; c < DIM / 2; ++c) {
    const double angle = position * pow((double)ROTARY_BASE, -2.0 * c / DIM);
    const double x = head[c], y = head[c + DIM / 2];
    head[c] = x * cos(angle) - y * sin(angle);
    head[c + DIM / 2] = x * sin(angle) + y * cos(angle);
  }
}

/* One query over the keys so far, its own included. */
static void attend(double *o, const double *q, const double *keys, const double *values,
                   double *scores, int length) {
  double largest = -INFINITY, sum = 0.0;
  for (int j = 0; j < length; ++j) {
    scores[j] = 0.0;
    for (int c = 0; c < DIM; ++c) scores[j] += q[c] * keys[(size_t)j * KV_WIDTH + (size_t)c];
    scores[j] /= sqrt((double)DIM);
    if (scores[j] > largest) largest = scores[j];
  }
  for (int c = 0; c < DIM; ++c) o[c] = 0.0;
  for (int j = 0; j < length; ++j) {
    const double weight = exp(scores[j] - largest);
    sum += weight;
    for (int c = 0; c < DIM; ++c) o[c] += weight * values[(size_t)j * KV_WIDTH + (size_t)c];
  }
  for (int c = 0; c < DIM; ++c) o[c] /= sum;
}

void reference_append(reference *sequence, int32_t token, double logits[VOCABULARY]) {
  const model *weights = sequence->weights;
  double x[WIDTH], y[WIDTH], qkv[QKV_WIDTH], o[WIDTH], gate_up[2 * HIDDEN], hidden[HIDDEN];
  const int position = sequence->length++;
  for (int c = 0; c < WIDTH; ++c) x[c] = (double)weights->embedding[token][c];
  for (int n = 0; n < LAYERS; ++n) {
    const layer_weights *layer = &weights->layers[n];
    double *key = sequence->keys[n] + (size_t)position * KV_WIDTH;
    double *value = sequence->values[n] + (size_t)position * KV_WIDTH;

    normalised(y, x, layer->attention_norm);
    product(qkv, y, &layer->qkv[0][0], WIDTH, QKV_WIDTH);
    for (int h = 0; h < HEADS + KV_HEADS; ++h) rotate(qkv + h * DIM, position);
    memcpy(key, qkv + WIDTH, KV_WIDTH * sizeof(double));
    memcpy(value, qkv + WIDTH + KV_WIDTH, KV_WIDTH * sizeof(double));
    for (int h = 0; h < HEADS; ++h) {
      const int kv = h / (HEADS / KV_HEADS) * DIM;
      attend(o + h * DIM, qkv + h * DIM, sequence->keys[n] + kv, sequence->values[n] + kv,
             sequence->scores, sequence->length);
    }
    product(y, o, &layer->out[0][0], WIDTH, WIDTH);
    for (int c = 0; c < WIDTH; ++c) x[c] += y[c];

    normalised(y, x, layer->mlp_norm);
    product(gate_up, y, &layer->gate_up[0][0], WIDTH, 2 * HIDDEN);
    for (int c = 0; c < HIDDEN; ++c) {
      hidden[c] = gate_up[c] / (1.0 + exp(-gate_up[c])) * gate_up[HIDDEN + c];
    }
    product(y, hidden, &layer->down[0][0], HIDDEN, WIDTH);
    for (int c = 0; c < WIDTH; ++c) x[c] += y[c];
  }
  normalised(y, x, weights->final_norm);
  product(logits, y, &weights->head[0][0], WIDTH, VOCABULARY);
}
