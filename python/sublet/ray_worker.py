"""What a process of Ray's becomes whose node's arbiter does not take it as a job: it tries again for a while, and then is a worker that says
why and runs nothing.

Run by path, with the worker's command as arguments; imports the standard library alone, and nothing of this package.
"""

import json
import os
import sys
import time

# A hook of Ray's: run before a worker takes its first task. Where it fails, the worker ends, and
# Ray says so with the reason.
HOOK = "__RAY_WORKER_PROCESS_SETUP_HOOK_ENV_VAR"
AGAIN_S = 0.25


def main(command):
    task = json.loads(os.environ["SUBLET_RAY"])
    reason = os.environ.pop("SUBLET_REFUSED", "")
    # The clock goes on over exec.
    now = time.monotonic()
    until = float(os.environ.setdefault("SUBLET_RAY_UNTIL", str(now + task["wait"])))
    if now < until:
        time.sleep(AGAIN_S)
        own = str(os.getpid()) if task["pid"] else ""
        words = [word + own if word.startswith("--name=") else word for word in task["run"]]
        os.execv(words[0], [*words, "--", *command])
    os.environ["SUBLET_RAY_REFUSED"] = reason
    os.environ[HOOK] = "sublet.ray.refuse"
    path = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = f"{task['path']}:{path}" if path else task["path"]
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1:])
