#!/usr/bin/env python3
"""Nonsense for the control socket and the cluster hook: valid messages with bytes changed, cut and put in, without end.

    garbage.py --socket PATH [--port N --token FILE] --seconds S --seed N

Ends with one JSON object: what was sent. Only scripts/soak/storms starts it.
"""

import argparse
import collections
import json
import os
import random
import socket
import threading
import time

MOST_ROUNDS = 20
WORDS = [b"null", b"-1", b"1e999", b"18446744073709551616", b"9223372036854775807", b"0", b'""', b"[]", b"{}", b"true", b"\xff\xfe", b'"\\ud800"',
         b"NaN", b"1e-320", b"[" * 200, b'"' + b"A" * 70_000 + b'"', b"\n" * 4096, b"\x00"]


def request(kind, **body):
    return json.dumps({"v_major": 1, "v_minor": 0, "request": {"kind": kind, "body": body} if body else {"kind": kind}}).encode()


def control_lines():
    """Nothing here, unchanged, may change how a neighbour is run: that would be an operator's right."""
    spec = {"name": "garbage", "pid": os.getpid(), "command": ["x"], "class": "opportunistic", "simulated": True, "mem": {"bytes": 1 << 30}}
    return [request("status"), request("list"), request("register", **spec), request("events", since=0, wait_ms=0), request("reload"),
            request("set", job="garbage", change={"share": 0.01, "mem": {"bytes": 1 << 30}}), request("evict", jobs=["garbage"]),
            request("move", evict=["garbage"], restore=[], deadline_ms=10)]


def bodies():
    job = {"name": "x", "command": ["true"], "gpus": 1, "mem_bytes": 1 << 30, "weight": 1.0, "work_s": 5, "restartable": False, "env": {"A": "b"}}
    node = {"api": 1, "instance": "q", "machine": "m", "boot": "b", "engine": "local", "cpus": 2, "mem_bytes": 1 << 30,
            "devices": [{"uuid": "GPU-x", "name": "nothing", "total_bytes": 1 << 37, "simulated": True}]}
    report = {"instance": "q", "acks": [{"seq": 1, "error": ""}], "runs": [{"run": {"job": 1, "go": 1}, "name": "x", "pid": 1, "ended": {"code": 0}}]}
    return [("POST", "/v1/jobs", job), ("PUT", "/v1/nodes/ghost", node), ("POST", "/v1/nodes/ghost/report", report),
            ("DELETE", "/v1/jobs/-1", None), ("GET", "/v1/jobs/%2e%2e%2f", None), ("GET", "/v1/jobs", None)]


def changed(rng, message):
    message = bytearray(message)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(message) + 1)
        kind = rng.randrange(3)
        if kind == 0 and at < len(message):
            message[at] = rng.randrange(256)
        elif kind == 1:
            del message[at:at + rng.randint(1, 12)]
        else:
            message[at:at] = rng.choice(WORDS)
    return bytes(message)


class Garbage:
    def __init__(self, options):
        self.options, self.counts, self.lock = options, collections.Counter(), threading.Lock()
        self.end = time.monotonic() + options.seconds

    def count(self, what):
        with self.lock:
            self.counts[what] += 1

    def talk(self, open_socket, messages, what):
        """Sends some messages on a connection; now and then it is left open, half a message sent, until the end."""
        rng = random.Random(f"{self.options.seed} {what} {threading.get_ident()}")
        kept = []
        while time.monotonic() < self.end:
            try:
                connection = open_socket()
                connection.settimeout(1)
                for _ in range(rng.randint(1, MOST_ROUNDS)):
                    connection.sendall(changed(rng, rng.choice(messages)))
                    self.count(f"{what}_sent")
                    if rng.random() < 0.7:
                        connection.recv(1 << 16)
                if rng.random() < 0.05 and len(kept) < 100:
                    kept.append(connection)
                    self.count(f"{what}_left_open")
                else:
                    connection.close()
            except OSError:
                self.count(f"{what}_cut_off")
        for connection in kept:
            connection.close()

    def control(self):
        def connect():
            connection = socket.socket(socket.AF_UNIX)
            connection.connect(self.options.socket)
            return connection

        self.talk(connect, [line + b"\n" for line in control_lines()], "control")

    def http(self):
        token = open(self.options.token).read().strip() if self.options.token else ""
        messages = []
        for method, path, body in bodies():
            body = b"" if body is None else json.dumps(body).encode()
            head = f"{method} {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {token}\r\nContent-Length: {len(body)}\r\n\r\n"
            messages.append(head.encode() + body)
        # A head that promises more than ever comes.
        messages.append(b"POST /v1/jobs HTTP/1.1\r\nHost: x\r\nContent-Length: 8388608\r\n\r\n" + b"A" * 4096)
        self.talk(lambda: socket.create_connection(("127.0.0.1", self.options.port), 2), messages, "http")

    def run(self):
        threads = [threading.Thread(target=self.control) for _ in range(2)]
        if self.options.port:
            threads += [threading.Thread(target=self.http) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        print(json.dumps(dict(self.counts)), flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--socket", required=True)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--token")
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--seed", type=int, default=1)
    Garbage(parser.parse_args()).run()


if __name__ == "__main__":
    main()
