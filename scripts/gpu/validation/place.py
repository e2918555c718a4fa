"""Where things are: inside a pack (`bin/`), or in a checkout (`target/release`, else `target/debug`, or
the folder that SUBLET_TEST_ARTEFACTS names)."""

import os
import pathlib
import platform
import re
import shutil
import subprocess

from .processes import Failure

ROOT = pathlib.Path(__file__).resolve().parents[3]
HERE = pathlib.Path(__file__).resolve().parent


class Place:
    def __init__(self, root=ROOT):
        self.root = root
        self.packed = (root / "bin" / "sublet").exists()
        if self.packed:
            self.bin = root / "bin"
        else:
            target = pathlib.Path(os.environ.get("CARGO_TARGET_DIR", root / "target"))
            tested = os.environ.get("SUBLET_TEST_ARTEFACTS")
            profiles = [pathlib.Path(tested)] if tested else [target / profile for profile in ("release", "debug")]
            self.bin = next((path for path in profiles if (path / "sublet").exists()), profiles[0])
        self.sim_dir = self.bin / "sim"
        self.examples = root / "examples" / "pytorch"
        self.jobs = HERE / "jobs"
        self.sublet = self.bin / "sublet"
        self.library = self.bin / "libsublet.so"
        # Compiled in a checkout; already there in a pack.
        self.tools = self.bin if self.packed else self.bin / "gpu-validation"

    def missing(self, simulated):
        """Files without which nothing can be done."""
        needed = [self.sublet, self.library] + ([self.sim_dir / "libcuda.so.1"] if simulated else [])
        return [str(path) for path in needed if not path.exists()]

    def program(self, name):
        """A program of the project, or None where it was not built."""
        path = self.bin / name
        return path if path.exists() else None

    def probe(self):
        """The probe, compiled if this is a checkout and it is missing or older than its source."""
        path = self.tools / "probe"
        sources = sorted((HERE.parent / "probe").glob("*.[ch]"))
        newest = max((source.stat().st_mtime for source in sources), default=0)
        if path.exists() and (self.packed or path.stat().st_mtime >= newest):
            return path
        return self._compile(path, ["-std=gnu11", "-O2"], [s for s in sources if s.suffix == ".c"], ["-ldl", "-lm", "-lpthread"])

    def stub_bench(self):
        """The bench host of scripts/bench/overhead and the directory of its stub driver."""
        directory = self.tools / "stub"
        host, stub = directory / "host", directory / "libcuda.so.1"
        if not (host.exists() and stub.exists()):
            sources = self.root / "scripts" / "bench" / "overhead.d"
            shared = ["-O2", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-Wl,-Bsymbolic"]
            self._compile(stub, shared, [sources / "stub_driver.c"], [])
            self._compile(host, ["-O2"], [sources / "host.c"], ["-ldl", "-lpthread"])
        return host, stub

    @staticmethod
    def _compile(out, flags, sources, libraries):
        compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc")
        if not sources or not compiler:
            raise Failure(f"{out} is missing and cannot be compiled ({'no C compiler' if sources else 'no source'})")
        out.parent.mkdir(parents=True, exist_ok=True)
        done = subprocess.run([compiler, *flags, "-o", str(out), *map(str, sources), *libraries], capture_output=True, text=True, timeout=60)
        if done.returncode:
            raise Failure(f"{out.name} cannot be compiled: {done.stderr[-1500:]}")
        return out

    def commit(self):
        """The commit that was packed or is checked out; `-dirty` where files differ from it."""
        file = self.root / "COMMIT"
        if file.exists():
            return file.read_text().strip()
        try:
            found = subprocess.run(["git", "-C", str(self.root), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"],
                                   capture_output=True, text=True, timeout=10)
        except (OSError, subprocess.TimeoutExpired):
            return "unknown"
        return found.stdout.strip() or "unknown"


def bare_env(place, simulated, state_dir):
    """The environment of a program without us. The caller's own sublet variables and preloads are not for these programs."""
    env = {key: value for key, value in os.environ.items() if not key.startswith("SUBLET_") and key != "LD_PRELOAD"}
    if simulated:
        env["SUBLET_SIM_STATE"] = str(state_dir)
        env["LD_LIBRARY_PATH"] = ":".join(filter(None, [str(place.sim_dir), env.get("LD_LIBRARY_PATH")]))
    env["PYTHONUNBUFFERED"] = "1"
    return env


def host():
    """What the machine is, without a word on whose it is."""
    return {
        "python": platform.python_version(),
        "kernel": re.match(r"[\d.]*", platform.release())[0].strip(".") or "unknown",
        "cpus": len(os.sched_getaffinity(0)),
        # Above the number of processors something else is at work, and figures of time suffer.
        "load_at_start": round(os.getloadavg()[0], 1),
        "libc": " ".join(platform.libc_ver()).strip() or "unknown",
    }
