"""Recordings of `sublet record`, as they are read, cut to steady steps, made from stated figures, and repeated.

The format is docs/reference/recording.md's. What is made here says so: `derived` in its provenance.
"""

import collections
import json
import struct
import zlib

VERSION = 1
RECORD = struct.Struct("<BBBBHHQQQQIIQQ")
Record = collections.namedtuple("Record", "kind flags device sub process thread order at gap took stream object a b")
RECORDS, NAMES, DEVICE, END = 1, 2, 3, 4
PROCESS, SHAPE, LAUNCH = 1, 3, 4
GRAPHS = (5, 6, 7, 8)
TAKE, GIVE, COPY, FILL, STREAM, STREAM_GONE, EVENT, EVENT_GONE, EVENT_RECORDED, EVENT_AWAITED, WAIT, STEP, MEASURED = range(10, 23)
MADE, GONE = (TAKE, STREAM, EVENT), (GIVE, STREAM_GONE, EVENT_GONE)
# A call that returns when its work is done.
BLOCKS = 1
# Records in a block of 65,536 bytes at most.
IN_A_BLOCK = 1000
US, MS = 1000, 1_000_000

Recording = collections.namedtuple("Recording", "provenance names devices records")


def crc(data):
    return zlib.crc32(data) & 0xFFFFFFFF


def parse(data):
    """What is in a whole file."""
    if data[:8] != b"sublet\x1aR":
        raise ValueError("not a sublet recording")
    version, length, checksum, _ = struct.unpack_from("<IIII", data, 8)
    if version != VERSION:
        raise ValueError(f"this recording has version {version}, {VERSION} is read here")
    provenance, at = data[24 : 24 + length], 24 + length
    if crc(provenance) != checksum:
        raise ValueError("the provenance's checksum is another")
    found = Recording(json.loads(provenance), [], [], [])
    while at + 16 <= len(data):
        kind, length, checksum = struct.unpack_from("<III", data, at + 4)
        payload = data[at + 16 : at + 16 + length]
        if data[at : at + 4] != b"SLBK" or crc(data[at + 4 : at + 8] + payload) != checksum:
            raise ValueError(f"the block at byte {at} is damaged")
        if kind == RECORDS:
            found.records.extend(Record(*one) for one in RECORD.iter_unpack(payload))
        elif kind == NAMES:
            found.names.append(payload)
        elif kind == DEVICE:
            found.devices.append(payload)
        at += 16 + length
    return found


def read(path):
    with open(path, "rb") as file:
        return parse(file.read())


def packed(recording):
    """The file of a recording."""
    provenance = json.dumps(recording.provenance, separators=(",", ":")).encode()
    parts = [b"sublet\x1aR", struct.pack("<IIII", VERSION, len(provenance), crc(provenance), 0), provenance]

    def block(kind, payload):
        checksum = crc(struct.pack("<I", kind) + payload)
        parts.append(b"SLBK" + struct.pack("<III", kind, len(payload), checksum) + payload)

    for payload in recording.devices:
        block(DEVICE, payload)
    for payload in recording.names:
        block(NAMES, payload)
    for at in range(0, len(recording.records), IN_A_BLOCK):
        block(RECORDS, b"".join(RECORD.pack(*one) for one in recording.records[at : at + IN_A_BLOCK]))
    end = {"reason": "command-ended", "lost": 0, "records": len(recording.records), "exit": 0}
    block(END, json.dumps(end, separators=(",", ":")).encode())
    return b"".join(parts)


def measured(recording):
    """How long each launch took, in ns, by its order."""
    return {one.a: one for one in recording.records if one.kind == MEASURED}


def calls(recording):
    """The calls, in their order."""
    others = (PROCESS, SHAPE, MEASURED, *GRAPHS[:3])
    return sorted((one for one in recording.records if one.kind not in others), key=lambda one: one.order)


class Writer:
    """Records of calls, one behind the other."""

    def __init__(self):
        self.records, self.order, self.at = [], 0, 0

    def call(self, like, gap_ns, took_ns=1000):
        """A call like that one, so long after the last of its thread."""
        self.records.append(like._replace(order=self.order, at=self.at, gap=gap_ns, took=took_ns))
        self.at += gap_ns + took_ns
        self.order += 1

    def launch(self, like, gap_ns, device_ns):
        self.call(like, gap_ns)
        self.records.append(blank(MEASURED)._replace(device=like.device, process=like.process, a=self.order - 1, b=device_ns))


def blank(kind, thread=0):
    return Record(kind, 0, 1, 0, 1, thread, 0, 0, 0, 0, 0, 0, 0, 0)


def step_starts(all_calls, input_bytes, every):
    """Where steps begin: at each so-manieth copy of so many bytes to the device by the first thread."""
    starts = [at for at, one in enumerate(all_calls) if one.kind == COPY and one.sub == 1 and one.a == input_bytes and one.thread == 1]
    return starts[::every]


def steady(recording, input_bytes, every, first, last, threads, recorder_ns, host_scale, call_ns, least_kernel_ns=1500, waits_each=False):
    """Whole steps, from `first` to before `last`, as they would have been unrecorded.

    Of each kernel `recorder_ns` is taken off, what recording adds to it. Time of the host between and in calls is multiplied by
    `host_scale`; of that a launch on the device that it is for takes `call_ns` itself. What a call waits for the device is not the
    host's. What the steps use is made before the first. With `waits_each` the host waits for the device at the end of each step."""
    lengths, every_call = measured(recording), calls(recording)
    starts = step_starts(every_call, input_bytes, every)
    if last >= len(starts):
        raise ValueError(f"the recording has {len(starts)} beginnings of steps, and step {last} is to end the cut")
    before, window = every_call[: starts[first]], every_call[starts[first] : starts[last]]
    beginnings = {every_call[at].order for at in starts[first:last]}
    made = [one for one in before if one.kind in MADE] + [one for one in window if one.kind in MADE and one.thread in threads]
    known = {one.object for one in made if one.kind == EVENT}
    out = Writer()
    out.records.extend(one for one in recording.records if one.kind == PROCESS)
    out.records.extend(one for one in recording.records if one.kind == SHAPE)
    out.order = len(out.records)
    for one in made:
        out.call(one._replace(thread=1), 0)
    begun, made_at = False, out.at
    for one in window:
        if one.thread not in threads or one.kind in MADE + GONE:
            continue
        if one.kind in (EVENT_RECORDED, EVENT_AWAITED) and one.object not in known:
            continue
        # Threads go on beside each other.
        out.at = made_at + int((one.at - window[0].at) * host_scale)
        waits = one.kind == WAIT or one.kind == COPY and one.flags & BLOCKS
        gap_ns = (one.gap + (0 if waits else one.took)) * host_scale
        if one.order in beginnings:
            if waits_each and begun:
                out.call(blank(WAIT, thread=1), 0)
            begun = True
            # Between two steps its thread may have waited for another one: that is over now.
            out.call(blank(STEP, thread=1), int(gap_ns))
            gap_ns = 0
        if one.kind != LAUNCH:
            out.call(one, int(gap_ns))
            continue
        length = lengths.get(one.order)
        device_ns = max(least_kernel_ns, length.b - recorder_ns) if length else least_kernel_ns
        out.launch(one, max(0, int(gap_ns - call_ns)), int(device_ns))
    if waits_each:
        out.call(blank(WAIT, thread=1), 0)
    return recording._replace(records=out.records)


def synthetic(names, device=b'{"ordinal":0,"name":"none","driver":13000}'):
    """An empty recording with kernels of these names, each in one shape: 128 blocks of 256 threads."""
    listed = b"".join(struct.pack("<IH", at, len(name)) + name.encode() for at, name in enumerate(names))
    shapes = [blank(SHAPE)._replace(object=at + 1, stream=at, a=128 | 1 << 32, b=1, gap=256 | 1 << 16 | 1 << 32) for at in range(len(names))]
    provenance = {"sublet": "0.1.0", "command": "synthetic", "began": "2026-11-29T00:00:00Z", "simulated": True}
    return Recording(provenance, [listed], [device], [blank(PROCESS), *shapes])


def steps_of(recording, steps, launches, kernel_ns, gap_ns, wait_every=0, wait_each=0, pause_ns=0):
    """Adds steps of equal kernels: the host takes `gap_ns` before each, waits for the device after each so-manieth step or launch,
    and pauses at the beginning of a step."""
    out = Writer()
    out.records.extend(recording.records)
    out.order = len(out.records)
    launch = blank(LAUNCH, thread=1)._replace(stream=1, object=1)
    wait = blank(WAIT, thread=1)
    for step in range(steps):
        out.call(blank(STEP, thread=1), 0)
        for at in range(launches):
            out.launch(launch, gap_ns + (pause_ns if at == 0 else 0), kernel_ns)
            if wait_each and (at + 1) % wait_each == 0:
                out.call(wait, 0)
        if wait_every and (step + 1) % wait_every == 0:
            out.call(wait, 0)
    return recording._replace(records=out.records)


def derived(recording, how):
    """It says that it was made, and from what."""
    return recording._replace(provenance={**recording.provenance, "derived": how})


def loop_begin(recording):
    """The order of the first step: calls before it are made once."""
    return min(one.order for one in recording.records if one.kind == STEP)


def repeated(recording, times):
    """Its steps so many times. They make nothing that would have to be given back.

    All of them have the times of the first: steps that come exactly alike would be taken for calls at fixed times, which wait for no
    device."""
    begin = loop_begin(recording)
    in_loop = [one for one in recording.records if (one.a if one.kind == MEASURED else one.order) >= begin and one.kind not in (PROCESS, SHAPE)]
    if any(one.kind in MADE + GONE + GRAPHS for one in in_loop):
        raise ValueError("its steps make something, and cannot be repeated as they are")
    records = [one for one in recording.records if one.kind in (PROCESS, SHAPE) or (one.a if one.kind == MEASURED else one.order) < begin]
    end = max(one.order for one in in_loop) + 1
    for turn in range(times):
        orders = turn * (end - begin)
        for one in in_loop:
            if one.kind == MEASURED:
                records.append(one._replace(a=one.a + orders))
            else:
                records.append(one._replace(order=one.order + orders))
    return recording._replace(records=records)


def figures(recording):
    """Steps, launches, device and host time of a recording, in ms."""
    all_calls, lengths = calls(recording), measured(recording)
    begin = loop_begin(recording)
    loop = [one for one in all_calls if one.order >= begin]
    return {
        "steps": sum(one.kind == STEP for one in loop),
        "launches": sum(one.kind == LAUNCH for one in loop),
        "device_ms": sum(lengths[one.order].b for one in loop if one.kind == LAUNCH and one.order in lengths) / MS,
        "host_ms": sum(one.gap for one in loop) / MS,
    }
