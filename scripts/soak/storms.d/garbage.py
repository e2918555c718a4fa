#!/usr/bin/env python3
"""Nonsense for the arbiter's API and the cluster hook: valid messages with bytes changed, cut and put in, without end.

    garbage.py --socket PATH [--port N --token FILE] --seconds S --seed N

Ends with one JSON object: what was sent. Only scripts/soak/storms starts it.
"""

import argparse
import collections
import hashlib
import hmac
import json
import os
import random
import secrets
import socket
import threading
import time

MOST_ROUNDS = 20
WORDS = [b"null", b"-1", b"1e999", b"18446744073709551616", b"9223372036854775807", b"0", b'""', b"[]", b"{}", b"true", b"\xff\xfe", b'"\\ud800"',
         b"NaN", b"1e-320", b"[" * 200, b'"' + b"A" * 70_000 + b'"', b"\n" * 4096, b"\x00"]


def request(method, path, **body):
    body = json.dumps(body).encode() if body else b""
    head = f"{method} {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def api_requests():
    """Nothing here, unchanged, may change how a neighbour is run: that would be an operator's right."""
    spec = {"name": "garbage", "pid": os.getpid(), "command": ["x"], "class": "opportunistic", "simulated": True, "mem": "1GiB"}
    return [request("GET", "/v1/status"), request("GET", "/v1/jobs"), request("POST", "/v1/jobs", **spec), request("POST", "/v1/reload"),
            request("GET", "/v1/events?since_seq=0"), request("GET", "/v1/events/stream?since_seq=0"),
            request("PATCH", "/v1/jobs/garbage", share=0.01, mem="1GiB"),
            request("POST", "/v1/moves", evict=["garbage"], restore=[], deadline_ms=10)]


def bodies():
    job = {"name": "x", "command": ["true"], "gpus": 1, "mem_bytes": 1 << 30, "weight": 1.0, "work_s": 5, "restartable": False, "env": {"A": "b"}}
    node = {"api": 1, "instance": "q", "machine": "m", "boot": "b", "engine": "local", "cpus": 2, "mem_bytes": 1 << 30,
            "devices": [{"uuid": "GPU-x", "name": "nothing", "total_bytes": 1 << 37, "simulated": True}]}
    report = {"instance": "q", "acks": [{"seq": 1, "error": ""}], "runs": [{"run": {"job": 1, "attempt": 1}, "name": "x", "pid": 1, "ended": {"code": 0}}]}
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


class Session:
    """A connection to the hook by one that knows the token (docs/how-to/cluster.md, "Who is obeyed"): what it signs is read to its end."""

    def __init__(self, port, token):
        self.connection = socket.create_connection(("127.0.0.1", port), 2)
        self.connection.settimeout(2)
        nonce = secrets.token_hex(32)
        self.connection.sendall(f"GET /v1/session?nonce={nonce} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        said = json.loads(self.answer())
        hook = said["hook"]
        parts = [nonce, said["nonce"], hook["cluster"], hook["epoch"].to_bytes(8, "little"), hook["nonce"]]
        secret = hashlib.sha256(b"sublet cluster 1\0" + token.encode()).digest()
        if self.code(secret, "hook", *parts).hex() != said["proof"]:
            raise OSError("who answers is not the hook")
        self.key, self.seq = self.code(secret, "key", *parts), 0

    @staticmethod
    def code(key, *parts):
        parts = [part.encode() if isinstance(part, str) else part for part in parts]
        return hmac.new(key, b"".join(len(part).to_bytes(8, "little") + part for part in parts), hashlib.sha256).digest()

    def answer(self):
        text = b""
        while b"\r\n\r\n" not in text:
            text += self.more()
        head, body = text.split(b"\r\n\r\n", 1)
        length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
        while len(body) < length:
            body += self.more()
        return body

    def more(self):
        chunk = self.connection.recv(1 << 16)
        if not chunk:
            raise OSError("closed")
        return chunk

    def ask(self, method, path, body):
        self.seq += 1
        digest = hashlib.sha256(body).hexdigest()
        code = self.code(self.key, "request", self.seq.to_bytes(8, "little"), method, path, digest).hex()
        head = f"{method} {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Sublet seq={self.seq} digest={digest} code={code}\r\n"
        self.connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        return self.answer()


class Garbage:
    def __init__(self, options):
        self.options, self.counts, self.lock = options, collections.Counter(), threading.Lock()
        self.end = time.monotonic() + options.seconds

    def count(self, what):
        with self.lock:
            self.counts[what] += 1

    def exchange(self, open_socket, messages, what):
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

    def api(self):
        def connect():
            connection = socket.socket(socket.AF_UNIX)
            connection.connect(self.options.socket)
            return connection

        self.exchange(connect, api_requests(), "api")

    def inside(self):
        """Bodies that are nonsense, from one that knows the token: the hook reads all of them."""
        rng = random.Random(f"{self.options.seed} inside")
        token = open(self.options.token).readline().strip()
        while time.monotonic() < self.end:
            try:
                session = Session(self.options.port, token)
                for _ in range(rng.randint(1, MOST_ROUNDS)):
                    method, path, body = rng.choice(bodies())
                    session.ask(method, path, b"" if body is None else changed(rng, json.dumps(body).encode()))
                    self.count("http_inside_sent")
                session.connection.close()
            except OSError:
                self.count("http_inside_cut_off")

    def http(self):
        messages = [f"GET /v1/session?nonce={'0' * 64} HTTP/1.1\r\nHost: x\r\n\r\n".encode()]
        for method, path, body in bodies():
            body = b"" if body is None else json.dumps(body).encode()
            code = f"Authorization: Sublet seq=1 digest={'0' * 64} code={'0' * 64}"
            head = f"{method} {path} HTTP/1.1\r\nHost: x\r\n{code}\r\nContent-Length: {len(body)}\r\n\r\n"
            messages.append(head.encode() + body)
        # A head that promises more than ever comes.
        messages.append(b"POST /v1/jobs HTTP/1.1\r\nHost: x\r\nContent-Length: 8388608\r\n\r\n" + b"A" * 4096)
        self.exchange(lambda: socket.create_connection(("127.0.0.1", self.options.port), 2), messages, "http")

    def run(self):
        threads = [threading.Thread(target=self.api) for _ in range(2)]
        if self.options.port:
            threads += [threading.Thread(target=self.http) for _ in range(2)]
        if self.options.port and self.options.token:
            threads.append(threading.Thread(target=self.inside))
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
