"""NVIDIA's cuda.core: devices, streams, events, memory resources, object code, graphs."""

import numpy as np
import pytest
from conftest import PTX
from cuda.core import (Device, DeviceMemoryResource, DeviceMemoryResourceOptions, EventOptions, GraphCompleteOptions, LaunchConfig,
                       LegacyPinnedMemoryResource, ObjectCode, StreamOptions, launch)


@pytest.fixture
def stream(core):
    made = core.create_stream()
    yield made
    made.close()


def on_host(buffer, kind=np.uint8):
    return np.from_dlpack(buffer).view(kind)


def test_properties_are_those_of_one_device(core):
    assert core.compute_capability == (core.properties.compute_capability_major, core.properties.compute_capability_minor)
    assert core.properties.multiprocessor_count > 0
    assert core.properties.warp_size == 32
    assert core.name and core.uuid and core.pci_bus_id
    assert Device(0) is core
    with pytest.raises(ValueError):
        Device(999)


@pytest.mark.parametrize("nonblocking", [True, False])
@pytest.mark.parametrize("priority", [0, -1])
def test_streams_are_made_as_asked_for(core, nonblocking, priority):
    stream = core.create_stream(options=StreamOptions(nonblocking=nonblocking, priority=priority))
    assert (stream.is_nonblocking, stream.priority) == (nonblocking, priority)
    stream.sync()
    stream.close()


def test_a_stream_waits_for_another_one(core, stream):
    other = core.create_stream()
    event = other.record(options=EventOptions(enable_timing=True))
    stream.wait(event)
    stream.sync()
    assert event.is_done
    other.close()


def test_time_between_events_is_not_negative(core, stream):
    options = EventOptions(enable_timing=True)
    first, last = stream.record(options=options), stream.record(options=options)
    last.sync()
    assert last - first >= 0


@pytest.mark.parametrize("size", [0, 1, 4096, 5 << 20])
def test_buffers_of_the_device_are_filled_and_copied(core, stream, size):
    if size == 0:
        return
    host = LegacyPinnedMemoryResource()
    buffer, seen = core.allocate(size, stream=stream), host.allocate(size)
    buffer.fill(0x21, stream=stream)
    buffer.copy_to(seen, stream=stream)
    stream.sync()
    assert (on_host(seen) == 0x21).all()
    buffer.close(stream)
    seen.close()


@pytest.mark.parametrize("bound", [2048, 2 << 20])
def test_a_bounded_pool_keeps_its_account(core, stream, bound):
    resource = DeviceMemoryResource(core, options=DeviceMemoryResourceOptions(max_size=bound))
    buffer = resource.allocate(1024, stream=stream)
    stream.sync()
    assert resource.attributes.used_mem_current > 0
    buffer.close(stream)
    stream.sync()
    assert resource.attributes.used_mem_current == 0
    resource.close()


def test_an_exportable_pool_has_a_handle(core):
    resource = DeviceMemoryResource(core, options=DeviceMemoryResourceOptions(max_size=2 << 20, ipc_enabled=True))
    assert resource.is_ipc_enabled
    assert int(resource.get_allocation_handle()) >= 0
    resource.close()


@pytest.mark.parametrize("name,count", [("sublet_fill_f32", 3), ("sublet_busy_us", 1), ("other", 2)])
def test_kernels_know_their_arguments(core, name, count):
    kernel = ObjectCode.from_ptx(PTX).get_kernel(name)
    assert kernel.num_arguments == count
    assert kernel.attributes.max_threads_per_block() == (128 if name == "other" else 1024)
    assert kernel.occupancy.max_active_blocks_per_multiprocessor(32, 0) >= 1


def test_a_kernel_is_launched(core, stream):
    kernel = ObjectCode.from_ptx(PTX).get_kernel("sublet_fill_f32")
    host = LegacyPinnedMemoryResource().allocate(64)
    on_host(host)[:] = 0
    launch(stream, LaunchConfig(grid=1, block=32), kernel, host.handle, np.float32(1.5), np.uint64(16))
    stream.sync()
    assert (on_host(host, np.float32) == 1.5).all()
    host.close()


def test_a_graph_with_a_fork_is_built_completed_and_drawn(core, stream, tmp_path):
    kernel = ObjectCode.from_ptx(PTX).get_kernel("sublet_fill_f32")
    host = LegacyPinnedMemoryResource().allocate(128)
    on_host(host)[:] = 0
    config = LaunchConfig(grid=1, block=32)
    builder = core.create_graph_builder().begin_building()
    launch(builder, config, kernel, host.handle, np.float32(1), np.uint64(16))
    left, right = builder.split(2)
    launch(left, config, kernel, host.handle, np.float32(2), np.uint64(16))
    launch(right, config, kernel, host.handle + 64, np.float32(3), np.uint64(16))
    builder = left.join(left, right)
    builder.end_building()
    builder.debug_dot_print(str(tmp_path / "graph.dot").encode())
    assert (tmp_path / "graph.dot").read_text().startswith("digraph")
    graph = builder.complete(GraphCompleteOptions(auto_free_on_launch=True))
    graph.launch(stream)
    stream.sync()
    assert list(on_host(host, np.float32)[[0, 15, 16, 31]]) == [2, 2, 3, 3]
    graph.close()
    host.close()


def test_a_switch_of_a_graph_runs_the_case_of_its_default(core, stream):
    kernel = ObjectCode.from_ptx(PTX).get_kernel("sublet_fill_f32")
    host = LegacyPinnedMemoryResource().allocate(64)
    on_host(host)[:] = 0
    builder = core.create_graph_builder().begin_building()
    handle = builder.create_conditional_handle(default_value=1)
    for number, case in enumerate(builder.switch(handle, 3)):
        case.begin_building()
        launch(case, LaunchConfig(grid=1, block=32), kernel, host.handle, np.float32(number + 1), np.uint64(16))
        case.end_building()
    graph = builder.end_building().complete()
    graph.launch(stream)
    stream.sync()
    assert (on_host(host, np.float32) == 2).all()
    graph.close()
    host.close()
