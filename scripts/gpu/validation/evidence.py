"""What is kept of a section that failed, beside what its programs printed: a borrowed machine can rarely be asked again."""

import contextlib
import glob
import os
import pathlib
import shutil
import subprocess

MOST_BYTES = 256 << 10
MOST_THREADS = 400


def collect(directory, arbiters, processes, simulated):
    """Writes files to `directory` and returns their names. What cannot be read is said in the file's place; nothing here fails a run."""
    written = []

    def keep(name, text):
        with contextlib.suppress(OSError):
            directory.mkdir(parents=True, exist_ok=True)
            data = text.encode("utf-8", "replace")
            (directory / name).write_bytes(data if len(data) <= MOST_BYTES else b"...\n" + data[-MOST_BYTES:])
            written.append(name)

    keep("threads.txt", threads(processes))
    keep("cgroup.txt", cgroup())
    keep("dmesg.txt", said_by(["dmesg", "--ctime"], 5))
    if not simulated:
        keep("nvidia-smi.txt", said_by(["nvidia-smi", "-q"], 20))
    for at, arbiter in enumerate(arbiters, 1):
        for journal in sorted(glob.glob(f"{glob.escape(str(arbiter))}/journal*")):
            keep(f"arbiter-{at}-{pathlib.Path(journal).name}", read(journal))
    return written


def read(path, most=MOST_BYTES):
    try:
        with open(path, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - most))
            return file.read(most).decode("utf-8", "replace")
    except (OSError, ValueError) as error:
        # Files of /proc cannot be sought from their end.
        try:
            with open(path, "rb") as file:
                return file.read(most).decode("utf-8", "replace")
        except OSError:
            return f"({path}: {error})\n"


def said_by(words, timeout_s):
    if not shutil.which(words[0]):
        return f"({words[0]} is not installed)\n"
    try:
        done = subprocess.run(words, capture_output=True, timeout=timeout_s, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"({' '.join(words)}: {error})\n"
    return (done.stdout + done.stderr).decode("utf-8", "replace")


def threads(processes):
    """State, name, wait channel, system call and kernel stack of every thread of the section's programs that still run."""
    sessions = {process.pid: process.name for process in processes if not process.has_exited()}
    lines = []
    for stat in glob.glob("/proc/[0-9]*/stat"):
        fields = read(stat, 4096).rpartition(")")[2].split()
        # State, parent, process group, session.
        if len(fields) < 4 or not fields[3].isdigit() or int(fields[3]) not in sessions:
            continue
        pid = stat.split("/")[2]
        lines.append(f"process {pid} of {sessions[int(fields[3])]}: {read(f'/proc/{pid}/cmdline', 4096).replace(chr(0), ' ')[:200]}")
        for task in sorted(glob.glob(f"/proc/{pid}/task/[0-9]*")):
            if len(lines) > MOST_THREADS:
                return "\n".join([*lines, "(and more)"]) + "\n"
            state = read(f"{task}/stat", 4096).rpartition(")")[2].split()[:1]
            parts = [read(f"{task}/{name}", 4096).strip().replace("\n", " < ") for name in ("comm", "wchan", "syscall", "stack")]
            lines.append(f"  {task.rpartition('/')[2]} {''.join(state)} " + " | ".join(parts))
    return "\n".join(lines or ["(none of the section's programs was running)"]) + "\n"


def cgroup():
    """Limits and use of memory, processors and processes, from the process's own control group up to the root, version 1 and 2."""
    lines = [read("/proc/self/cgroup", 4096)]
    for row in lines[0].splitlines():
        _, _, rest = row.partition(":")
        controllers, _, path = rest.partition(":")
        for name in [""] if not controllers else controllers.split(","):
            root = pathlib.Path("/sys/fs/cgroup") / name
            group = root / path.strip("/")
            while True:
                for file in ("memory.max", "memory.high", "memory.current", "memory.events", "cpu.max", "pids.max", "pids.current",
                             "memory.limit_in_bytes", "memory.usage_in_bytes", "cpu.cfs_quota_us"):
                    if (group / file).is_file():
                        lines.append(f"{group / file}: {read(group / file, 4096).strip()}")
                if group == root or root not in group.parents:
                    break
                group = group.parent
    return "\n".join(lines) + "\n"
