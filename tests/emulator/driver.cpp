// NVIDIA's driver and runtime, as far as the library, the numerics suite and the Rust crate cudarc
// call them: devices whose memory is the host's, contexts, and graphs. Built as libcuda.so.1.
//
// FLASHATTN_EMULATOR_DEVICES: so many, else one. FLASHATTN_EMULATOR_FAILS=cudaLaunchKernel=700:
// this function of the runtime fails with this error; read at each call.
#include <cuda.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <new>
#include <set>
#include <string>
#include <vector>

#include "global.h"
#include "tensor_map.h"

namespace {

using Work = std::function<void()>;

// A graph is a list here, and so is a stream that records one.
struct Queue {
  std::vector<Work> work;
  bool recording = false;
};

struct Context {
  int device;
  bool active = true;
};

constexpr int kMostDevices = 8;
Context primary[kMostDevices] = {{0, false}, {1, false}, {2, false}, {3, false},
                                 {4, false}, {5, false}, {6, false}, {7, false}};
thread_local Context* current = nullptr;
thread_local int chosen = 0;  // the runtime's device, where no context is current
thread_local cudaError_t last_error = cudaSuccess;

int device_count() {
  const char* text = std::getenv("FLASHATTN_EMULATOR_DEVICES");
  return text ? std::min(std::atoi(text), kMostDevices) : 1;
}

cudaError_t remember(cudaError_t error) {
  if (error != cudaSuccess) last_error = error;
  return error;
}

// What a function of the runtime is asked to fail with, or cudaSuccess.
cudaError_t asked_failure(const char* function) {
  const char* text = std::getenv("FLASHATTN_EMULATOR_FAILS");
  const size_t length = std::strlen(function);
  if (!text || std::strncmp(text, function, length) != 0 || text[length] != '=') return cudaSuccess;
  return remember(static_cast<cudaError_t>(std::atoi(text + length + 1)));
}

CUcontext make_current(Context* context) {
  if (context) context->active = true;
  current = context;
  return reinterpret_cast<CUcontext>(context);
}

// What the runtime does where it needs a context.
void need_context() {
  if (!current) make_current(&primary[chosen]);
}

CUresult encode_tiled(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void* base,
                      const cuuint64_t* sizes, const cuuint64_t* strides, const cuuint32_t* box,
                      const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle swizzle,
                      CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
  if (!current) return CUDA_ERROR_INVALID_CONTEXT;
  const uint32_t element = type == CU_TENSOR_MAP_DATA_TYPE_UINT8     ? 1
                           : type == CU_TENSOR_MAP_DATA_TYPE_FLOAT32 ? 4
                                                                     : 2;
  const uint32_t row_bytes = swizzle == CU_TENSOR_MAP_SWIZZLE_64B ? 64 : 128;
  if (rank != 4 || box[0] * element != row_bytes || box[1] > 256 || box[2] > 256 || box[3] != 1 ||
      (row_bytes == 128 && swizzle != CU_TENSOR_MAP_SWIZZLE_128B) ||
      reinterpret_cast<uintptr_t>(base) % 16 != 0) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  emulator::TensorMap made{static_cast<char*>(base), {}, {element}, box[1], box[2], row_bytes};
  for (int n = 0; n < 4; ++n) {
    if (sizes[n] == 0 || sizes[n] > 1ull << 32) return CUDA_ERROR_INVALID_VALUE;
    made.size[n] = sizes[n];
    if (n == 0) continue;
    made.stride[n] = strides[n - 1];
    if (made.stride[n] % 16 != 0 || made.stride[n] >= 1ull << 40) return CUDA_ERROR_INVALID_VALUE;
  }
  std::memcpy(map, &made, sizeof made);
  return CUDA_SUCCESS;
}

std::mutex loaded_mutex;
std::set<std::pair<const void*, const void*>>
    loaded;  // kernels, by context, that somebody has asked about

// Entry points that the library asks for.
CUresult get_device(CUdevice* device, int number) { return *device = number, CUDA_SUCCESS; }
CUresult retain_primary(CUcontext* context, CUdevice device) {
  primary[device].active = true;
  return *context = reinterpret_cast<CUcontext>(&primary[device]), CUDA_SUCCESS;
}
CUresult get_current(CUcontext* context) {
  return *context = reinterpret_cast<CUcontext>(current), CUDA_SUCCESS;
}
CUresult release_primary(CUdevice) { return CUDA_SUCCESS; }
CUresult primary_state(CUdevice device, unsigned* flags, int* active) {
  *flags = 0;
  return *active = primary[device].active, CUDA_SUCCESS;
}
CUresult set_current(CUcontext context) {
  current = reinterpret_cast<Context*>(context);
  return CUDA_SUCCESS;
}

const struct {
  const char* name;
  void* function;
} kEntryPoints[] = {
    {"cuTensorMapEncodeTiled", reinterpret_cast<void*>(&encode_tiled)},
    {"cuDeviceGet", reinterpret_cast<void*>(&get_device)},
    {"cuDevicePrimaryCtxRetain", reinterpret_cast<void*>(&retain_primary)},
    {"cuDevicePrimaryCtxRelease", reinterpret_cast<void*>(&release_primary)},
    {"cuDevicePrimaryCtxGetState", reinterpret_cast<void*>(&primary_state)},
    {"cuCtxGetCurrent", reinterpret_cast<void*>(&get_current)},
    {"cuCtxSetCurrent", reinterpret_cast<void*>(&set_current)},
};

}  // namespace

cudaError_t emulator::start_error(const void* kernel) {
  const cudaError_t error = asked_failure("cudaLaunchKernel");
  if (error != cudaSuccess) return error;
  need_context();
  const std::lock_guard<std::mutex> lock(loaded_mutex);
  if (!loaded.count({current, kernel})) {
    fail("a kernel starts that no plan has made ready in this context: it would load now");
  }
  return cudaSuccess;
}

void emulator::enqueue(cudaStream_t stream, std::function<void()> work) {
  Queue* queue = reinterpret_cast<Queue*>(stream);
  if (queue && queue->recording) {
    queue->work.push_back(std::move(work));
  } else {
    work();
  }
}

// FLASHATTN_EMULATOR_DEVICE: the compute capability, 90 or, with less shared memory, 80 and 120.
int emulator::compute_capability() {
  const char* text = std::getenv("FLASHATTN_EMULATOR_DEVICE");
  return text ? std::atoi(text) : 90;
}

extern "C" {

// ---- the runtime

cudaError_t cudaGetDeviceCount(int* count) { return *count = device_count(), cudaSuccess; }
cudaError_t cudaGetDevice(int* device) {
  return *device = current ? current->device : chosen, cudaSuccess;
}
cudaError_t cudaSetDevice(int device) {
  chosen = device;
  make_current(&primary[device]);
  return cudaSuccess;
}
cudaError_t cudaGetLastError() {
  const cudaError_t error = last_error;
  last_error = cudaSuccess;
  return error;
}
const char* cudaGetErrorString(cudaError_t) { return "an error of the emulator"; }

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* p, int) {
  std::memset(p, 0, sizeof *p);
  std::snprintf(p->name, sizeof p->name, "emulator");
  p->totalGlobalMem = 1u << 30;
  return cudaSuccess;
}

// The most that a CTA may have.
static int shared_bytes() {
  switch (emulator::compute_capability()) {
    case 90: return emulator::kSharedBytes;
    case 80: return 163 * 1024;
    default: return 99 * 1024;
  }
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr which, int) {
  const int capability = emulator::compute_capability();
  switch (which) {
    case cudaDevAttrMultiProcessorCount: *value = emulator::kMultiprocessors; break;
    case cudaDevAttrComputeCapabilityMajor: *value = capability / 10; break;
    case cudaDevAttrComputeCapabilityMinor: *value = capability % 10; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = shared_bytes(); break;
    case cudaDevAttrL2CacheSize: *value = 50 << 20; break;
    default: return remember(cudaErrorInvalidValue);
  }
  return cudaSuccess;
}

cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void* kernel) {
  need_context();
  const cudaError_t error = asked_failure("cudaFuncGetAttributes");
  if (error != cudaSuccess) return error;
  {
    const std::lock_guard<std::mutex> lock(loaded_mutex);
    loaded.insert({current, kernel});
  }
  std::memset(attributes, 0, sizeof *attributes);
  attributes->numRegs = 255;
  attributes->maxThreadsPerBlock = 1024;
  attributes->ptxVersion = emulator::compute_capability();
  return cudaSuccess;
}

cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int value) {
  return remember(value <= shared_bytes() ? cudaSuccess : cudaErrorInvalidValue);
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void*, int, size_t) {
  return *blocks = 1, cudaSuccess;
}

cudaError_t cudaMemsetAsync(void* to, int byte, size_t size, cudaStream_t stream) {
  emulator::enqueue(stream, [=] {
    emulator::host_writes(to, size);
    std::memset(to, byte, size);
  });
  return cudaSuccess;
}

cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned,
                                             unsigned long long,
                                             cudaDriverEntryPointQueryResult* found) {
  *function = nullptr;
  *found = cudaDriverEntryPointSymbolNotFound;
  const cudaError_t error = asked_failure("cudaGetDriverEntryPointByVersion");
  if (error != cudaSuccess) return error;
  for (const auto& entry : kEntryPoints) {
    if (std::strcmp(name, entry.name) != 0) continue;
    *function = entry.function;
    *found = cudaDriverEntryPointSuccess;
  }
  return cudaSuccess;
}

// ---- the driver

CUresult cuInit(unsigned) { return CUDA_SUCCESS; }
CUresult cuDeviceGet(CUdevice* device, int number) { return get_device(device, number); }
CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
  return retain_primary(context, device);
}
CUresult cuDevicePrimaryCtxRelease(CUdevice device) { return release_primary(device); }
CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned* flags, int* active) {
  return primary_state(device, flags, active);
}
CUresult cuCtxCreate_v2(CUcontext* context, unsigned, CUdevice device) {
  return *context = make_current(new Context{device}), CUDA_SUCCESS;
}
CUresult cuCtxGetCurrent(CUcontext* context) { return get_current(context); }
CUresult cuCtxSetCurrent(CUcontext context) { return set_current(context); }
CUresult cuCtxSynchronize() { return CUDA_SUCCESS; }
CUresult cuDeviceGetCount(int* count) { return *count = device_count(), CUDA_SUCCESS; }
CUresult cuDeviceGetName(char* text, int size, CUdevice) {
  std::snprintf(text, static_cast<size_t>(size), "emulator");
  return CUDA_SUCCESS;
}
CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute, CUdevice) {
  return *value = 0, CUDA_SUCCESS;  // no memory pools, say
}
CUresult cuGetErrorName(CUresult, const char** text) {
  return *text = "an error of the emulator", CUDA_SUCCESS;
}

CUresult cuMemAlloc(CUdeviceptr* address, size_t size) {
  void* memory = std::aligned_alloc(4096, (size + 4095) / 4096 * 4096);
  emulator::watch(memory, size);
  *address = reinterpret_cast<CUdeviceptr>(memory);
  return memory ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}
CUresult cuMemFree(CUdeviceptr address) {
  emulator::forget(reinterpret_cast<void*>(address));
  std::free(reinterpret_cast<void*>(address));
  return CUDA_SUCCESS;
}
CUresult cuMemGetInfo(size_t* free_bytes, size_t* total) {
  *free_bytes = *total = 1u << 30;
  return CUDA_SUCCESS;
}
CUresult cuMemsetD8(CUdeviceptr to, unsigned char byte, size_t size) {
  emulator::host_writes(reinterpret_cast<void*>(to), size);
  std::memset(reinterpret_cast<void*>(to), byte, size);
  return CUDA_SUCCESS;
}
CUresult cuMemsetD8Async(CUdeviceptr to, unsigned char byte, size_t size, CUstream stream) {
  cudaMemsetAsync(reinterpret_cast<void*>(to), byte, size, reinterpret_cast<cudaStream_t>(stream));
  return CUDA_SUCCESS;
}
CUresult cuMemcpyHtoD(CUdeviceptr to, const void* from, size_t size) {
  emulator::host_writes(reinterpret_cast<void*>(to), size);
  std::memcpy(reinterpret_cast<void*>(to), from, size);
  return CUDA_SUCCESS;
}
CUresult cuMemcpyDtoH(void* to, CUdeviceptr from, size_t size) {
  std::memcpy(to, reinterpret_cast<const void*>(from), size);
  return CUDA_SUCCESS;
}
CUresult cuMemcpyHtoDAsync(CUdeviceptr to, const void* from, size_t size, CUstream) {
  return cuMemcpyHtoD(to, from, size);
}
CUresult cuMemcpyDtoHAsync(void* to, CUdeviceptr from, size_t size, CUstream) {
  return cuMemcpyDtoH(to, from, size);
}
CUresult cuMemcpyDtoDAsync(CUdeviceptr to, CUdeviceptr from, size_t size, CUstream stream) {
  emulator::enqueue(reinterpret_cast<cudaStream_t>(stream), [=] {
    emulator::host_writes(reinterpret_cast<void*>(to), size);
    std::memcpy(reinterpret_cast<void*>(to), reinterpret_cast<const void*>(from), size);
  });
  return CUDA_SUCCESS;
}

CUresult cuStreamCreate(CUstream* stream, unsigned) {
  *stream = reinterpret_cast<CUstream>(new Queue);
  return CUDA_SUCCESS;
}
CUresult cuStreamSynchronize(CUstream) { return CUDA_SUCCESS; }
CUresult cuStreamWaitEvent(CUstream, CUevent, unsigned) { return CUDA_SUCCESS; }
CUresult cuStreamDestroy(CUstream stream) {
  delete reinterpret_cast<Queue*>(stream);
  return CUDA_SUCCESS;
}
CUresult cuStreamBeginCapture(CUstream stream, CUstreamCaptureMode) {
  reinterpret_cast<Queue*>(stream)->recording = true;
  return CUDA_SUCCESS;
}
CUresult cuStreamEndCapture(CUstream stream, CUgraph* graph) {
  Queue* queue = reinterpret_cast<Queue*>(stream);
  queue->recording = false;
  *graph = reinterpret_cast<CUgraph>(new Queue{std::move(queue->work), false});
  queue->work.clear();
  return CUDA_SUCCESS;
}
CUresult cuGraphGetNodes(CUgraph graph, CUgraphNode*, size_t* count) {
  *count = reinterpret_cast<Queue*>(graph)->work.size();
  return CUDA_SUCCESS;
}
CUresult cuGraphInstantiateWithFlags(CUgraphExec* made, CUgraph graph, unsigned long long) {
  *made = reinterpret_cast<CUgraphExec>(new Queue(*reinterpret_cast<Queue*>(graph)));
  return CUDA_SUCCESS;
}
CUresult cuGraphLaunch(CUgraphExec graph, CUstream) {
  for (const Work& work : reinterpret_cast<Queue*>(graph)->work) work();
  return CUDA_SUCCESS;
}
CUresult cuGraphExecDestroy(CUgraphExec graph) {
  delete reinterpret_cast<Queue*>(graph);
  return CUDA_SUCCESS;
}
CUresult cuGraphDestroy(CUgraph graph) {
  delete reinterpret_cast<Queue*>(graph);
  return CUDA_SUCCESS;
}

CUresult cuEventCreate(CUevent* event, unsigned) { return *event = nullptr, CUDA_SUCCESS; }
CUresult cuEventDestroy(CUevent) { return CUDA_SUCCESS; }
CUresult cuEventRecord(CUevent, CUstream) { return CUDA_SUCCESS; }
CUresult cuEventQuery(CUevent) { return CUDA_SUCCESS; }
CUresult cuEventSynchronize(CUevent) { return CUDA_SUCCESS; }
CUresult cuEventElapsedTime(float* milliseconds, CUevent, CUevent) {
  return *milliseconds = 0, CUDA_SUCCESS;
}

}  // extern "C"
