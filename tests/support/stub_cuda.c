// A libcuda without a GPU for tests of the ctypes binding: "device" memory is the host's, kernels are noted, not run.
// It is compiled against NVIDIA's own cuda.h, so its signatures and struct layouts are those of the real library.
#include <cuda.h>
#include <limits.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_PARAMETERS = 256, MAX_MAPS = 64, LOG_BYTES = 1 << 16 };

// Set by a test: the call that fails and how; the sizes of the next kernel's parameters, as its cubin lists them.
char stub_fail[64];
int stub_fail_code;
int stub_sizes[MAX_PARAMETERS];
int stub_count;
int stub_devices = 1;

// Read by a test.
char stub_log[LOG_BYTES];
unsigned char stub_parameters[8192];
CUlaunchConfig stub_config;
CUlaunchAttribute stub_attributes[8];
int stub_dynamic_shared;
int stub_captured, stub_replayed;
struct {
  int dtype, rank, interleave, swizzle, promotion, fill;
  void* address;
  uint64_t shape[5], strides[5];
  uint32_t box[5], element_strides[5];
} stub_maps[MAX_MAPS];
int stub_num_maps;
uint64_t stub_config_bytes = sizeof(CUlaunchConfig), stub_attribute_bytes = sizeof(CUlaunchAttribute);

static int capturing, captured;

static CUresult called(const char* name) {
  if (strlen(stub_log) + strlen(name) + 2 < LOG_BYTES) {
    strcat(stub_log, name);
    strcat(stub_log, " ");
  }
  return strcmp(name, stub_fail) == 0 ? (CUresult)stub_fail_code : CUDA_SUCCESS;
}
#define CALLED \
  do { \
    CUresult code = called(__func__); \
    if (code != CUDA_SUCCESS) return code; \
  } while (0)

CUresult cuGetErrorName(CUresult code, const char** text) {
  *text = code == CUDA_ERROR_OUT_OF_MEMORY ? "CUDA_ERROR_OUT_OF_MEMORY" : "CUDA_ERROR_INVALID_VALUE";
  return code == 12345 ? (*text = NULL, CUDA_ERROR_INVALID_VALUE) : CUDA_SUCCESS;
}
CUresult cuGetErrorString(CUresult code, const char** text) {
  *text = code == CUDA_ERROR_OUT_OF_MEMORY ? "out of memory" : "invalid argument";
  return code == 12345 ? (*text = NULL, CUDA_ERROR_INVALID_VALUE) : CUDA_SUCCESS;
}
CUresult cuInit(unsigned flags) { CALLED; return flags ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS; }
CUresult cuDriverGetVersion(int* version) { CALLED; *version = 13010; return CUDA_SUCCESS; }
CUresult cuDeviceGetCount(int* count) { CALLED; *count = stub_devices; return CUDA_SUCCESS; }
CUresult cuDeviceGet(CUdevice* device, int ordinal) { CALLED; *device = ordinal; return CUDA_SUCCESS; }
CUresult cuDeviceGetName(char* name, int size, CUdevice device) { CALLED; strncpy(name, "NVIDIA Stub", size); return CUDA_SUCCESS; }
CUresult cuDeviceTotalMem(size_t* bytes, CUdevice device) { CALLED; *bytes = (size_t)1 << 30; return CUDA_SUCCESS; }
CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice device) {
  CALLED;
  switch (attribute) {
    case CU_DEVICE_ATTRIBUTE_CLOCK_RATE: *value = 1850000; break;
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: *value = 148; break;
    case CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE: *value = 3996000; break;
    case CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE: *value = 132120576; break;
    case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR: *value = 2048; break;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: *value = 10; break;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: *value = 0; break;
    case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR: *value = 65536; break;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: *value = 232448; break;
    default: return CUDA_ERROR_INVALID_VALUE;
  }
  return CUDA_SUCCESS;
}
CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) { CALLED; *context = (CUcontext)0x10; return CUDA_SUCCESS; }
CUresult cuDevicePrimaryCtxRelease(CUdevice device) { CALLED; return CUDA_SUCCESS; }
CUresult cuCtxSetCurrent(CUcontext context) { CALLED; return context == (CUcontext)0x10 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT; }
CUresult cuModuleLoadData(CUmodule* module, const void* image) {
  CALLED;
  *module = (CUmodule)0x20;
  return memcmp(image, "\x7f" "ELF", 4) ? CUDA_ERROR_INVALID_IMAGE : CUDA_SUCCESS;
}
CUresult cuModuleUnload(CUmodule module) { CALLED; return CUDA_SUCCESS; }
CUresult cuModuleGetFunction(CUfunction* function, CUmodule module, const char* name) {
  CALLED;
  *function = (CUfunction)0x30;
  return *name ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}
CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute attribute, int value) {
  CALLED;
  if (attribute != CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES) return CUDA_ERROR_INVALID_VALUE;
  stub_dynamic_shared = value;
  return CUDA_SUCCESS;
}
CUresult cuFuncLoad(CUfunction function) { CALLED; return CUDA_SUCCESS; }
CUresult cuMemGetInfo(size_t* free, size_t* total) { CALLED; *free = (size_t)1 << 29; *total = (size_t)1 << 30; return CUDA_SUCCESS; }
CUresult cuMemAlloc(CUdeviceptr* address, size_t bytes) {
  CALLED;
  *address = (CUdeviceptr)(uintptr_t)aligned_alloc(256, (bytes + 255) / 256 * 256);
  return CUDA_SUCCESS;
}
CUresult cuMemFree(CUdeviceptr address) { CALLED; free((void*)(uintptr_t)address); return CUDA_SUCCESS; }
CUresult cuMemHostAlloc(void** address, size_t bytes, unsigned flags) {
  CALLED;
  *address = aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
  return CUDA_SUCCESS;
}
CUresult cuMemFreeHost(void* address) { CALLED; free(address); return CUDA_SUCCESS; }
CUresult cuMemcpyHtoDAsync(CUdeviceptr target, const void* source, size_t bytes, CUstream stream) {
  CALLED;
  memcpy((void*)(uintptr_t)target, source, bytes);
  return CUDA_SUCCESS;
}
CUresult cuMemcpyDtoHAsync(void* target, CUdeviceptr source, size_t bytes, CUstream stream) {
  CALLED;
  memcpy(target, (void*)(uintptr_t)source, bytes);
  return CUDA_SUCCESS;
}
CUresult cuMemcpy3DAsync(const CUDA_MEMCPY3D* copy, CUstream stream) {
  CALLED;
  if (copy->srcMemoryType != CU_MEMORYTYPE_UNIFIED || copy->dstMemoryType != CU_MEMORYTYPE_UNIFIED ||
      copy->srcPitch < copy->WidthInBytes || copy->dstPitch < copy->WidthInBytes || copy->srcHeight < copy->Height ||
      copy->dstHeight < copy->Height || copy->srcPitch > INT_MAX || copy->dstPitch > INT_MAX || copy->srcXInBytes ||
      copy->srcY || copy->srcZ || copy->srcLOD || copy->dstXInBytes || copy->dstY || copy->dstZ || copy->dstLOD ||
      copy->srcHost || copy->dstHost || copy->srcArray || copy->dstArray || copy->reserved0 || copy->reserved1)
    return CUDA_ERROR_INVALID_VALUE;
  for (size_t z = 0; z < copy->Depth; z++)
    for (size_t y = 0; y < copy->Height; y++)
      memcpy((char*)(uintptr_t)copy->dstDevice + (z * copy->dstHeight + y) * copy->dstPitch,
             (char*)(uintptr_t)copy->srcDevice + (z * copy->srcHeight + y) * copy->srcPitch, copy->WidthInBytes);
  return CUDA_SUCCESS;
}
CUresult cuMemsetD8Async(CUdeviceptr target, unsigned char value, size_t bytes, CUstream stream) {
  CALLED;
  memset((void*)(uintptr_t)target, value, bytes);
  return CUDA_SUCCESS;
}
CUresult cuStreamCreate(CUstream* stream, unsigned flags) {
  CALLED;
  *stream = (CUstream)0x40;
  return flags == CU_STREAM_NON_BLOCKING ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
CUresult cuStreamDestroy(CUstream stream) { CALLED; return CUDA_SUCCESS; }
CUresult cuStreamSynchronize(CUstream stream) { CALLED; return CUDA_SUCCESS; }
CUresult cuEventCreate(CUevent* event, unsigned flags) { CALLED; *event = (CUevent)0x50; return CUDA_SUCCESS; }
CUresult cuEventDestroy(CUevent event) { CALLED; return CUDA_SUCCESS; }
CUresult cuEventRecord(CUevent event, CUstream stream) { CALLED; return CUDA_SUCCESS; }
CUresult cuEventSynchronize(CUevent event) { CALLED; return CUDA_SUCCESS; }
#undef cuEventElapsedTime
CUresult cuEventElapsedTime(float* milliseconds, CUevent start, CUevent end) { CALLED; *milliseconds = 1.5f; return CUDA_SUCCESS; }
CUresult cuStreamBeginCapture(CUstream stream, CUstreamCaptureMode mode) {
  CALLED;
  capturing = 1, captured = 0;
  return mode == CU_STREAM_CAPTURE_MODE_THREAD_LOCAL ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
CUresult cuStreamEndCapture(CUstream stream, CUgraph* graph) {
  CALLED;
  capturing = 0, stub_captured = captured;
  *graph = (CUgraph)0x60;
  return CUDA_SUCCESS;
}
CUresult cuGraphInstantiate(CUgraphExec* executable, CUgraph graph, unsigned long long flags) {
  CALLED;
  *executable = (CUgraphExec)0x70;
  return graph == (CUgraph)0x60 && flags == 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
CUresult cuGraphDestroy(CUgraph graph) { CALLED; return CUDA_SUCCESS; }
CUresult cuGraphLaunch(CUgraphExec executable, CUstream stream) {
  CALLED;
  stub_replayed++;
  return executable == (CUgraphExec)0x70 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
CUresult cuGraphExecDestroy(CUgraphExec executable) { CALLED; return CUDA_SUCCESS; }
CUresult cuTensorMapEncodeTiled(CUtensorMap* map, CUtensorMapDataType dtype, cuuint32_t rank, void* address,
                                const cuuint64_t* shape, const cuuint64_t* strides, const cuuint32_t* box,
                                const cuuint32_t* element_strides, CUtensorMapInterleave interleave,
                                CUtensorMapSwizzle swizzle, CUtensorMapL2promotion promotion,
                                CUtensorMapFloatOOBfill fill) {
  CALLED;
  if ((uintptr_t)map % 64 || rank > 5 || stub_num_maps == MAX_MAPS) return CUDA_ERROR_INVALID_VALUE;
  int i = stub_num_maps++;
  stub_maps[i].dtype = dtype, stub_maps[i].rank = rank, stub_maps[i].address = address;
  stub_maps[i].interleave = interleave, stub_maps[i].swizzle = swizzle;
  stub_maps[i].promotion = promotion, stub_maps[i].fill = fill;
  memcpy(stub_maps[i].shape, shape, 8 * rank);
  memcpy(stub_maps[i].strides, strides, 8 * (rank - 1));
  memcpy(stub_maps[i].box, box, 4 * rank);
  memcpy(stub_maps[i].element_strides, element_strides, 4 * rank);
  memset(map, 0xA0 + i, sizeof(CUtensorMap));
  return CUDA_SUCCESS;
}
CUresult cuLaunchKernelEx(const CUlaunchConfig* config, CUfunction function, void** parameters, void** extra) {
  CALLED;
  if (function != (CUfunction)0x30 || extra || config->numAttrs > 8) return CUDA_ERROR_INVALID_VALUE;
  stub_config = *config;
  memcpy(stub_attributes, config->attrs, sizeof(CUlaunchAttribute) * config->numAttrs);
  unsigned char* end = stub_parameters;
  for (int i = 0; i < stub_count; i++) {
    if (stub_sizes[i] == 128 && (uintptr_t)parameters[i] % 64) return CUDA_ERROR_MISALIGNED_ADDRESS;
    memcpy(end, parameters[i], stub_sizes[i]);
    end += stub_sizes[i];
  }
  captured += capturing;
  return CUDA_SUCCESS;
}
