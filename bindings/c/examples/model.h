/* A small decoder of the kind of Llama (Touvron et al. 2023): RMSNorm, grouped KV heads, rotary
 * embedding, SwiGLU. */
#ifndef EXAMPLES_MODEL_H
#define EXAMPLES_MODEL_H

#include "common.h"

enum {
  LAYERS = 4,
  HEADS = 8,
  KV_HEADS = 2,
  DIM = 32,
  WIDTH = HEADS * DIM,
  KV_WIDTH = KV_HEADS * DIM,
  QKV_WIDTH = WIDTH + 2 * KV_WIDTH,
  HIDDEN = 512,
  VOCABULARY = 512
};

#define ROTARY_BASE 10000.0f
#define NORM_EPSILON 1e-5f

/* Matrices are (in, out), the last index fastest: y[o] = sum of x[i] * w[i][o]. */
typedef struct {
  float attention_norm[WIDTH];
  float qkv[WIDTH][QKV_WIDTH]; /* columns of Q, of K, of V; each head by head */
  float out[WIDTH][WIDTH];
  float mlp_norm[WIDTH];
  float gate_up[WIDTH][2 * HIDDEN]; /* columns of the gate, then of what it gates */
  float down[HIDDEN][WIDTH];
} layer_weights;

typedef struct {
  float embedding[VOCABULARY][WIDTH];
  layer_weights layers[LAYERS];
  float final_norm[WIDTH];
  float head[WIDTH][VOCABULARY];
} model;

/* Random weights, of a size that keeps activations near 1 and leaves attention a few keys of most
 * weight. Released by free(). NULL, with a message, where memory runs out. */
model* model_create(uint64_t seed);

/* The layers besides attention, in fp32, on the host. Rows are tokens. */

/* y[r] = x[r] / rms(x[r]) * weight; (rows, WIDTH). */
void rms_norm(float* y, const float* x, const float* weight, int rows);

/* y[r] = x[r] w, or y[r] += x[r] w where add is set; (rows, in), (in, out), (rows, out). */
void matmul(float* y, const float* x, const float* w, int rows, int in, int out, int add);

/* y[r] = silu(gate[r]) * up[r]; (rows, 2 HIDDEN) to (rows, HIDDEN). */
void swiglu(float* y, const float* gate_up, int rows);

/* ---- The same model in float64, from the formulas, a token at a time: see reference.c ---- */

typedef struct reference reference;

/* One sequence of at most `capacity` tokens. NULL, with a message, where memory runs out. */
reference* reference_create(const model* weights, int capacity);
void reference_destroy(reference* sequence);

/* Appends a token to the sequence; writes the logits of the next. */
void reference_append(reference* sequence, int32_t token, double logits[VOCABULARY]);

#endif
