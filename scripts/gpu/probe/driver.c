/* Loading the driver, errors, clocks and JSON. */
#define _GNU_SOURCE
#include "driver.h"

#include <dlfcn.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

struct driver cu;

void fail(const char *format, ...) {
  va_list arguments;
  va_start(arguments, format);
  fprintf(stderr, "probe: ");
  vfprintf(stderr, format, arguments);
  fprintf(stderr, "\n");
  va_end(arguments);
  exit(1);
}

void check(CUresult status, const char *what) {
  const char *name = NULL;
  if (!status) return;
  if (cu.GetErrorName) cu.GetErrorName(status, &name);
  fail("%s answers %d (%s)", what, status, name ? name : "no name");
}

void driver_load(void) {
  void *library = dlopen("libcuda.so.1", RTLD_NOW);
  if (!library) fail("no driver: %s", dlerror());
#define X(name, symbol, parameters)                                                                                           \
  *(void **)&cu.name = dlsym(library, symbol);                                                                                \
  if (!cu.name) fail("the driver has no %s", symbol);
  DRIVER_FUNCTIONS(X)
#undef X
}

void driver_start(void) {
  CUcontext context;
  driver_load();
  check(cu.Init(0), "cuInit");
  check(cu.DevicePrimaryCtxRetain(&context, 0), "cuDevicePrimaryCtxRetain");
  check(cu.CtxSetCurrent(context), "cuCtxSetCurrent");
}

/* sublet_busy_us is the kernel of that name of the kernel library, so that the simulated driver knows it too. probe_stamp
 * writes the device's clock when it starts and when it ends. */
static const char ptx[] =
    ".version 7.5\n.target sm_75\n.address_size 64\n"
    ".visible .entry probe_empty()\n{\n ret;\n}\n"
    ".visible .entry sublet_busy_us(.param .u64 us)\n{\n"
    " .reg .pred %p; .reg .u64 %t<5>;\n"
    " ld.param.u64 %t0, [us];\n mul.lo.u64 %t0, %t0, 1000;\n mov.u64 %t1, %globaltimer;\n"
    "again:\n mov.u64 %t2, %globaltimer;\n sub.u64 %t3, %t2, %t1;\n setp.lt.u64 %p, %t3, %t0;\n @%p bra again;\n ret;\n}\n"
    ".visible .entry probe_stamp(.param .u64 out, .param .u64 us)\n{\n"
    " .reg .pred %p; .reg .u64 %t<6>;\n"
    " ld.param.u64 %t4, [out];\n cvta.to.global.u64 %t5, %t4;\n"
    " ld.param.u64 %t0, [us];\n mul.lo.u64 %t0, %t0, 1000;\n mov.u64 %t1, %globaltimer;\n"
    " st.global.u64 [%t5], %t1;\n"
    "again:\n mov.u64 %t2, %globaltimer;\n sub.u64 %t3, %t2, %t1;\n setp.lt.u64 %p, %t3, %t0;\n @%p bra again;\n"
    " st.global.u64 [%t5+8], %t2;\n ret;\n}\n";

CUfunction kernel(const char *name) {
  static CUmodule module;
  CUfunction function;
  if (!module) check(cu.ModuleLoadData(&module, ptx), "cuModuleLoadData");
  check(cu.ModuleGetFunction(&function, module, name), name);
  return function;
}

static uint64_t clock_ns(clockid_t clock) {
  struct timespec now;
  clock_gettime(clock, &now);
  return (uint64_t)now.tv_sec * 1000000000ull + (uint64_t)now.tv_nsec;
}

uint64_t now_ns(void) { return clock_ns(CLOCK_MONOTONIC); }
uint64_t cpu_ns(void) { return clock_ns(CLOCK_THREAD_CPUTIME_ID); }

static char closing[16];
static int depth, members;

static void member(const char *name) {
  if (members++) putchar(',');
  if (name) printf("\"%s\":", name);
}

static void begin(const char *name, char open, char close) {
  if (depth == (int)sizeof closing) fail("JSON nested too deep");
  member(name);
  putchar(open);
  closing[depth++] = close;
  members = 0;
}

void json_open(void) { begin(NULL, '{', '}'); }
void json_object(const char *name) { begin(name, '{', '}'); }
void json_array(const char *name) { begin(name, '[', ']'); }

void json_end(void) {
  putchar(closing[--depth]);
  members = 1;
}

void json_close(void) {
  json_end();
  putchar('\n');
  if (fflush(stdout)) fail("stdout cannot be written");
}

void json_number(const char *name, double value) {
  member(name);
  if (isnan(value)) printf("null");
  else printf("%.17g", value);
}

void json_flag(const char *name, int value) {
  member(name);
  printf(value ? "true" : "false");
}

void json_text(const char *name, const char *value) {
  member(name);
  putchar('"');
  for (; *value; value++) {
    const unsigned char c = (unsigned char)*value;
    if (c == '"' || c == '\\') printf("\\%c", c);
    else if (c < 0x20 || c > 0x7e) printf("\\u%04x", c);
    else putchar(c);
  }
  putchar('"');
}

void json_list(const char *name, const double *values, size_t count) {
  json_array(name);
  for (size_t i = 0; i < count; i++) json_number(NULL, values[i]);
  json_end();
}
