// The few declarations that the host programs need, in plain C types: handles are words, statuses
// are ints.
#pragma once
#include <stddef.h>
#include <stdint.h>

typedef uint64_t cu_word;       // any handle
typedef uint64_t cu_pointer;    // CUdeviceptr
typedef int cu_status;          // CUresult
typedef int cu_device;          // CUdevice

enum { CU_OK = 0, CU_INVALID = 1, CU_OOM = 2, CU_NOT_INITIALISED = 3, CU_NO_DEVICE = 100 };
