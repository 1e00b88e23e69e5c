#include "case_file.h"

#include "case_judge.h"
#include "reasons.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
  ALIGNMENT = 64,
  MAX_OUTPUTS = 8
};

/* ---- files ---- */

/* The contents and a zero byte behind; NULL when it cannot be read. */
static unsigned char *read_file(const char *folder, const char *name, size_t *size) {
  char path[1024];
  if (snprintf(path, sizeof path, "%s/%s", folder, name) >= (int)sizeof path) return NULL;
  FILE *stream = fopen(path, "rb");
  if (!stream) return NULL;
  unsigned char *contents = NULL;
  long length = -1;
  if (fseek(stream, 0, SEEK_END) == 0) length = ftell(stream);
  if (length >= 0 && fseek(stream, 0, SEEK_SET) == 0) contents = malloc((size_t)length + 1);
  if (contents && fread(contents, 1, (size_t)length, stream) == (size_t)length) {
    contents[length] = 0;
    *size = (size_t)length;
  } else {
    free(contents);
    contents = NULL;
  }
  fclose(stream);
  return contents;
}

int case_file_open(case_file *file, const char *folder) {
  size_t text_size = 0, size = 0;
  memset(file, 0, sizeof *file);
  file->text = (char *)read_file(folder, "cases.txt", &text_size);
  unsigned char *blob = read_file(folder, "cases.bin", &size);
  file->memory = malloc(size + ALIGNMENT);
  if (!file->text || !blob || !file->memory) {
    free(blob);
    case_file_close(file);
    return 0;
  }
  file->blob = file->memory + (ALIGNMENT - (uintptr_t)file->memory % ALIGNMENT) % ALIGNMENT;
  memcpy(file->blob, blob, size);
  free(blob);
  for (const char *at = file->text; at && *at; at = strchr(at, '\n')) {
    at += *at == '\n';
    if (strncmp(at, "case ", 5) == 0 && file->count < MAX_CASES) file->start[file->count++] = at;
  }
  return 1;
}

void case_file_close(case_file *file) {
  free(file->text);
  free(file->memory);
  memset(file, 0, sizeof *file);
}

/* ---- fields by name ---- */

typedef struct field {
  const char *line, *name;
  size_t offset, size;
  char kind; /* i: integer, f: float, p: pointer */
} field;

#define FIELD(line, type, kind, name) \
  {line, #name, offsetof(type, name), sizeof(((type *)0)->name), kind}
#define DESC(name) FIELD("desc", flashattn_desc, 'i', name)
#define FACTOR(name) FIELD("desc", flashattn_desc, 'f', name)
#define NUMBER(name) FIELD("args", flashattn_args, 'i', name)
#define STRIDES(name) NUMBER(name.stride_batch), NUMBER(name.stride_head), NUMBER(name.stride_seq)
#define ARRAY(name) FIELD("array", flashattn_args, 'p', name) /* a tensor begins with its pointer */
#define OUTPUT(name) FIELD("expect", flashattn_args, 'p', name)

static const field fields[] = {
    DESC(ops),
    DESC(dtype),
    DESC(dtype_o),
    DESC(heads_q),
    DESC(heads_kv),
    DESC(dim_qk),
    DESC(dim_v),
    DESC(layout),
    DESC(page_size),
    DESC(mask),
    DESC(window_left),
    DESC(window_right),
    DESC(chunk),
    DESC(block_q),
    DESC(block_kv),
    DESC(bias),
    DESC(dtype_bias),
    DESC(features),
    DESC(determinism),
    FACTOR(scale),
    FACTOR(softcap),
    FACTOR(dropout),
    DESC(splits),
    DESC(max_batch),
    DESC(max_seqlen_q),
    DESC(max_seqlen_kv),
    DESC(threads),
    DESC(max_total_q),
    DESC(max_total_kv),
    NUMBER(batch),
    NUMBER(seqlen_q),
    NUMBER(seqlen_kv),
    NUMBER(total_q),
    NUMBER(total_kv),
    NUMBER(pages),
    NUMBER(rng_seed),
    NUMBER(rng_offset),
    STRIDES(q),
    STRIDES(k),
    STRIDES(v),
    STRIDES(page_table),
    STRIDES(bias),
    STRIDES(alibi_slopes),
    STRIDES(block_mask),
    STRIDES(dbias),
    ARRAY(q),
    ARRAY(k),
    ARRAY(v),
    ARRAY(cu_seqlens_q),
    ARRAY(cu_seqlens_kv),
    ARRAY(lens_q),
    ARRAY(lens_kv),
    ARRAY(starts_kv),
    ARRAY(page_table),
    ARRAY(bias),
    ARRAY(alibi_slopes),
    ARRAY(sink),
    ARRAY(block_mask),
    ARRAY(dout),
    ARRAY(dlse),
    OUTPUT(o),
    OUTPUT(lse),
    OUTPUT(dq),
    OUTPUT(dk),
    OUTPUT(dv),
    OUTPUT(dbias),
    OUTPUT(dsink),
};

static const field *find_field(const char *line, const char *name) {
  for (size_t n = 0; n < sizeof fields / sizeof *fields; ++n) {
    if (strcmp(fields[n].line, line) == 0 && strcmp(fields[n].name, name) == 0) return &fields[n];
  }
  return NULL;
}

static void set_pointer(void *structure, const field *at, void *data) {
  memcpy((char *)structure + at->offset, &data, sizeof data);
}

static int set_number(void *structure, const char *line, const char *name, const char *value) {
  const field *at = find_field(line, name);
  if (!at) return 0;
  char *to = (char *)structure + at->offset;
  if (at->kind == 'f') {
    const float number = (float)strtod(value, NULL);
    memcpy(to, &number, sizeof number);
  } else {
    /* A minus sign wraps: the low bytes are right for every width. */
    const uint64_t wide = strtoull(value, NULL, 10);
    const uint32_t narrow = (uint32_t)wide;
    memcpy(to, at->size == 8 ? (const void *)&wide : (const void *)&narrow, at->size);
  }
  return 1;
}

/* ---- one case ---- */

/* The structures as the library gets them: room for a newer header's tail behind each. */
#define WITH_TAIL(type, name) \
  struct {                    \
    type name;                \
    char tail[CASE_TAIL];     \
  }

typedef struct run {
  char name[NAME_SIZE];
  WITH_TAIL(flashattn_desc, desc) d;
  WITH_TAIL(flashattn_args, args) a;
  int unknown;
  output outputs[MAX_OUTPUTS];
  int output_count;
} run;

static size_t count_elements(const char *dims) {
  size_t elements = 1;
  for (const char *at = dims; at; at = strchr(at, ',')) {
    at += *at == ',';
    elements *= strtoul(at, NULL, 10);
  }
  return elements;
}

/* "FIELD=VALUE ..." from `words` on. */
static int read_numbers(void *structure, const char *line, const char *words) {
  char name[NAME_SIZE], value[NAME_SIZE];
  int used = 0, known = 1;
  while (sscanf(words, " %39[a-z_0-9.]=%39s%n", name, value, &used) == 2) {
    known &= set_number(structure, line, name, value);
    words += used;
  }
  return known;
}

static int read_array(const case_file *file, run *r, const char *words) {
  char name[NAME_SIZE], dtype[8], dims[80];
  unsigned long offset = 0;
  if (sscanf(words, " %39s %7s %79s %lu", name, dtype, dims, &offset) != 4) return 0;
  void *data = file->blob + offset;
  const field *at = find_field("array", name);
  if (at) set_pointer(&r->a.args, at, data);
  return at != NULL;
}

static int32_t output_dtype(const flashattn_desc *desc, const char *name) {
  const int32_t dtype_o = desc->dtype_o ? desc->dtype_o : desc->dtype;
  if (strcmp(name, "o") == 0) return dtype_o;
  return name[0] == 'd' && strlen(name) == 2 ? desc->dtype : FLASHATTN_DTYPE_F32;
}

static int read_output(const case_file *file, run *r, const char *words) {
  char dims[80];
  unsigned long offset = 0;
  if (r->output_count == MAX_OUTPUTS) return 0;
  output *out = &r->outputs[r->output_count];
  if (sscanf(words, " %39s f64 %79s %lu %lf", out->name, dims, &offset, &out->tolerance) != 4) {
    return 0;
  }
  const field *at = find_field("expect", out->name);
  if (!at) return 0;
  out->expected = (const double *)(const void *)(file->blob + offset);
  out->elements = count_elements(dims);
  out->dtype = output_dtype(&r->d.desc, out->name);
  const size_t bytes = out->elements * (out->dtype == FLASHATTN_DTYPE_F32 ? 4 : 2);
  out->data = malloc(bytes + 1);
  if (!out->data) return 0;
  memset(out->data, 0xFF, bytes); /* NaN in every format */
  set_pointer(&r->a.args, at, out->data);
  ++r->output_count;
  return 1;
}

static void read_case(const case_file *file, int n, run *r) {
  memset(r, 0, sizeof *r);
  sscanf(file->start[n], "case %39s", r->name);
  r->d.desc.struct_size = sizeof r->d.desc;
  r->unknown = flashattn_args_init(&r->a.args, sizeof r->a.args) != FLASHATTN_OK;
  const char *line = strchr(file->start[n], '\n');
  while (line && line[1] && line[1] != '\n') {
    char kind[16], words[1024];
    const char *from = ++line;
    line = strchr(from, '\n');
    const size_t length = line ? (size_t)(line - from) : strlen(from);
    words[0] = 0;
    if (length < sizeof words) memcpy(words, from, length), words[length] = 0;
    if (sscanf(words, "%15s", kind) != 1) continue;
    const char *rest = words + strlen(kind);
    int known = 0;
    if (strcmp(kind, "desc") == 0) known = read_numbers(&r->d.desc, kind, rest);
    if (strcmp(kind, "args") == 0) known = read_numbers(&r->a.args, kind, rest);
    if (strcmp(kind, "array") == 0) known = read_array(file, r, rest);
    if (strcmp(kind, "expect") == 0) known = read_output(file, r, rest);
    r->unknown |= !known;
  }
}

/* ---- running ---- */

static int ok(const run *r, const char *call, int32_t status) {
  if (status == FLASHATTN_OK) return 1;
  printf("%s: flashattn_%s: %s: %s\n", r->name, call, flashattn_status_name(status),
         flashattn_last_error(NULL, NULL));
  return 0;
}

static int run_operation(const run *r, const flashattn_plan *plan, uint32_t op) {
  int64_t bytes = 0;
  if (!ok(r, "workspace_size", flashattn_workspace_size(plan, op, &r->a.args, &bytes))) {
    return 0;
  }
  void *workspace = malloc((size_t)bytes + 1);
  const int done =
      op == FLASHATTN_OP_FORWARD
          ? ok(r, "forward", flashattn_forward(plan, &r->a.args, workspace, bytes, NULL))
          : ok(r, "backward", flashattn_backward(plan, &r->a.args, workspace, bytes, NULL));
  free(workspace);
  return done;
}

static int run_operations(run *r, case_hook hook) {
  flashattn_plan *plan = NULL;
  if (hook) {
    hook("desc", &r->d);
    hook("args", &r->a);
  }
  if (!ok(r, "plan_create", flashattn_plan_create(&r->d.desc, &plan, NULL))) return 0;
  const int done =
      run_operation(r, plan, FLASHATTN_OP_FORWARD) &&
      (!(r->d.desc.ops & FLASHATTN_OP_BACKWARD) || run_operation(r, plan, FLASHATTN_OP_BACKWARD));
  flashattn_plan_destroy(plan);
  return done;
}

static int32_t reason_of(const char *name) {
  for (size_t n = 0; n < sizeof reasons / sizeof *reasons; ++n) {
    if (strcmp(reasons[n].name, name) == 0) return reasons[n].value;
  }
  return -1;
}

/* "NAME 1,2,3" in memory of its own, the output's. */
static int read_values(run *r, const char *words) {
  char name[NAME_SIZE], numbers[80];
  if (r->output_count == MAX_OUTPUTS || sscanf(words, " %39s %79s", name, numbers) != 2) return 0;
  const field *at = find_field("array", name);
  int32_t *data = calloc(sizeof numbers, sizeof *data);
  if (!at || !data) {
    free(data);
    return 0;
  }
  char *number = numbers;
  for (int n = 0; *number; ++n) {
    data[n] = (int32_t)strtol(number, &number, 10);
    number += *number == ',';
  }
  set_pointer(&r->a.args, at, data);
  r->outputs[r->output_count++] = (output){.data = data};
  return 1;
}

case_outcome case_refused(const case_file *file, const char *paragraph) {
  char name[NAME_SIZE], base[NAME_SIZE], kind[16], words[200], status[NAME_SIZE] = "";
  char reason[NAME_SIZE] = "", wanted[NAME_SIZE] = "", full[2 * NAME_SIZE];
  run r;
  int n = 0;
  if (sscanf(paragraph, "refusal %39s %39s", name, base) != 2) return CASE_FAILED;
  for (; n < file->count; ++n) {
    char found[NAME_SIZE] = "";
    sscanf(file->start[n], "case %39s", found);
    if (strcmp(found, base) == 0) break;
  }
  if (n == file->count) {
    printf("%s: there is no case %s\n", name, base);
    return CASE_FAILED;
  }
  read_case(file, n, &r);
  for (const char *line = strchr(paragraph, '\n'); line && line[1] > '\n';
       line = strchr(line + 1, '\n')) {
    int used = 0, known = 0;
    if (sscanf(line + 1, "%15s%n%199[^\n]", kind, &used, words) != 2) break;
    if (strcmp(kind, "desc") == 0) known = read_numbers(&r.d.desc, kind, words);
    if (strcmp(kind, "args") == 0) known = read_numbers(&r.a.args, kind, words);
    if (strcmp(kind, "values") == 0) known = read_values(&r, words);
    if (strcmp(kind, "expect") == 0) {
      known = sscanf(words, " %39s %39s %39s", status, reason, wanted) == 3;
    }
    r.unknown |= !known;
  }
  case_outcome outcome = CASE_SKIPPED;
  if (!r.unknown) {
    flashattn_error error = {.struct_size = sizeof error};
    flashattn_plan *plan = NULL;
    int64_t bytes = 0;
    int32_t got = flashattn_plan_create(&r.d.desc, &plan, &error);
    r.a.args.error = &error;
    if (!got) got = flashattn_workspace_size(plan, FLASHATTN_OP_FORWARD, &r.a.args, &bytes);
    void *workspace = malloc((size_t)bytes + 1);
    if (!got) got = flashattn_forward(plan, &r.a.args, workspace, bytes, NULL);
    free(workspace);
    flashattn_plan_destroy(plan);
    snprintf(full, sizeof full, "FLASHATTN_ERROR_%s", status);
    const int right = strcmp(flashattn_status_name(got), full) == 0 &&
                      error.reason == reason_of(reason) && strcmp(error.field, wanted) == 0;
    outcome = right ? CASE_PASSED : CASE_FAILED;
    if (!right) {
      printf("%s: %s, reason %d, field %s, wanted %s, %s, %s: %s\n", name,
             flashattn_status_name(got), error.reason, error.field, full, reason, wanted,
             error.message);
    }
  }
  for (int k = 0; k < r.output_count; ++k) free(r.outputs[k].data);
  return outcome;
}

case_outcome case_run(const case_file *file, int n, case_hook hook, uint64_t *digest) {
  run r;
  read_case(file, n, &r);
  case_outcome outcome = CASE_SKIPPED;
  if (!r.unknown) outcome = run_operations(&r, hook) ? CASE_PASSED : CASE_FAILED;
  uint64_t sum = UINT64_C(0xCBF29CE484222325);
  for (int k = 0; k < r.output_count; ++k) {
    if (outcome == CASE_PASSED && !judge(r.name, &r.outputs[k])) outcome = CASE_FAILED;
    sum = add_to_digest(sum, &r.outputs[k]);
    free(r.outputs[k].data);
  }
  if (digest) *digest = sum;
  return outcome;
}
