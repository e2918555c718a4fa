"""scripts/slurm with a release of Slurm that is not this machine's: in a root of the Debian suite that has it, with namespaces of its own."""

import os
import pathlib
import subprocess

import debian_root
from trial import Skipped

# Which suite has which release. Suites that move are asked for their version.
SUITES = {"22.05": "bookworm", "24.11": "trixie", "26.05": "forky"}
PACKAGES = ["slurmctld", "slurmd", "slurm-client", "slurm-wlm-basic-plugins", "liblua5.1-0", "python3", "iproute2", "mount", "util-linux"]
HOST = "slurm"
HERE = pathlib.Path(__file__).resolve().parent


def make(release, cache, directory):
    """The root of a release, below a directory that is this run's own."""
    tar = debian_root.root_tar(cache, "slurm", SUITES[release], PACKAGES)
    root = directory / "root"
    version = debian_root.unpack(tar, root, ["slurmctld"])["slurmctld"]
    if not version.startswith(f"{release}."):
        raise Skipped(f"{SUITES[release]} has Slurm {version} ({tar})")
    for name, text in (("hosts", f"127.0.0.1 localhost {HOST}\n"), ("resolv.conf", ""), ("ld.so.preload", "")):
        (root / "etc" / name).write_text(text)
    return root, version


def words(root, shared, command):
    """A command, with what runs it in the root."""
    spaces = ["unshare", "--mount", "--propagation", "private", "--net", "--uts", "--pid", "--fork", "--kill-child"]
    return [str(word) for word in [*spaces, "sh", HERE / "in_root.sh", root, HOST, *shared, "--", *command]]


def run(script, release, cache, directory, artefacts, arguments, commit):
    """Runs the script again inside; its exit status."""
    directory = pathlib.Path(directory)
    # Jobs are another user's.
    directory.chmod(0o755)
    root, version = make(release, cache, directory)
    temporary = directory / "tmp"
    temporary.mkdir()
    temporary.chmod(0o1777)
    shared = [script.parents[1], artefacts, temporary]
    env = {"LANG": "C.UTF-8", "HOME": "/root", "TERM": os.environ.get("TERM", "dumb"), "TMPDIR": str(temporary)}
    env |= {"PATH": os.environ["PATH"], "SUBLET_TEST_ARTEFACTS": str(artefacts), "SUBLET_COMMIT": commit}
    # What was built for this machine's C library runs with a newer one, and not always with an
    # older one.
    runs = words(root, shared, [artefacts / "sublet", "--version"])
    try:
        tried = subprocess.run(runs, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Skipped(str(error)) from error
    if tried.returncode:
        raise Skipped(f"what is built here does not run in {SUITES[release]}: {(tried.stderr or tried.stdout).strip()[-300:]}")
    print(f"Slurm {version} in a root of {SUITES[release]}", flush=True)
    return subprocess.run(words(root, shared, ["python3", script, *arguments]), env=env).returncode


def is_empty(directory):
    """Whether what ran inside has kept nothing."""
    return not any((pathlib.Path(directory) / "tmp").glob("sublet-*"))
