"""A pytest plugin of scripts/real-programs: writes down what became of each test, as it happens.

A test may end the process or never end, so each line is written at once: {"test", "event": "start"}, then {"test", "outcome",
"message", "launched", "said"}. Tests that the journal has already are left out, so that a run goes on where the one before stopped; where REAL_PROGRAMS_ONLY names
tests, all others are.

said       what the test itself wrote down (`record_property`), by name
launched   kernels that reached the simulated GPU during the test and that it cannot compute, in all processes that were started
"""

import json
import os

import pytest

JOURNAL = os.environ["REAL_PROGRAMS_JOURNAL"]
PAGES = os.environ.get("SUBLET_SIM_CALLS")
# Word 12 of a page's notes: launches of kernels that nothing computes here.
AT = 16 + 8 * 12


def write(**line):
    with open(JOURNAL, "a") as file:
        file.write(json.dumps(line) + "\n")


def launched():
    total = 0
    for name in os.listdir(PAGES) if PAGES else ():
        if name.endswith(".received"):
            with open(os.path.join(PAGES, name), "rb") as page:
                total += int.from_bytes(page.read(128)[AT:AT + 8], "little")
    return total


def seen():
    found = set()
    if os.path.exists(JOURNAL):
        with open(JOURNAL) as file:
            for line in file:
                found.add(json.loads(line).get("test"))
    return found


def wanted():
    """The tests that were asked for; none: all."""
    path = os.environ.get("REAL_PROGRAMS_ONLY")
    if not path:
        return set()
    with open(path) as file:
        return set(json.load(file))


def redirect_runtime():
    """cuda.core makes five calls of NVIDIA's runtime that the driver answers as well; without that runtime nothing of it could be run."""
    try:
        from cuda.bindings import driver, runtime
    except ImportError:
        return
    success, unknown = runtime.cudaError_t.cudaSuccess, runtime.cudaError_t.cudaErrorUnknown

    def through(call, *results):
        def instead(*args):
            status, *values = call(*args)
            code = success if status == driver.CUresult.CUDA_SUCCESS else unknown
            return (code, *(values or results))

        return instead

    runtime.cudaGetDeviceCount = through(driver.cuDeviceGetCount)
    runtime.cudaDeviceGetPCIBusId = through(driver.cuDeviceGetPCIBusId)
    runtime.cudaDeviceSynchronize = through(driver.cuCtxSynchronize)


if os.environ.get("REAL_PROGRAMS_REDIRECT"):
    redirect_runtime()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    if config.option.collectonly:
        return
    before, only = seen(), wanted()
    stays = [item for item in items if item.nodeid not in before and (not only or item.nodeid in only)]
    kept = set(stays)
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = stays


def message(report):
    text = report.longreprtext if report.longrepr is not None else ""
    crash = getattr(report.longrepr, "reprcrash", None)
    short = crash.message if crash is not None else text.strip().splitlines()[-1] if text.strip() else ""
    # What failed in another process is only in what that wrote.
    return short[:2000], text[-6000:]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item, nextitem):
    del nextitem
    write(test=item.nodeid, event="start")
    item.stash_launched = launched()
    item.stash_worst = None
    try:
        return (yield)
    finally:
        worst = item.stash_worst or {"outcome": "passed", "message": "", "text": ""}
        said = dict(item.user_properties)
        write(test=item.nodeid, launched=launched() - item.stash_launched, **({"said": said} if said else {}), **worst)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    del call
    outcome = report.outcome
    if hasattr(report, "wasxfail"):
        outcome = "xfailed" if report.skipped else "xpassed"
    elif report.failed and report.when != "call":
        outcome = "error"
    # The first stage that did not pass says what became of the test.
    if outcome != "passed" and item.stash_worst is None:
        short, text = message(report)
        said = "".join(part for _, part in report.sections)[-3000:] if report.failed else ""
        item.stash_worst = {"outcome": outcome, "message": short, "text": (text + said) if report.failed else ""}
    return report
