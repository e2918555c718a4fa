"""Says when a process that only sleeps was not let on: one line of begin and end, in CLOCK_MONOTONIC seconds, for each time."""

import sys
import time

NAP_S = 0.02
OVERSLEPT_S = 0.05

before = time.monotonic()
while True:
    time.sleep(NAP_S)
    now = time.monotonic()
    if now - before > NAP_S + OVERSLEPT_S:
        try:
            print(before, now, flush=True)
        except OSError:
            sys.exit(0)
    before = now
