/* XLA's foreign function interface to libflashattn: the handlers that a compiled JAX program calls.
 *
 * SPDX-License-Identifier: Apache-2.0
 *
 * A call site carries flashattn_desc and flashattn_args as attributes, written by Python when the
 * program is traced (_call.py), and a table that says which member of flashattn_args each buffer
 * is. Nothing of the library's header is needed here, so that one handler serves every version.
 */
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "xla/ffi/api/c_api.h"

/* As in flashattn.h. Structures are words of 8 bytes. */
enum {
  OK = 0,
  INVALID_ARGUMENT = 1,
  UNSUPPORTED = 2,
  OUT_OF_MEMORY = 4,
  BACKWARD = 2
};
typedef int32_t plan_create_fn(const int64_t *desc, void **plan, void *error);
typedef int32_t operation_fn(const void *plan, const int64_t *args, void *workspace, int64_t bytes,
                             void *stream);
typedef const char *last_error_fn(int32_t *reason, const char **field);

/* The functions of libflashattn, which flashattn_jax_bind receives. */
typedef struct {
  plan_create_fn *plan_create;
  operation_fn *forward;
  operation_fn *backward;
  last_error_fn *last_error;
  int64_t device_index; /* where flashattn_desc has that member, in bytes */
} Library;
static Library library;

/* The attributes of a call, in the order of their names. */
enum {
  ARGS,
  DESC,
  ELEMENTS,
  OP,
  WORDS,
  WORKSPACE,
  ATTRIBUTES
};
#define MOST_WORDS 512  /* structures have at most 4096 bytes */
#define IS_WORKSPACE -1 /* in place of a word; below: of no member */

/* Plans live as long as the process: a descriptor holds no lengths, so that programs have few. */
typedef struct Kept {
  struct Kept *next;
  void *plan;
  int64_t size;
  int64_t desc[];
} Kept;
#define LISTS 256
static _Atomic(Kept *) kept[LISTS];

/* Each thread keeps a small workspace from call to call. XLA would ask the system for it in
 * each, and page faults would take longer than a small call. */
typedef struct {
  int64_t bytes;
  _Alignas(64) char data[];
} Scratch;
static pthread_key_t scratch_key;
static pthread_once_t once = PTHREAD_ONCE_INIT;

static void make_key(void) { pthread_key_create(&scratch_key, free); }

/* Called once, before the handlers are registered. */
void flashattn_jax_bind(const Library *given) {
  pthread_once(&once, make_key);
  library = *given;
}

int32_t flashattn_jax_api_version(void) { return 1000 * XLA_FFI_API_MAJOR + XLA_FFI_API_MINOR; }

static XLA_FFI_Error *fail(const XLA_FFI_CallFrame *frame, XLA_FFI_Error_Code code,
                           const char *message) {
  XLA_FFI_Error_Create_Args args = {.struct_size = XLA_FFI_Error_Create_Args_STRUCT_SIZE};
  args.message = message;
  args.errc = code;
  return frame->api->XLA_FFI_Error_Create(&args);
}

/* The library's own message. */
static XLA_FFI_Error *refused(const XLA_FFI_CallFrame *frame, int32_t status) {
  XLA_FFI_Error_Code code = status == INVALID_ARGUMENT ? XLA_FFI_Error_Code_INVALID_ARGUMENT
                            : status == UNSUPPORTED    ? XLA_FFI_Error_Code_UNIMPLEMENTED
                            : status == OUT_OF_MEMORY  ? XLA_FFI_Error_Code_RESOURCE_EXHAUSTED
                                                       : XLA_FFI_Error_Code_INTERNAL;
  return fail(frame, code, library.last_error(NULL, NULL));
}

static const Kept *search(const Kept *from, const int64_t *desc, int64_t size) {
  for (; from; from = from->next) {
    if (from->size == size && !memcmp(from->desc, desc, (size_t)size * sizeof *desc)) return from;
  }
  return NULL;
}

/* The plan of a descriptor, made at its first use. */
static XLA_FFI_Error *plan_of(const XLA_FFI_CallFrame *frame, const int64_t *desc, int64_t size,
                              void **plan) {
  uint64_t hash = 0;
  for (int64_t i = 0; i < size; ++i) hash = (hash ^ (uint64_t)desc[i]) * 0x9E3779B97F4A7C15u;
  _Atomic(Kept *) *list = &kept[hash >> 56];
  Kept *first = atomic_load_explicit(list, memory_order_acquire);
  const Kept *found = search(first, desc, size);
  if (found) {
    *plan = found->plan;
    return NULL;
  }
  Kept *made = malloc(sizeof *made + (size_t)size * sizeof *desc);
  if (!made) return fail(frame, XLA_FFI_Error_Code_RESOURCE_EXHAUSTED, "host memory ran out");
  const int32_t status = library.plan_create(desc, plan, NULL);
  if (status) {
    free(made);
    return refused(frame, status);
  }
  made->plan = *plan;
  made->size = size;
  memcpy(made->desc, desc, (size_t)size * sizeof *desc);
  made->next = first;
  /* Another thread may have added the same one: either will do. */
  while (!atomic_compare_exchange_weak_explicit(list, &made->next, made, memory_order_release,
                                                memory_order_relaxed)) {
  }
  return NULL;
}

static void *scratch(int64_t bytes) {
  Scratch *held = pthread_getspecific(scratch_key);
  if (!held || held->bytes < bytes) {
    const size_t size = (sizeof *held + (size_t)bytes + 63) / 64 * 64;
    Scratch *larger = aligned_alloc(64, size);
    if (!larger || pthread_setspecific(scratch_key, larger)) {
      free(larger);
      return NULL;
    }
    free(held);
    held = larger;
    held->bytes = bytes;
  }
  return held->data;
}

static int64_t elements(const XLA_FFI_Buffer *buffer) {
  int64_t count = 1;
  for (int64_t i = 0; i < buffer->rank; ++i) count *= buffer->dims[i];
  return count;
}

static int64_t scalar(const XLA_FFI_CallFrame *frame, int attribute) {
  return *(const int64_t *)((const XLA_FFI_Scalar *)frame->attrs.attrs[attribute])->value;
}

static XLA_FFI_Error *run(XLA_FFI_CallFrame *frame, const void *plan, void *stream) {
  const XLA_FFI_Array *given = frame->attrs.attrs[ARGS];
  const XLA_FFI_Array *words = frame->attrs.attrs[WORDS];
  const XLA_FFI_Array *counts = frame->attrs.attrs[ELEMENTS];
  const int64_t inputs = frame->args.size, buffers = inputs + frame->rets.size;
  if ((int64_t)words->size != buffers || counts->size != words->size || given->size > MOST_WORDS) {
    return fail(frame, XLA_FFI_Error_Code_INTERNAL, "the call's table does not fit its buffers");
  }
  int64_t args[MOST_WORDS], bytes = 0;
  memcpy(args, given->data, given->size * sizeof *args);
  void *workspace = NULL;
  for (int64_t i = 0; i < buffers; ++i) {
    const XLA_FFI_Buffer *buffer = i < inputs ? frame->args.args[i] : frame->rets.rets[i - inputs];
    const int64_t word = ((const int64_t *)words->data)[i];
    if (elements(buffer) != ((const int64_t *)counts->data)[i]) {
      /* The sizes in flashattn_args are no longer true. */
      return fail(frame, XLA_FFI_Error_Code_INTERNAL,
                  "XLA changed the shape of an array of the call; please report the program");
    }
    if (word == IS_WORKSPACE) {
      workspace = buffer->data;
      bytes = elements(buffer);
    } else if (word >= 0 && word < (int64_t)given->size) {
      args[word] = (int64_t)(intptr_t)buffer->data;
    }
  }
  const int64_t wanted = scalar(frame, WORKSPACE);
  if (wanted > bytes) {
    bytes = wanted;
    workspace = scratch(bytes);
    if (!workspace) {
      return fail(frame, XLA_FFI_Error_Code_RESOURCE_EXHAUSTED, "host memory ran out");
    }
  }
  operation_fn *function = scalar(frame, OP) == BACKWARD ? library.backward : library.forward;
  const int32_t status = function(plan, args, workspace, bytes, stream);
  return status ? refused(frame, status) : NULL;
}

static int describes_itself(XLA_FFI_CallFrame *frame, XLA_FFI_Handler_Traits traits) {
  /* The type of extension_base has one name up to API 0.3 and another since. */
  XLA_FFI_Metadata_Extension *e = (XLA_FFI_Metadata_Extension *)frame->extension_start;
  for (; e; e = (XLA_FFI_Metadata_Extension *)e->extension_base.next) {
    if (e->extension_base.type != XLA_FFI_Extension_Metadata) continue;
    XLA_FFI_Metadata *metadata = e->metadata;
    metadata->api_version.major_version = XLA_FFI_API_MAJOR;
    metadata->api_version.minor_version = XLA_FFI_API_MINOR;
    metadata->traits = traits;
    return 1;
  }
  return 0;
}

static XLA_FFI_Error *handle(XLA_FFI_CallFrame *frame, int on_gpu) {
  if (frame->attrs.size != ATTRIBUTES) {
    return fail(frame, XLA_FFI_Error_Code_INTERNAL,
                "the call has other attributes than _call.py "
                "of flashattn.jax gives");
  }
  const XLA_FFI_Array *attribute = frame->attrs.attrs[DESC];
  const int64_t *desc = attribute->data, size = (int64_t)attribute->size;
  int64_t copy[MOST_WORDS];
  const int instantiates = frame->stage == XLA_FFI_ExecutionStage_INSTANTIATE;
  if (on_gpu && !instantiates) { /* the program may run on any GPU, and is instantiated for none */
    XLA_FFI_DeviceOrdinal_Get_Args device = {
        .struct_size = XLA_FFI_DeviceOrdinal_Get_Args_STRUCT_SIZE, .ctx = frame->ctx};
    XLA_FFI_Error *error = frame->api->XLA_FFI_DeviceOrdinal_Get(&device);
    if (error) return error;
    if (size > MOST_WORDS || library.device_index + 4 > 8 * size) {
      return fail(frame, XLA_FFI_Error_Code_INTERNAL, "the call's descriptor is no flashattn_desc");
    }
    memcpy(copy, desc, (size_t)size * sizeof *copy);
    memcpy((char *)copy + library.device_index, &device.device_ordinal, 4);
    desc = copy;
  }
  void *plan = NULL;
  XLA_FFI_Error *error = plan_of(frame, desc, size, &plan);
  if (error) return error;
  if (frame->stage != XLA_FFI_ExecutionStage_EXECUTE) return NULL; /* the plan is there now */
  if (!on_gpu) return run(frame, plan, NULL);
  XLA_FFI_Stream_Get_Args stream = {.struct_size = XLA_FFI_Stream_Get_Args_STRUCT_SIZE,
                                    .ctx = frame->ctx};
  error = frame->api->XLA_FFI_Stream_Get(&stream);
  return error ? error : run(frame, plan, stream.stream);
}

XLA_FFI_Error *flashattn_jax_cpu(XLA_FFI_CallFrame *frame) {
  return describes_itself(frame, 0) ? NULL : handle(frame, 0);
}

/* The library neither synchronises, allocates nor reads device memory in a call, which a CUDA graph
 * may therefore hold. */
XLA_FFI_Error *flashattn_jax_cuda(XLA_FFI_CallFrame *frame) {
  const XLA_FFI_Handler_Traits traits = XLA_FFI_HANDLER_TRAITS_COMMAND_BUFFER_COMPATIBLE;
  return describes_itself(frame, traits) ? NULL : handle(frame, 1);
}

/* Does nothing: what tests measure the others against. */
XLA_FFI_Error *flashattn_jax_empty(XLA_FFI_CallFrame *frame) {
  describes_itself(frame, 0);
  return NULL;
}
