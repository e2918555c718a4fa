/* What the driver and NVML say of device 0, and what a context costs. */
#define _GNU_SOURCE
#include "driver.h"

#include <dlfcn.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef struct {
  unsigned long long total, free, used;
} Memory;
typedef struct {
  unsigned pid;
  unsigned long long used;
  unsigned gpu_instance, compute_instance;
} Process;

static struct {
  int (*init)(void), (*driver_version)(char *, unsigned), (*count)(unsigned *), (*handle)(unsigned, void **);
  int (*uuid)(void *, char *, unsigned), (*name)(void *, char *, unsigned), (*memory)(void *, Memory *);
  int (*mig)(void *, unsigned *, unsigned *), (*compute_mode)(void *, int *);
  int (*processes)(void *, unsigned *, Process *), (*mps_processes)(void *, unsigned *, Process *);
  const char *missing;
} nvml;

static int nvml_ready(void) {
  static int state; /* 0: never tried, 1: ready, 2: not there */
  if (state) return state == 1;
  state = 2;
  void *library = dlopen("libnvidia-ml.so.1", RTLD_NOW);
  if (!library) return nvml.missing = "libnvidia-ml.so.1 cannot be loaded", 0;
#define FIND(field, symbol)                                                                                                   \
  *(void **)&nvml.field = dlsym(library, symbol);                                                                             \
  if (!nvml.field) return nvml.missing = "NVML has no " symbol, 0;
  FIND(init, "nvmlInit_v2")
  FIND(driver_version, "nvmlSystemGetDriverVersion")
  FIND(count, "nvmlDeviceGetCount_v2")
  FIND(handle, "nvmlDeviceGetHandleByIndex_v2")
  FIND(uuid, "nvmlDeviceGetUUID")
  FIND(name, "nvmlDeviceGetName")
  FIND(memory, "nvmlDeviceGetMemoryInfo")
  FIND(mig, "nvmlDeviceGetMigMode")
  FIND(compute_mode, "nvmlDeviceGetComputeMode")
  FIND(processes, "nvmlDeviceGetComputeRunningProcesses_v3")
  FIND(mps_processes, "nvmlDeviceGetMPSComputeRunningProcesses_v3")
#undef FIND
  if (nvml.init()) return nvml.missing = "nvmlInit_v2 fails", 0;
  state = 1;
  return 1;
}

static int processes(int (*list)(void *, unsigned *, Process *), void *device, double *own_bytes) {
  enum { MOST = 256 };
  static Process found[MOST];
  unsigned count = MOST;
  if (list(device, &count, found)) return -1;
  for (unsigned i = 0; i < count && own_bytes; i++) {
    /* All ones: NVML does not know (as where processes have another numbering inside a container). */
    if (found[i].pid == (unsigned)getpid() && found[i].used != ~0ull) *own_bytes = (double)found[i].used;
  }
  return (int)count;
}

struct nvml_memory nvml_memory(void) {
  struct nvml_memory answer = {-1, -1, -1};
  void *device;
  Memory memory;
  if (!nvml_ready() || nvml.handle(0, &device)) return answer;
  if (!nvml.memory(device, &memory)) {
    answer.total_bytes = (double)memory.total;
    answer.used_bytes = (double)memory.used;
  }
  processes(nvml.processes, device, &answer.own_bytes);
  return answer;
}

void nvml_report(void) {
  char text[128] = "";
  void *device;
  unsigned count = 0, mig_now = 0, mig_next = 0;
  int mode = 0, status;
  json_object("nvml");
  json_flag("there", nvml_ready());
  if (!nvml_ready()) {
    json_text("why", nvml.missing);
    json_end();
    return;
  }
  if (!nvml.driver_version(text, sizeof text)) json_text("driver", text);
  if (!nvml.count(&count)) json_number("devices", count);
  if ((status = nvml.handle(0, &device))) {
    json_number("handle_error", status);
    json_end();
    return;
  }
  if (!nvml.name(device, text, sizeof text)) json_text("name", text);
  if (!nvml.uuid(device, text, sizeof text)) json_text("uuid", text);
  struct nvml_memory memory = nvml_memory();
  json_number("total_bytes", memory.total_bytes);
  json_number("used_bytes", memory.used_bytes);
  /* NOT_SUPPORTED (3) on devices without MIG. */
  status = nvml.mig(device, &mig_now, &mig_next);
  json_text("mig", status ? "not supported" : mig_now ? "on" : "off");
  if (!nvml.compute_mode(device, &mode)) json_number("compute_mode", mode);
  json_number("compute_processes", processes(nvml.processes, device, NULL));
  json_number("mps_processes", processes(nvml.mps_processes, device, NULL));
  json_end();
}

int mode_device(int argc, char **argv) {
  (void)argc, (void)argv;
  /* Number in cuda.h, name in the report. */
  static const struct {
    int attribute;
    const char *name;
  } attributes[] = {
      {75, "compute_major"},         {76, "compute_minor"},        {16, "multiprocessors"},
      {40, "copy_engines"},          {41, "unified_addressing"},   {20, "compute_mode"},
      {89, "concurrent_managed"},    {90, "compute_preemption"},   {99, "host_register"},
      {102, "virtual_memory"},       {103, "posix_fd_handles"},    {115, "memory_pools"},
      {110, "gpu_direct_rdma"},      {132, "multicast"},           {38, "l2_cache_bytes"},
      {36, "memory_clock_khz"},      {37, "memory_bus_bits"},      {78, "stream_priorities"},
      {122, "stream_mem_ops"},
  };
  int version = 0, count = 0;
  driver_load();
  check(cu.Init(0), "cuInit");
  check(cu.DriverGetVersion(&version), "cuDriverGetVersion");
  check(cu.DeviceGetCount(&count), "cuDeviceGetCount");
  json_open();
  json_number("cuda_version", version);
  json_number("device_count", count);
  json_array("devices");
  for (int at = 0; at < count; at++) {
    CUdevice device;
    CUuuid uuid;
    char name[128], bus[32], text[64] = "GPU-";
    size_t total, end = 4;
    check(cu.DeviceGet(&device, at), "cuDeviceGet");
    check(cu.DeviceGetName(name, sizeof name, device), "cuDeviceGetName");
    check(cu.DeviceGetUuid(&uuid, device), "cuDeviceGetUuid");
    check(cu.DeviceTotalMem(&total, device), "cuDeviceTotalMem");
    check(cu.DeviceGetPCIBusId(bus, sizeof bus, device), "cuDeviceGetPCIBusId");
    for (int i = 0; i < 16; i++) {
      if (i == 4 || i == 6 || i == 8 || i == 10) text[end++] = '-';
      end += (size_t)snprintf(text + end, sizeof text - end, "%02x", uuid.bytes[i]);
    }
    json_object(NULL);
    json_text("name", name);
    json_text("uuid", text);
    json_text("pci", bus);
    json_number("total_bytes", (double)total);
    for (size_t i = 0; i < sizeof attributes / sizeof *attributes; i++) {
      int value;
      if (!cu.DeviceGetAttribute(&value, attributes[i].attribute, device)) json_number(attributes[i].name, value);
    }
    json_end();
  }
  json_end();
  nvml_report();
  json_flag("mps_pipe", !access("/tmp/nvidia-mps/control", F_OK) || getenv("CUDA_MPS_PIPE_DIRECTORY"));
  json_close();
  return 0;
}

static void stage(const char *name, int has_context) {
  struct nvml_memory memory = nvml_memory();
  size_t free_bytes = 0, total = 0;
  json_object(NULL);
  json_text("stage", name);
  json_number("at_ns", (double)now_ns());
  json_number("nvml_used_bytes", memory.used_bytes);
  json_number("nvml_own_bytes", memory.own_bytes);
  if (has_context) {
    check(cu.MemGetInfo(&free_bytes, &total), "cuMemGetInfo");
    json_number("free_bytes", (double)free_bytes);
    json_number("total_bytes", (double)total);
  }
  json_end();
}

/* Device memory at each step from nothing to a first launch. */
int mode_context(int argc, char **argv) {
  (void)argc, (void)argv;
  CUcontext context;
  driver_load();
  json_open();
  json_array("stages");
  stage("start", 0);
  check(cu.Init(0), "cuInit");
  stage("cuInit", 0);
  check(cu.DevicePrimaryCtxRetain(&context, 0), "cuDevicePrimaryCtxRetain");
  check(cu.CtxSetCurrent(context), "cuCtxSetCurrent");
  stage("context", 1);
  CUfunction empty = kernel("probe_empty");
  stage("module", 1);
  check(cu.LaunchKernel(empty, 1, 1, 1, 1, 1, 1, 0, NULL, NULL, NULL), "cuLaunchKernel");
  check(cu.CtxSynchronize(), "cuCtxSynchronize");
  stage("launch", 1);
  CUdeviceptr address;
  check(cu.MemAlloc(&address, 64 << 20), "cuMemAlloc");
  stage("alloc_64MiB", 1);
  json_end();
  json_close();
  return 0;
}
