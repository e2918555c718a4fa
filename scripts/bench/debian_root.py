"""Roots of Debian suites other than this machine's: made with mmdebstrap, kept as tar files."""

import os
import pathlib
import re
import shutil
import subprocess

from trial import Skipped

CACHE = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache") / "sublet"


def command(words, patience, **more):
    """Runs a step of making the root; its first error where it fails, or what it says last."""
    try:
        done = subprocess.run(words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=patience, **more)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Skipped(str(error)) from error
    if done.returncode:
        lines = done.stdout.strip().splitlines() or [f"{words[0]} says nothing"]
        raise Skipped(next((line for line in lines if line.startswith("E: ")), lines[-1]))
    return done.stdout


def mirror():
    """Where this machine's own packages come from, if it is Debian."""
    for file in [pathlib.Path("/etc/apt/sources.list.d/debian.sources"), pathlib.Path("/etc/apt/sources.list")]:
        text = file.read_text() if file.exists() else ""
        found = re.search(r"^(?:URIs:|deb)\s.*?(https?://\S+/debian)/?(?:\s|$)", text, re.MULTILINE)
        if found:
            return found[1]
    return "http://deb.debian.org/debian"


def root_tar(cache, name, suite, packages, patience=400):
    """The root as a tar file; made where it is not there."""
    tar = cache / f"{name}-{suite}.tar"
    if tar.exists():
        return tar
    if not shutil.which("mmdebstrap"):
        env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        command(["apt-get", "-q", "-y", "-o", "DPkg::Lock::Timeout=120", "install", "--no-install-recommends", "mmdebstrap"], 180, env=env)
    cache.mkdir(parents=True, exist_ok=True)
    unfinished = cache / f".{tar.name}.{os.getpid()}"
    # Lists of a suite that moves say until when they hold, and a mirror may be behind that. Their
    # signatures are checked.
    words = ["mmdebstrap", "--mode=root", "--variant=essential", "--format=tar", '--aptopt=Acquire::Check-Valid-Until "false"']
    words += [f"--dpkgopt=path-exclude=/usr/share/{name}/*" for name in ("doc", "man", "locale")]
    # Nobody needs what an interrupted run has left.
    words += ["--dpkgopt=force-unsafe-io", f"--include={','.join(packages)}", suite, str(unfinished), mirror()]
    try:
        command(words, patience)
        unfinished.rename(tar)
    finally:
        unfinished.unlink(missing_ok=True)
    return tar


def unpack(tar, root, packages):
    """The tree of a root, and the versions of these packages in it."""
    root.mkdir()
    command(["tar", "-xf", str(tar), "-C", str(root)], 120)
    said = command(["dpkg-query", f"--admindir={root}/var/lib/dpkg", "-W", "-f", "${Package}=${Version}\n", *packages], 30)
    return dict(line.split("=", 1) for line in said.split())
