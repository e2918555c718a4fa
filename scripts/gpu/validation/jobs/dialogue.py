"""What a worker reads and answers: one JSON object per line in, one per line out."""

import json
import sys
import traceback


def follow(jobs, answer):
    """Calls the function of `jobs` that each line names, until one says `exit`; answers with what it returns, or its error."""
    for line in sys.stdin:
        words = json.loads(line)
        do = words.pop("do")
        if do == "exit":
            return
        try:
            answer(**getattr(jobs, do)(**words))
        except Exception as error:
            traceback.print_exc()
            answer(error=type(error).__name__, message=str(error))
