"""As a data loader does it: the parent trains, forked workers hand it batches through a queue and never touch CUDA."""

import multiprocessing
import os
import sys

from python_multiprocessing import use


def worker(number, batches, queue):
    for batch in range(batches):
        queue.put((number, batch, bytes([number]) * 1000))


if __name__ == "__main__":
    method = multiprocessing.get_context("fork")
    queue = method.Queue(8)
    print("parent", use())
    workers = [method.Process(target=worker, args=(number, 20, queue)) for number in range(4)]
    for process in workers:
        process.start()
    seen = 0
    for turn in range(80):
        number, _, data = queue.get(timeout=60)
        seen += data == bytes([number]) * 1000
        if use():
            sys.exit("the driver failed")
        if turn == 10 and len(sys.argv) > 1:
            # The watcher sees the workers' processes while all of them live.
            print("watch", os.getpid(), flush=True)
            sys.stdin.readline()
    for process in workers:
        process.join(60)
    print("batches", seen, "exits", [process.exitcode for process in workers])
