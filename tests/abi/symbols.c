/* Every function of the header links from C, through the shared library alone. */
#include "../unit/check.h"

int main(void) {
  /* Prototypes are checked here, addresses at run time. */
  int32_t (*const version)(void) = flashattn_version;
  const char *(*const version_string)(void) = flashattn_version_string;
  const char *(*const build_info)(void) = flashattn_build_info;
  const char *(*const status_name)(int32_t) = flashattn_status_name;
  const char *(*const last_error)(int32_t *, const char **) = flashattn_last_error;
  int32_t (*const set_log)(int32_t, flashattn_log_fn, void *) = flashattn_set_log;
  int32_t (*const device_count)(int32_t, int32_t *) = flashattn_device_count;
  int32_t (*const device_info)(int32_t, int32_t, flashattn_device_properties *) =
      flashattn_device_info;
  int32_t (*const desc_init)(flashattn_desc *, uint32_t) = flashattn_desc_init;
  int32_t (*const check)(const flashattn_desc *) = flashattn_check;
  int32_t (*const plan_create)(const flashattn_desc *, flashattn_plan **) = flashattn_plan_create;
  void (*const plan_destroy)(flashattn_plan *) = flashattn_plan_destroy;
  int32_t (*const plan_info)(const flashattn_plan *, uint32_t, const flashattn_shape *,
                             flashattn_plan_properties *) = flashattn_plan_info;
  int32_t (*const workspace_size)(const flashattn_plan *, uint32_t, const flashattn_shape *,
                                  int64_t *) = flashattn_workspace_size;
  int32_t (*const forward)(const flashattn_plan *, const flashattn_forward_args *, void *, int64_t,
                           void *) = flashattn_forward;
  int32_t (*const backward)(const flashattn_plan *, const flashattn_backward_args *, void *,
                            int64_t, void *) = flashattn_backward;
  int32_t (*const merge)(const flashattn_plan *, const flashattn_merge_args *, void *) =
      flashattn_merge;
  int32_t (*const dropout_mask)(const flashattn_plan *, const flashattn_forward_args *, uint8_t *,
                                void *) = flashattn_dropout_mask;
  CHECK(version && version_string && build_info && status_name && last_error && set_log);
  CHECK(device_count && device_info && desc_init && check && plan_create && plan_destroy);
  CHECK(plan_info && workspace_size && forward && backward && merge && dropout_mask);
  CHECK(version() ==
        10000 * FLASHATTN_VERSION_MAJOR + 100 * FLASHATTN_VERSION_MINOR + FLASHATTN_VERSION_PATCH);
  return check_report();
}
