/* The host's memory, or a GPU's by NVIDIA's driver, which is opened at run time: these programs
 * compile, and run on the CPU, where there is no CUDA. A program of a GPU's own would include
 * cuda.h or cuda_runtime.h instead of the declarations below. */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common.h"

typedef unsigned long long gpu_address; /* CUdeviceptr */

/* The driver's functions, as cuda.h declares them: all return CUresult, 0 for success. Handles are
 * pointers. */
typedef struct {
  int (*init)(unsigned flags);
  int (*device_get)(int *device, int ordinal);
  int (*context_retain)(void **context, int device);
  int (*context_release)(int device);
  int (*context_set)(void *context);
  int (*allocate)(gpu_address *address, size_t bytes);
  int (*release)(gpu_address address);
  int (*write)(gpu_address to, const void *from, size_t bytes);
  int (*read)(void *to, gpu_address from, size_t bytes);
  int (*stream_create)(void **stream, unsigned flags);
  int (*stream_wait)(void *stream);
  int (*stream_destroy)(void *stream);
  int (*capture_begin)(void *stream, int mode);
  int (*capture_end)(void *stream, void **graph);
  int (*graph_instantiate)(void **executable, void *graph, unsigned long long flags);
  int (*graph_destroy)(void *graph);
  int (*graph_launch)(void *executable, void *stream);
  int (*executable_destroy)(void *executable);
  int (*error_name)(int result, const char **name);
} driver;

static const char *const kNames[] = {
    "cuInit",
    "cuDeviceGet",
    "cuDevicePrimaryCtxRetain",
    "cuDevicePrimaryCtxRelease_v2",
    "cuCtxSetCurrent",
    "cuMemAlloc_v2",
    "cuMemFree_v2",
    "cuMemcpyHtoD_v2",
    "cuMemcpyDtoH_v2",
    "cuStreamCreate",
    "cuStreamSynchronize",
    "cuStreamDestroy_v2",
    "cuStreamBeginCapture_v2",
    "cuStreamEndCapture",
    "cuGraphInstantiateWithFlags",
    "cuGraphDestroy",
    "cuGraphLaunch",
    "cuGraphExecDestroy",
    "cuGetErrorName",
};

struct compute_device {
  int32_t kind;
  int ordinal;     /* CUdevice */
  int has_context; /* the primary context is retained */
  void *library;   /* of dlopen() */
  void *stream;
  driver cu;
};

static int worked(const compute_device *device, int result, const char *what) {
  if (result == 0) return 1;
  const char *name = NULL;
  device->cu.error_name(result, &name);
  fprintf(stderr, "%s: %s (%d)\n", what, name ? name : "unknown error", result);
  return 0;
}

static int load_driver(compute_device *device) {
  device->library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (!device->library) {
    fprintf(stderr, "NVIDIA's driver cannot be loaded: %s\n", dlerror());
    return 0;
  }
  char *function = (char *)&device->cu;
  for (size_t n = 0; n < sizeof kNames / sizeof kNames[0]; ++n) {
    void *symbol = dlsym(device->library, kNames[n]);
    if (!symbol) {
      fprintf(stderr, "NVIDIA's driver has no %s: install a newer one\n", kNames[n]);
      return 0;
    }
    memcpy(function + n * sizeof symbol, &symbol, sizeof symbol);
  }
  return 1;
}

static int open_gpu(compute_device *device) {
  void *context = NULL;
  if (!load_driver(device)) return 0;
  const driver *cu = &device->cu;
  if (!worked(device, cu->init(0), "cuInit") ||
      !worked(device, cu->device_get(&device->ordinal, 0), "cuDeviceGet") ||
      !worked(device, cu->context_retain(&context, device->ordinal), "cuDevicePrimaryCtxRetain")) {
    return 0;
  }
  device->has_context = 1;
  /* Flags 0: copies, which are in the default stream, wait for this stream, and it for them. */
  return worked(device, cu->context_set(context), "cuCtxSetCurrent") &&
         worked(device, cu->stream_create(&device->stream, 0), "cuStreamCreate");
}

compute_device *device_open(const char *argument) {
  int32_t gpus = 0;
  if (!succeeded(flashattn_device_count(FLASHATTN_DEVICE_CUDA, &gpus))) return NULL;
  const int asks_gpu = argument && strcmp(argument, "cuda") == 0;
  if (argument && !asks_gpu && strcmp(argument, "cpu") != 0) {
    fprintf(stderr, "device is \"%s\"; give cpu or cuda\n", argument);
    return NULL;
  }
  if (asks_gpu && gpus == 0) {
    /* The library says why: its build, the driver or the machine. */
    flashattn_device_properties gpu = {.struct_size = sizeof gpu};
    succeeded(flashattn_device_info(FLASHATTN_DEVICE_CUDA, 0, &gpu));
    return NULL;
  }
  compute_device *opened = allocate(1, sizeof *opened);
  if (!opened) return NULL;
  const int on_gpu = asks_gpu || (!argument && gpus > 0);
  opened->kind = on_gpu ? FLASHATTN_DEVICE_CUDA : FLASHATTN_DEVICE_CPU;
  if (on_gpu && !open_gpu(opened)) {
    device_close(opened);
    return NULL;
  }
  return opened;
}

void device_close(compute_device *device) {
  if (!device) return;
  if (device->stream) worked(device, device->cu.stream_destroy(device->stream), "cuStreamDestroy");
  if (device->has_context) {
    worked(device, device->cu.context_release(device->ordinal), "cuDevicePrimaryCtxRelease");
  }
  if (device->library) dlclose(device->library);
  free(device);
}

int32_t device_kind(const compute_device *device) { return device->kind; }
int device_has_graphs(const compute_device *device) {
  return device->kind == FLASHATTN_DEVICE_CUDA;
}
void *device_stream(compute_device *device) { return device->stream; }

void *device_allocate(compute_device *device, size_t bytes) {
  gpu_address address = 0;
  if (device->kind == FLASHATTN_DEVICE_CPU) return allocate(bytes, 1);
  if (!worked(device, device->cu.allocate(&address, bytes ? bytes : 1), "cuMemAlloc")) return NULL;
  return (void *)(uintptr_t)address;
}

void device_release(compute_device *device, void *memory) {
  if (!memory) return;
  if (device->kind == FLASHATTN_DEVICE_CPU) {
    free(memory);
  } else {
    worked(device, device->cu.release((uintptr_t)memory), "cuMemFree");
  }
}

int device_write(compute_device *device, void *to, const void *from, size_t bytes) {
  if (device->kind == FLASHATTN_DEVICE_CPU) return memcpy(to, from, bytes) != NULL;
  return worked(device, device->cu.write((uintptr_t)to, from, bytes), "cuMemcpyHtoD");
}

int device_read(compute_device *device, void *to, const void *from, size_t bytes) {
  if (device->kind == FLASHATTN_DEVICE_CPU) return memcpy(to, from, bytes) != NULL;
  return device_wait(device) &&
         worked(device, device->cu.read(to, (uintptr_t)from, bytes), "cuMemcpyDtoH");
}

int device_wait(compute_device *device) {
  if (device->kind == FLASHATTN_DEVICE_CPU) return 1;
  return worked(device, device->cu.stream_wait(device->stream), "cuStreamSynchronize");
}

int device_begin_graph(compute_device *device) {
  const int this_thread = 1; /* CU_STREAM_CAPTURE_MODE_THREAD_LOCAL */
  return worked(device, device->cu.capture_begin(device->stream, this_thread),
                "cuStreamBeginCapture");
}

int device_end_graph(compute_device *device, void **graph) {
  void *recorded = NULL;
  if (!worked(device, device->cu.capture_end(device->stream, &recorded), "cuStreamEndCapture")) {
    return 0;
  }
  const int made =
      worked(device, device->cu.graph_instantiate(graph, recorded, 0), "cuGraphInstantiate");
  return worked(device, device->cu.graph_destroy(recorded), "cuGraphDestroy") && made;
}

int device_launch_graph(compute_device *device, void *graph) {
  return worked(device, device->cu.graph_launch(graph, device->stream), "cuGraphLaunch");
}

void device_release_graph(compute_device *device, void *graph) {
  if (graph) worked(device, device->cu.executable_destroy(graph), "cuGraphExecDestroy");
}
