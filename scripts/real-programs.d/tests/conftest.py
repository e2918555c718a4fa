"""What the tests of driver-reach share: a context for each, and statuses as exceptions."""

import pytest
from cuda.bindings import driver

PTX = b"""
.version 7.8
.target sm_80
.address_size 64
.visible .global .align 4 .u32 answer = 42;
.visible .entry sublet_fill_f32(
    .param .u64 sublet_fill_f32_param_0,
    .param .f32 sublet_fill_f32_param_1,
    .param .u64 sublet_fill_f32_param_2
) { ret; }
.visible .entry sublet_busy_us(.param .u64 sublet_busy_us_param_0) { ret; }
.visible .entry other(.param .u32 other_param_0, .param .u64 other_param_1) .maxntid 128, 1, 1 { ret; }
"""


def check(answer):
    """What a call gave, without its status, which has to be success."""
    status, *values = answer
    assert status == driver.CUresult.CUDA_SUCCESS, status
    return values[0] if len(values) == 1 else tuple(values) or None


def status(answer):
    return answer[0]


@pytest.fixture
def context():
    check(driver.cuInit(0))
    device = check(driver.cuDeviceGet(0))
    made = check(driver.cuDevicePrimaryCtxRetain(device))
    check(driver.cuCtxSetCurrent(made))
    yield made
    check(driver.cuCtxSetCurrent(None))
    check(driver.cuDevicePrimaryCtxRelease(device))


@pytest.fixture
def stream(context):
    del context
    made = check(driver.cuStreamCreate(driver.CUstream_flags.CU_STREAM_NON_BLOCKING))
    yield made
    check(driver.cuStreamDestroy(made))


@pytest.fixture
def module(context):
    del context
    made = check(driver.cuModuleLoadData(PTX))
    yield made
    check(driver.cuModuleUnload(made))


@pytest.fixture
def core():
    """cuda.core's device, with its context current."""
    from cuda.core import Device

    device = Device(0)
    device.set_current()
    yield device
    check(driver.cuCtxPopCurrent())
