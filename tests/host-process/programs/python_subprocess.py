"""A process that uses the driver starts others by every way that subprocess has, with and without its environment."""

import os
import subprocess
import sys

from python_multiprocessing import use

print("parent", use())
for options in ({}, {"close_fds": False}, {"start_new_session": True}, {"env": {"PATH": os.environ["PATH"]}}):
    done = subprocess.run(["sh", "-c", "echo out; echo err >&2; exit 3"], capture_output=True, text=True, **options)
    print(sorted(options), done.returncode, done.stdout.split(), done.stderr.split())
done = subprocess.run([sys.executable, "-c", "from python_multiprocessing import use; print(use())"], capture_output=True, text=True, cwd=sys.path[0])
print("child", done.returncode, done.stdout.split(), done.stderr.split())
print("parent", use())
