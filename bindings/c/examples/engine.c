#include "engine.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* A layer's cache, in device memory. */
typedef struct {
  float *keys;   /* (pages, PAGE_SIZE, KV_HEADS, DIM), rotated */
  float *values; /* (pages, PAGE_SIZE, KV_HEADS, DIM) */
  int32_t *lens; /* (sequences): tokens in the cache. The layer's own, since each appends */
  void *graph;   /* of a step of one token a sequence, once there was one */
} layer_cache;

struct decode_engine {
  compute_device *device;
  const model *weights;
  engine_limits limits;
  int32_t sequence_pages; /* of a sequence at most: the width of the page table */
  flashattn_plan *plan;
  engine_times times;

  /* Device memory. */
  void *workspace;
  int64_t workspace_bytes;
  layer_cache layers[LAYERS];
  int32_t *page_table; /* (sequences, sequence_pages), which all layers share */
  int32_t *cu_seqlens; /* (sequences + 1) */
  float *qkv;          /* (tokens, QKV_WIDTH) */
  float *o;            /* (tokens, HEADS, DIM) */

  /* Host memory. */
  int32_t *host_table;                                      /* the page table; -1: no page yet */
  int32_t *host_lens;                                       /* (sequences) */
  int32_t next_page;                                        /* pages are handed out in this order */
  float *x, *normed, *host_qkv, *host_o, *gate_up, *hidden; /* rows are tokens */
};

static int create_plan(decode_engine *engine) {
  flashattn_desc desc;
  if (!succeeded(flashattn_desc_init(&desc, sizeof desc))) return 0;
  desc.device = device_kind(engine->device);
  desc.dtype = FLASHATTN_DTYPE_F32;
  desc.heads_q = HEADS;
  desc.heads_kv = KV_HEADS;
  desc.dim_qk = DIM;
  desc.layout = FLASHATTN_LAYOUT_VARLEN_Q | FLASHATTN_LAYOUT_PAGED_KV;
  desc.page_size = PAGE_SIZE;
  desc.mask = FLASHATTN_MASK_CAUSAL;
  /* Maxima: one workspace serves every step. */
  desc.max_batch = engine->limits.sequences;
  desc.max_seqlen_q = engine->limits.tokens;
  desc.max_seqlen_kv = engine->limits.capacity;
  desc.max_total_q = engine->limits.tokens;
  return succeeded(flashattn_plan_create(&desc, &engine->plan, NULL)) &&
         succeeded(flashattn_workspace_size(engine->plan, FLASHATTN_OP_FORWARD, NULL,
                                            &engine->workspace_bytes));
}

static int create_cache(decode_engine *engine, layer_cache *cache) {
  const size_t elements = (size_t)engine->limits.pages * PAGE_SIZE * KV_WIDTH;
  const size_t lens_bytes = (size_t)engine->limits.sequences * sizeof(int32_t);
  cache->keys = device_allocate(engine->device, elements * sizeof(float));
  cache->values = device_allocate(engine->device, elements * sizeof(float));
  cache->lens = device_allocate(engine->device, lens_bytes);
  return cache->keys && cache->values && cache->lens &&
         device_write(engine->device, cache->lens, engine->host_lens, lens_bytes); /* zeros */
}

static int create_buffers(decode_engine *engine) {
  const size_t sequences = (size_t)engine->limits.sequences, rows = (size_t)engine->limits.tokens;
  const size_t entries = sequences * (size_t)engine->sequence_pages;
  engine->host_table = allocate(entries, sizeof(int32_t));
  engine->host_lens = allocate(sequences, sizeof(int32_t));
  engine->x = allocate(rows * WIDTH, sizeof(float));
  engine->normed = allocate(rows * WIDTH, sizeof(float));
  engine->host_qkv = allocate(rows * QKV_WIDTH, sizeof(float));
  engine->host_o = allocate(rows * WIDTH, sizeof(float));
  engine->gate_up = allocate(rows * 2 * HIDDEN, sizeof(float));
  engine->hidden = allocate(rows * HIDDEN, sizeof(float));
  if (!engine->host_table || !engine->host_lens || !engine->x || !engine->normed ||
      !engine->host_qkv || !engine->host_o || !engine->gate_up || !engine->hidden) {
    return 0;
  }
  for (size_t n = 0; n < entries; ++n) engine->host_table[n] = -1;

  engine->workspace = device_allocate(engine->device, (size_t)engine->workspace_bytes);
  engine->page_table = device_allocate(engine->device, entries * sizeof(int32_t));
  engine->cu_seqlens = device_allocate(engine->device, (sequences + 1) * sizeof(int32_t));
  engine->qkv = device_allocate(engine->device, rows * QKV_WIDTH * sizeof(float));
  engine->o = device_allocate(engine->device, rows * WIDTH * sizeof(float));
  if (!engine->workspace || !engine->page_table || !engine->cu_seqlens || !engine->qkv ||
      !engine->o) {
    return 0;
  }
  for (int n = 0; n < LAYERS; ++n) {
    if (!create_cache(engine, &engine->layers[n])) return 0;
  }
  return 1;
}

decode_engine *engine_create(compute_device *device, const model *weights, engine_limits limits) {
  decode_engine *made = allocate(1, sizeof *made);
  if (!made) return NULL;
  made->device = device;
  made->weights = weights;
  made->limits = limits;
  made->sequence_pages = (limits.capacity + PAGE_SIZE - 1) / PAGE_SIZE;
  if (create_plan(made) && create_buffers(made)) return made;
  engine_destroy(made);
  return NULL;
}

void engine_destroy(decode_engine *engine) {
  if (!engine) return;
  for (int n = 0; n < LAYERS; ++n) {
    device_release_graph(engine->device, engine->layers[n].graph);
    device_release(engine->device, engine->layers[n].keys);
    device_release(engine->device, engine->layers[n].values);
    device_release(engine->device, engine->layers[n].lens);
  }
  device_release(engine->device, engine->workspace);
  device_release(engine->device, engine->page_table);
  device_release(engine->device, engine->cu_seqlens);
  device_release(engine->device, engine->qkv);
  device_release(engine->device, engine->o);
  free(engine->host_table);
  free(engine->host_lens);
  free(engine->x);
  free(engine->normed);
  free(engine->host_qkv);
  free(engine->host_o);
  free(engine->gate_up);
  free(engine->hidden);
  flashattn_plan_destroy(engine->plan);
  free(engine);
}

/* A view of heads inside rows of `stride` elements. */
static flashattn_tensor heads_at(float *data, int64_t stride) {
  return (flashattn_tensor){
      .data = data, .stride_batch = -1, .stride_head = DIM, .stride_seq = stride};
}

/* k and v go behind the keys of their sequence, k and q are rotated, and lens grows: one call. */
static int append(decode_engine *engine, layer_cache *cache, int32_t longest, int32_t total) {
  flashattn_append_kv_args args;
  if (!succeeded(flashattn_append_kv_args_init(&args, sizeof args))) return 0;
  args.batch = engine->limits.sequences;
  args.seqlen_q = longest;
  args.seqlen_kv = engine->limits.capacity;
  args.total_q = total;
  args.rotary = FLASHATTN_ROTARY_HALVES;
  args.rotary_dim = DIM;
  args.rotary_base = ROTARY_BASE;
  args.cu_seqlens_q = engine->cu_seqlens;
  args.lens_kv = cache->lens;
  args.lens_out = cache->lens; /* incremented on the device */
  args.page_table.data = engine->page_table;
  args.pages = engine->limits.pages;
  args.q = heads_at(engine->qkv, QKV_WIDTH);
  args.k = heads_at(engine->qkv + WIDTH, QKV_WIDTH);
  args.v = heads_at(engine->qkv + WIDTH + KV_WIDTH, QKV_WIDTH);
  args.q_out = args.q; /* in place */
  args.k_cache.data = cache->keys;
  args.v_cache.data = cache->values;
  return succeeded(flashattn_append_kv(engine->plan, &args, device_stream(engine->device)));
}

static int set_sizes(const decode_engine *engine, flashattn_args *args, int32_t longest,
                     int32_t total) {
  if (!succeeded(flashattn_args_init(args, sizeof *args))) return 0;
  args->batch = engine->limits.sequences;
  args->seqlen_q = longest;
  args->seqlen_kv = engine->limits.capacity; /* a bound: the lengths lie on the device */
  args->total_q = total;
  args->pages = engine->limits.pages;
  return 1;
}

static int attend(decode_engine *engine, layer_cache *cache, int32_t longest, int32_t total) {
  flashattn_args args;
  if (!set_sizes(engine, &args, longest, total)) return 0;
  args.q = heads_at(engine->qkv, QKV_WIDTH);
  args.k.data = cache->keys;
  args.v.data = cache->values;
  args.cu_seqlens_q = engine->cu_seqlens;
  args.lens_kv = cache->lens;
  args.page_table.data = engine->page_table;
  args.o.data = engine->o;
  return succeeded(flashattn_forward(engine->plan, &args, engine->workspace,
                                     engine->workspace_bytes, device_stream(engine->device)));
}

/* Attention of a layer: host_qkv to host_o. A step of one token a sequence is the same work each
 * time, but for numbers on the device: on a GPU it is recorded once and then replayed. */
static int attention(decode_engine *engine, layer_cache *cache, int32_t longest, int32_t total) {
  compute_device *device = engine->device;
  if (!device_write(device, engine->qkv, engine->host_qkv,
                    (size_t)total * QKV_WIDTH * sizeof(float))) {
    return 0;
  }
  if (longest == 1 && device_has_graphs(device)) {
    if (!cache->graph) {
      if (!device_begin_graph(device)) return 0;
      const int recorded =
          append(engine, cache, longest, total) && attend(engine, cache, longest, total);
      if (!device_end_graph(device, &cache->graph) || !recorded) return 0;
    }
    if (!device_launch_graph(device, cache->graph)) return 0;
  } else if (!append(engine, cache, longest, total) || !attend(engine, cache, longest, total)) {
    return 0;
  }
  return device_read(device, engine->host_o, engine->o, (size_t)total * WIDTH * sizeof(float));
}

/* Gives every sequence the pages that its new tokens need; none where not all can have them. */
static int reserve_pages(decode_engine *engine, const int32_t *cu_seqlens) {
  int32_t needed = 0;
  for (int32_t b = 0; b < engine->limits.sequences; ++b) {
    const int32_t before = engine->host_lens[b], added = cu_seqlens[b + 1] - cu_seqlens[b];
    if (added < 1 || added > engine->limits.capacity - before) {
      fprintf(stderr, "sequence %d of %d tokens gets %d more; give 1 to %d\n", b, before, added,
              engine->limits.capacity - before);
      return 0;
    }
    needed += (before + added + PAGE_SIZE - 1) / PAGE_SIZE - (before + PAGE_SIZE - 1) / PAGE_SIZE;
  }
  if (needed > engine->limits.pages - engine->next_page) {
    fprintf(stderr, "%d pages are needed and %d of %d are free; give the pool more\n", needed,
            engine->limits.pages - engine->next_page, engine->limits.pages);
    return 0;
  }
  if (needed == 0) return 1;
  for (int32_t b = 0; b < engine->limits.sequences; ++b) {
    const int32_t after = engine->host_lens[b] + cu_seqlens[b + 1] - cu_seqlens[b];
    int32_t *row = engine->host_table + (size_t)b * (size_t)engine->sequence_pages;
    for (int32_t n = 0; n * PAGE_SIZE < after; ++n) {
      if (row[n] < 0) row[n] = engine->next_page++;
    }
  }
  return device_write(
      engine->device, engine->page_table, engine->host_table,
      (size_t)engine->limits.sequences * (size_t)engine->sequence_pages * sizeof(int32_t));
}

static int run_layer(decode_engine *engine, int n, int32_t longest, int32_t total) {
  const layer_weights *layer = &engine->weights->layers[n];
  rms_norm(engine->normed, engine->x, layer->attention_norm, total);
  matmul(engine->host_qkv, engine->normed, &layer->qkv[0][0], total, WIDTH, QKV_WIDTH, 0);

  const double start = seconds();
  if (!attention(engine, &engine->layers[n], longest, total)) return 0;
  engine->times.attention += seconds() - start;

  matmul(engine->x, engine->host_o, &layer->out[0][0], total, WIDTH, WIDTH, 1);
  rms_norm(engine->normed, engine->x, layer->mlp_norm, total);
  matmul(engine->gate_up, engine->normed, &layer->gate_up[0][0], total, WIDTH, 2 * HIDDEN, 0);
  swiglu(engine->hidden, engine->gate_up, total);
  matmul(engine->x, engine->hidden, &layer->down[0][0], total, HIDDEN, WIDTH, 1);
  return 1;
}

int engine_step(decode_engine *engine, const int32_t *tokens, const int32_t *cu_seqlens,
                float *logits) {
  const model *weights = engine->weights;
  const int32_t sequences = engine->limits.sequences, total = cu_seqlens[sequences];
  const double start = seconds(), attention_before = engine->times.attention;
  if (total > engine->limits.tokens) {
    fprintf(stderr, "the step has %d tokens; give at most %d\n", total, engine->limits.tokens);
    return 0;
  }
  if (!reserve_pages(engine, cu_seqlens) ||
      !device_write(engine->device, engine->cu_seqlens, cu_seqlens,
                    ((size_t)sequences + 1) * sizeof(int32_t))) {
    return 0;
  }
  int32_t longest = 0;
  for (int32_t b = 0; b < sequences; ++b) {
    const int32_t added = cu_seqlens[b + 1] - cu_seqlens[b];
    if (added > longest) longest = added;
    engine->host_lens[b] += added;
  }

  for (int32_t t = 0; t < total; ++t) {
    memcpy(engine->x + (size_t)t * WIDTH, weights->embedding[tokens[t]], WIDTH * sizeof(float));
  }
  for (int n = 0; n < LAYERS; ++n) {
    if (!run_layer(engine, n, longest, total)) return 0;
  }
  /* Logits of each sequence's last token only. */
  for (int32_t b = 0; b < sequences; ++b) {
    const size_t last = (size_t)cu_seqlens[b + 1] - 1;
    rms_norm(engine->normed + (size_t)b * WIDTH, engine->x + last * WIDTH, weights->final_norm, 1);
  }
  matmul(logits, engine->normed, &weights->head[0][0], sequences, WIDTH, VOCABULARY, 0);
  engine->times.rest += seconds() - start - (engine->times.attention - attention_before);
  return 1;
}

engine_times engine_take_times(decode_engine *engine) {
  const engine_times taken = engine->times;
  engine->times = (engine_times){0.0, 0.0};
  return taken;
}

int32_t engine_pages_in_use(const decode_engine *engine) { return engine->next_page; }

int engine_plan_info(const decode_engine *engine, flashattn_plan_properties *properties) {
  flashattn_args args;
  *properties = (flashattn_plan_properties){.struct_size = sizeof *properties};
  return set_sizes(engine, &args, 1, engine->limits.sequences) &&
         succeeded(flashattn_plan_info(engine->plan, FLASHATTN_OP_FORWARD, &args, properties));
}
