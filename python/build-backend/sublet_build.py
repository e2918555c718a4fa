"""Builds the Python package: the `sublet` command, its libraries, and the module `sublet`.

A wheel of maturin's kind `bin` holds one command. The libraries beside it are others: the preload library, the simulated driver and NVML,
and the example program of `sublet demo`. They are built first and laid out as they are to lie below the environment's folder
(`lib/sublet`, where the command looks; shell completions, man pages), and maturin takes that as the wheel's data.

Settings, by variable, so that `pip install .` needs none:

SUBLET_WHEEL_GLIBC     oldest glibc that the wheel is for, such as 2.28; needs cargo-zigbuild. Without it the wheel is for this machine.
SUBLET_WHEEL_PROFILE   Cargo's profile, `release` unless given.
CARGO_TARGET_DIR       Cargo's, as ever.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
TRIPLE = "x86_64-unknown-linux-gnu"
PACKAGES = ("cli", "simgpu-libcuda", "simgpu-libnvidia-ml", "examples")
LIBRARIES = {
    "libsublet.so": "libsublet.so",
    "libsimgpu_cuda.so": "sim/libcuda.so.1",
    "libsimgpu_nvidia_ml.so": "sim/libnvidia-ml.so.1",
    "train_mlp": "train_mlp",
}
COMPLETIONS = {
    "bash": "share/bash-completion/completions/sublet",
    "zsh": "share/zsh/site-functions/_sublet",
    "fish": "share/fish/vendor_completions.d/sublet.fish",
}


def run(*words, **more):
    done = subprocess.run([str(word) for word in words], cwd=ROOT, check=False, **more)
    if done.returncode != 0:
        raise SystemExit(f"sublet: `{' '.join(map(str, words))}` ended with exit code {done.returncode}")
    return done


def maturin():
    """What makes the archives; laying files out takes none of it."""
    import maturin as module

    return module


def settings():
    """The glibc asked for, if any, and Cargo's profile and folder of what it builds."""
    glibc = os.environ.get("SUBLET_WHEEL_GLIBC")
    profile = os.environ.get("SUBLET_WHEEL_PROFILE", "release")
    target = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target")).resolve()
    return glibc, profile, target


def build():
    """Builds what the wheel holds; returns the folders that have it, and the preload library."""
    glibc, profile, target = settings()
    for tool, remedy in (("cargo", "install stable Rust, for example with rustup"), ("cc", "install a C compiler, for example gcc")):
        if shutil.which(tool) is None:
            raise SystemExit(f"sublet: {tool} is not installed: {remedy}")
    # The preload library asks for glibc 2.28 at most whatever it is linked against, and has an
    # unwinder of its own, which zig's would come on top of.
    run("cargo", "build", "--profile", profile, "--locked", "-p", "interposer")
    chosen = [word for package in PACKAGES for word in ("-p", package)]
    folder = "debug" if profile == "dev" else profile
    if glibc:
        run("cargo", "zigbuild", "--profile", profile, "--locked", "--target", f"{TRIPLE}.{glibc}", *chosen)
        return target / TRIPLE / folder, target / folder
    run("cargo", "build", "--profile", profile, "--locked", *chosen)
    return target / folder, target / folder


def lay_out(built, preload, data=ROOT / "target" / "wheel" / "data"):
    """The data of the wheel, anew each time."""
    shutil.rmtree(data, ignore_errors=True)
    folder = data / "data" / "lib" / "sublet"
    (folder / "sim").mkdir(parents=True)
    for name, place in LIBRARIES.items():
        shutil.copy2((preload if name == "libsublet.so" else built) / name, folder / place)
        # Line tables are for who builds it; a compiler brings this tool along.
        if shutil.which("strip"):
            run("strip", "--strip-debug", folder / place)
    hook = folder / "python"
    for name in ("step-hook", "sublet"):
        shutil.copytree(ROOT / "python" / name, hook / name, ignore=shutil.ignore_patterns("__pycache__"))
    # Some programs open the development name first. A library of no content that needs the other
    # is the same driver under both names, which a copy would not be; wheels hold no links.
    empty = data.parent / "empty.c"
    empty.write_text("")
    needs = ["-Wl,--no-as-needed", f"-L{folder / 'sim'}", "-l:libcuda.so.1", "-Wl,-rpath,$ORIGIN"]
    run("cc", "-shared", "-nostdlib", "-o", folder / "sim" / "libcuda.so", empty, *needs)
    command = built / "sublet"
    for shell, place in COMPLETIONS.items():
        script = run(command, "completions", shell, stdout=subprocess.PIPE).stdout
        path = data / "data" / place
        path.parent.mkdir(parents=True)
        path.write_bytes(script)
    run(command, "man", data / "data" / "share" / "man" / "man1", stdout=subprocess.DEVNULL)
    return data


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    """See PEP 517."""
    glibc, profile, _ = settings()
    lay_out(*build())
    arguments = ["--profile", profile, "--locked"]
    if glibc:
        arguments += ["--target", TRIPLE, "--zig", "--compatibility", f"manylinux_{glibc.replace('.', '_')}"]
    else:
        # For this machine: what it was linked against decides, and pip installs it here.
        arguments += ["--compatibility", "linux"]
    given = dict(config_settings or {})
    given["build-args"] = " ".join(arguments + [str(given.get("build-args", ""))]).strip()
    return maturin().build_wheel(wheel_directory, given, metadata_directory)


def build_sdist(sdist_directory, config_settings=None):
    """See PEP 517."""
    return maturin().build_sdist(sdist_directory, config_settings)


def get_requires_for_build_wheel(config_settings=None):
    return []


def get_requires_for_build_sdist(config_settings=None):
    return []


def prepare_metadata_for_build_wheel(metadata_directory, config_settings=None):
    # maturin looks whether the folder is there, and at nothing in it yet.
    (ROOT / "target" / "wheel" / "data").mkdir(parents=True, exist_ok=True)
    return maturin().prepare_metadata_for_build_wheel(metadata_directory, config_settings)


if __name__ == "__main__":
    print(build_wheel(sys.argv[1] if len(sys.argv) > 1 else str(ROOT / "target/wheel")))
