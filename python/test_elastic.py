"""Workers that join and leave at the end of an iteration: with processes, without a GPU."""

import hashlib
import json
import os
import pathlib
import signal
import socket
import struct
import subprocess
import sys
import threading
import time

from sublet import elastic

SIZES = {"weights": 3 << 20, "momentum": 1 << 20}
STEPS = 400
DEADLINE_S = 60


class Model:
    """Its state depends on every step that it has made, and on their order."""

    def __init__(self):
        self.parts = {name: bytearray(size) for name, size in SIZES.items()}

    def train(self, number):
        for part in self.parts.values():
            at = number * 64 % len(part)
            part[at : at + 32] = hashlib.sha256(bytes(part[:32]) + struct.pack("<Q", number)).digest()
            part[:32] = part[at : at + 32]

    def save(self, name, view):
        view[:] = self.parts[name]

    def load(self, name, view):
        self.parts[name][:] = view

    def digest(self):
        return hashlib.sha256(b"".join(bytes(part) for part in self.parts.values())).hexdigest()


def expected(steps=STEPS):
    model = Model()
    for number in range(steps):
        model.train(number)
    return model.digest()


def newcomer(steps):
    """In a process of its own: joins, trains to the end, and says how that was."""
    model = Model()
    follow = elastic.join(SIZES, model.load, patience=DEADLINE_S)
    print(json.dumps({"joined": follow.step_number, "members": follow.members, "rank": follow.rank}), flush=True)
    seen = [follow.members]
    for number in range(follow.step_number + 1, steps):
        model.train(number)
        try:
            change = follow.step(number)
        except elastic.Lost:
            print(json.dumps({"lost": number, "digest": model.digest()}), flush=True)
            return
        if change is not None:
            seen.append(change.members)
            if change.members == 0:
                break
    print(json.dumps({"digest": model.digest(), "seen": seen}), flush=True)


def stranger(how):
    """In a process of its own: shakes hands as a newcomer does, and then misbehaves."""
    secret = elastic._secret(None)
    deadline = time.monotonic() + DEADLINE_S
    peer = elastic._connected(secret, deadline)
    if how == "mute":
        time.sleep(DEADLINE_S)
    nonce = bytes.fromhex(elastic._receive(peer, deadline)["nonce"])
    sizes = {**SIZES, "weights": 1} if how == "size" else SIZES
    proof = elastic._proof(b"guessed" if how == "secret" else secret, b"follow", nonce)
    elastic._send(peer, {"proof": proof, "nonce": "00", "sizes": sizes}, deadline)
    if how in ("size", "secret"):
        print(json.dumps({"answer": peer.recv(1000).decode(errors="replace")}), flush=True)
        return
    elastic._receive(peer, deadline)
    peer.settimeout(DEADLINE_S)
    header, fds, _, _ = socket.recv_fds(peer, elastic._HEADER.size, 1)
    message = elastic._parsed(header, peer, deadline)
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "stalls":
        time.sleep(DEADLINE_S)
    if how == "checksum":
        elastic._send(peer, {"sums": {**message["sums"], "weights": 1}}, deadline)
    if how == "noise":
        peer.sendall(b"x" * 100)
    if how == "writes":
        try:
            os.pwrite(fds[0], b"x", 0)
            print(json.dumps({"wrote": True}), flush=True)
        except PermissionError:
            print(json.dumps({"wrote": False}), flush=True)
        return
    try:
        peer.recv(1)
    except ConnectionError:
        pass


def start(*words, fails=False):
    stderr = subprocess.DEVNULL if fails else None
    return subprocess.Popen([sys.executable, __file__, *words], stdout=subprocess.PIPE, stderr=stderr, text=True)


def until(what, seen):
    begun = time.monotonic()
    while not seen():
        assert time.monotonic() - begun < DEADLINE_S, what
        time.sleep(0.002)


def rows(process):
    out, _ = process.communicate(timeout=DEADLINE_S)
    return [json.loads(line) for line in out.splitlines()]


def two_join_at_once_and_no_step_is_lost():
    model = Model()
    changes = []
    with elastic.Lead(SIZES, model.save) as lead:
        others = []
        for number in range(STEPS):
            model.train(number)
            if number == 50:
                others = [start("newcomer", str(STEPS)) for _ in range(2)]
            if number == 100:
                # They have started and shaken hands meanwhile; nobody waited for that.
                until("both are ready", lambda: lead.waiting == 2)
            change = lead.step(number)
            if change is not None:
                changes.append((number, change))
    # One may have been ready an iteration before the other.
    assert sum(change.joined for _, change in changes) == 2 and changes[-1][1].members == 3, changes
    assert all(50 < number <= 100 and not change.left for number, change in changes), changes
    assert lead.refused == [], lead.refused
    for process in others:
        first, last = rows(process)
        assert first["members"] in (2, 3) and 50 <= first["joined"] <= 100, first
        # The lead closes after its last step; who does not know has made it all the same.
        assert last["digest"] == expected(), last
    assert model.digest() == expected()


def who_misbehaves_is_left_behind_and_the_others_go_on(how, words):
    model = Model()
    with elastic.Lead(SIZES, model.save, patience=0.3) as lead:
        good = None
        reasons = []
        process = start("stranger", how)
        number = 0
        handshake = how in ("size", "secret")
        until("it has come", lambda: lead.waiting == 1 or lead.refused)
        if not handshake:
            good = start("newcomer", str(STEPS))
            until("the other one has come", lambda: lead.waiting == 2)
        longest = 0.0
        while number < STEPS:
            model.train(number)
            begun = time.monotonic()
            change = lead.step(number)
            longest = max(longest, time.monotonic() - begun)
            if change is not None:
                reasons.extend(change.left)
            number += 1
        reasons.extend(lead.refused)
    assert any(words in text for text in reasons), (how, reasons)
    # The patience, and what a loaded machine adds to it: nobody waits for a minute.
    assert longest < 10, longest
    if good is not None:
        first, last = rows(good)
        assert first["members"] == 2 and last["digest"] == expected(), (how, first, last)
    if how not in ("size", "secret", "writes"):
        process.kill()
    said = rows(process)
    if how == "size":
        assert "the lead" in said[0]["answer"], said
    if how == "writes":
        assert said == [{"wrote": False}], said
    assert model.digest() == expected()


def one_that_says_nothing_holds_up_nobody():
    model = Model()
    with elastic.Lead(SIZES, model.save) as lead:
        mutes = [start("stranger", "mute") for _ in range(3)]
        good = start("newcomer", "60")
        until("the good one is ready", lambda: lead.waiting == 1)
        for number in range(60):
            model.train(number)
            lead.step(number)
        assert lead.members == 2
    for process in mutes:
        process.kill()
        process.communicate()
    assert rows(good)[-1]["digest"] == expected(60)


def a_follower_that_is_killed_is_missed_and_one_that_loses_its_lead_has_all():
    model = Model()
    lead = elastic.Lead(SIZES, model.save)
    pair = [start("newcomer", "100000") for _ in range(2)]
    until("both are ready", lambda: lead.waiting == 2)
    for number in range(10):
        model.train(number)
        lead.step(number)
    assert lead.members == 3
    pair[0].kill()
    pair[0].communicate()
    for number in range(10, 20):
        model.train(number)
        lead.step(number)
    assert lead.members == 2
    lead.close()
    last = rows(pair[1])[-1]
    assert last["lost"] == 20 and last["digest"] == expected(21), last


def an_error_of_the_programs_own_is_its_own_and_nobody_is_left_waiting():
    def broken(name, view):
        raise KeyError(name)

    with elastic.Lead(SIZES, broken) as lead:
        process = start("newcomer", "10", fails=True)
        until("it is ready", lambda: lead.waiting == 1)
        try:
            lead.step(0)
            raise AssertionError("the program's error is passed on")
        except KeyError:
            pass
        process.communicate(timeout=DEADLINE_S)
        assert process.returncode != 0
        assert lead.step(1) is None
    kept = []
    with elastic.Lead(SIZES, lambda name, view: kept.append(memoryview(view))) as lead:
        process = start("newcomer", "10", fails=True)
        until("it is ready", lambda: lead.waiting == 1)
        try:
            lead.step(0)
            raise AssertionError("a view that is kept is an error")
        except (ValueError, BufferError) as error:
            assert "view" in str(error) or "export" in str(error), error
        process.communicate(timeout=DEADLINE_S)


def nonsense_is_refused():
    for state in ({}, {"a": -1}, {"a": 1.5}, {"a": True}, {1: 1}, {"": 1}, {"a": 1 << 45}):
        try:
            elastic.Lead(state, None)
            raise AssertionError(state)
        except ValueError:
            pass
    with elastic.Lead({"a": 1}, None):
        try:
            elastic.Lead({"a": 1}, None)
            raise AssertionError("two leads")
        except elastic.ElasticError as error:
            assert "leads already" in str(error), error
    for key, words in ((None, "no worker leads"), ("", "no worker leads")):
        try:
            elastic.join({"a": 1}, None, key=key or None, patience=0.2)
            raise AssertionError("nobody leads")
        except elastic.ElasticError as error:
            assert words in str(error), error
    del os.environ["SUBLET_TOKEN"]
    try:
        elastic.join({"a": 1}, None)
        raise AssertionError("no secret")
    except elastic.ElasticError as error:
        assert "sublet run" in str(error), error


def main():
    os.environ.setdefault("SUBLET_TOKEN", os.urandom(16).hex())
    threads = threading.active_count()
    two_join_at_once_and_no_step_is_lost()
    for how, words in (
        ("size", "its state is"),
        ("secret", "does not know the secret"),
        ("killed", "gone"),
        ("stalls", "not loaded the state in time"),
        ("checksum", "it has loaded"),
        ("noise", "does not speak this protocol"),
        ("writes", "gone"),
    ):
        who_misbehaves_is_left_behind_and_the_others_go_on(how, words)
    one_that_says_nothing_holds_up_nobody()
    a_follower_that_is_killed_is_missed_and_one_that_loses_its_lead_has_all()
    an_error_of_the_programs_own_is_its_own_and_nobody_is_left_waiting()
    nonsense_is_refused()
    until("no thread is left", lambda: threading.active_count() == threads)
    print("well")


if __name__ == "__main__":
    sys.path.insert(0, str(pathlib.Path(__file__).parent))
    if sys.argv[1:2] == ["newcomer"]:
        newcomer(int(sys.argv[2]))
    elif sys.argv[1:2] == ["stranger"]:
        stranger(sys.argv[2])
    else:
        main()
