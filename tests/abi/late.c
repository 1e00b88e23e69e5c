#include "late.h"

#include <dlfcn.h>
#include <stdio.h>

#include "flashattn.h"

#define LATE(result, name, parameters, arguments)  \
  static __thread result(*late_##name) parameters; \
  result flashattn_##name parameters { return late_##name arguments; }

LATE(const char *, status_name, (int32_t status), (status))
LATE(const char *, last_error, (int32_t *reason, const char **field), (reason, field))
LATE(int32_t, plan_create,
     (const flashattn_desc *desc, flashattn_plan **plan, flashattn_error *error),
     (desc, plan, error))
LATE(int32_t, args_init, (flashattn_args * args, uint32_t size), (args, size))
LATE(int32_t, workspace_size,
     (const flashattn_plan *plan, uint32_t op, const flashattn_args *args, int64_t *bytes),
     (plan, op, args, bytes))
LATE(int32_t, forward,
     (const flashattn_plan *plan, const flashattn_args *args, void *workspace, int64_t bytes,
      void *stream),
     (plan, args, workspace, bytes, stream))
LATE(int32_t, backward,
     (const flashattn_plan *plan, const flashattn_args *args, void *workspace, int64_t bytes,
      void *stream),
     (plan, args, workspace, bytes, stream))

static __thread void (*late_plan_destroy)(flashattn_plan *plan);
void flashattn_plan_destroy(flashattn_plan *plan) { late_plan_destroy(plan); }

/* POSIX lets a pointer to a function travel as void *; ISO C has no cast for it. */
static int find(void *handle, const char *name, void *function) {
  *(void **)function = dlsym(handle, name);
  if (!*(void **)function) printf("%s\n", dlerror());
  return *(void **)function != NULL;
}

#define FIND(name) find(handle, "flashattn_" #name, &late_##name)

void *late_open(const char *library, int mode) {
  void *handle = dlopen(library, mode);
  if (!handle) {
    printf("%s\n", dlerror());
    return NULL;
  }
  const int all = FIND(status_name) && FIND(last_error) && FIND(plan_create) && FIND(args_init) &&
                  FIND(workspace_size) && FIND(forward) && FIND(backward) && FIND(plan_destroy);
  return all ? handle : NULL;
}

int late_close(void *handle) { return dlclose(handle) == 0; }
