"""Workers that join and leave a training job at the end of an iteration, without a restart and without a file.

    state = {"weights": size_in_bytes, "momentum": size_in_bytes}

    # in the worker that trains
    lead = sublet.elastic.Lead(state, save)
    for number, batch in enumerate(batches):
        train(batch, lead.members)
        lead.step(number)

    # in one that comes later
    follow = sublet.elastic.join(state, load)
    for number in itertools.count(follow.step_number + 1):
        train(batches[number], follow.members)
        follow.step(number)

After Elan (L. Xie et al., "Elan: Towards Generic and Efficient Elastic Training for Deep Learning", ICDCS 2020): a newcomer starts, loads
its libraries and shakes hands while the others train; at the end of an iteration the lead copies its state once into memory that both map,
every newcomer of that moment takes it from there, and all go on with the next step. Who is slow, dies or lies in the middle is left behind.

What travels is bytes by name. `save(name, view)` fills a writable view with the state of that name, from a GPU by one copy; `load(name, view)`
takes it over. Gradients are the program's own affair: `members` says how many workers there are and `rank` which one this is, from the step
after the one that was ended.

Workers find each other by a secret, on one host: that of their job, or `key` where they are of several jobs. Nothing but the standard library is
imported.
"""

from __future__ import annotations

import fcntl
import hashlib
import hmac
import json
import mmap
import os
import selectors
import socket
import struct
import threading
import time
import zlib

__all__ = ["Change", "ElasticError", "Follow", "Lead", "Lost", "join"]

_HEADER = struct.Struct("<4sI")
_MAGIC = b"sEl1"
_MOST_BYTES = 1 << 16
_GO = struct.Struct("<QII")
# TIMEOUT: a handshake is three small messages; one that is slower than this is not meant.
_HANDSHAKE_S = 5.0
# TIMEOUT: between the first byte of an answer and its last.
_ANSWER_S = 0.1
# Handshakes that are under way at a time, and newcomers that are ready: strangers do not fill our
# memory.
_MOST_PENDING = 32
_MOST_STATE = 1 << 44
# Linux' fcntl.h; Python 3.10 names them.
_F_ADD_SEALS, _F_GET_SEALS = 1033, 1034
_SEALS = 0x1 | 0x2 | 0x4 | 0x8  # no more seals, no shrinking, no growing, no writing
_CHUNK = 8 << 20
# Linux' mman.h; Python 3.10 names it.
_MAP_POPULATE = 0x8000


class ElasticError(RuntimeError):
    """A worker could not join: what happened, and what to do."""


class Lost(ElasticError):
    """The lead is gone, or does not answer in time. This worker has all of the state of the step before, and may go on by itself."""


class Change:
    """The workers from the next step on: how many, which of them this is, who came, and who was left behind and why."""

    def __init__(self, members, rank, joined=0, left=(), pause_s=0.0):
        self.members, self.rank, self.joined, self.left, self.pause_s = members, rank, joined, list(left), pause_s

    def __repr__(self):
        return f"Change(members={self.members}, rank={self.rank}, joined={self.joined}, left={self.left}, pause_s={self.pause_s:.3f})"


def _secret(key):
    key = key if key is not None else os.environ.get("SUBLET_TOKEN")
    if not key:
        raise ElasticError("workers find each other by the secret of their job, and this is none: start them by `sublet run`, or give key=")
    return key.encode() if isinstance(key, str) else bytes(key)


def _address(secret):
    return b"\0sublet-elastic-" + hashlib.sha256(b"name" + secret).hexdigest()[:32].encode()


def _proof(secret, role, nonce):
    return hmac.new(secret, role + nonce, "sha256").hexdigest()


def _checked(state):
    """Names and sizes, as they travel."""
    sizes = {}
    for name, size in state.items():
        if not isinstance(name, str) or not 0 < len(name) <= 256:
            raise ValueError(f"a name of a state is 1 to 256 characters, this is {name!r}")
        if isinstance(size, bool) or not isinstance(size, int) or size < 0:
            raise ValueError(f"state {name!r} has a size of {size!r}: give bytes")
        sizes[name] = size
    if not sizes or sum(sizes.values()) > _MOST_STATE:
        raise ValueError(f"{len(sizes)} states of {sum(sizes.values())} bytes: there has to be one, and no more than {_MOST_STATE} bytes")
    if len(json.dumps(sizes)) > _MOST_BYTES // 2:
        raise ValueError(f"{len(sizes)} states: put some of them together")
    return sizes


def _left(deadline):
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("no answer in time")
    return left


def _exactly(peer, count, deadline):
    data = bytearray()
    while len(data) < count:
        peer.settimeout(_left(deadline))
        more = peer.recv(count - len(data))
        if not more:
            raise ConnectionError("its process has gone")
        data += more
    return bytes(data)


def _send(peer, message, deadline, fd=None):
    data = json.dumps(message).encode()
    data = _HEADER.pack(_MAGIC, len(data)) + data
    peer.settimeout(_left(deadline))
    if fd is None:
        peer.sendall(data)
    else:
        sent = socket.send_fds(peer, [data], [fd])
        if sent < len(data):
            peer.sendall(data[sent:])


def _parsed(header, peer, deadline):
    magic, count = _HEADER.unpack(header)
    if magic != _MAGIC or count > _MOST_BYTES:
        raise ConnectionError(f"it does not speak this protocol: {header!r}")
    try:
        message = json.loads(_exactly(peer, count, deadline))
    except ValueError as error:
        raise ConnectionError(f"it sends what is no message: {error}") from None
    if not isinstance(message, dict):
        raise ConnectionError(f"it sends {type(message).__name__} for a message")
    return message


def _receive(peer, deadline):
    return _parsed(_exactly(peer, _HEADER.size, deadline), peer, deadline)


def _word(message, name, kind):
    value = message.get(name)
    if not isinstance(value, kind) or isinstance(value, bool):
        raise ConnectionError(f"its message has {value!r} for {name}")
    return value


def _same_user(peer):
    _, uid, _ = struct.unpack("3i", peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return uid == os.geteuid()


def _sum_of(view):
    total = 0
    for at in range(0, len(view), _CHUNK):
        total = zlib.crc32(view[at : at + _CHUNK], total)
    return total


class _Copy:
    """Memory for one copy of a state. Made before it is needed: to take its pages takes as long as to fill them."""

    def __init__(self, sizes):
        self._sizes, self.total = sizes, sum(sizes.values())
        self.fd = os.memfd_create("sublet-elastic", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self._memory = None
        try:
            # A full host is an error here, and no signal later.
            os.posix_fallocate(self.fd, 0, max(self.total, 1))
            self._memory = mmap.mmap(self.fd, max(self.total, 1), flags=mmap.MAP_SHARED | _MAP_POPULATE)
        except BaseException:
            self.close()
            raise

    def each(self, act):
        _each(self._memory, self._sizes, act)

    def seal(self):
        """Nobody changes it any more; it is mapped nowhere."""
        fcntl.fcntl(self.fd, _F_ADD_SEALS, _SEALS)

    def close(self):
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
        try:
            if self._memory is not None:
                self._memory.close()
        except BufferError:
            pass  # the program keeps a view, and has had its error

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


class Lead:
    """The worker that others join. One thread of the program calls step(); a thread of ours shakes hands with newcomers.

    `start(rank)` starts a newcomer, where `sublet set NAME --resize N` asks for more workers than there are; it is called at the end of an
    iteration and should return at once. Where fewer are asked for, the last ones leave. None: newcomers come by themselves.

    `patience` is how long a newcomer may take to load what it is given, beside a second for each gigabyte. One that is slower is left
    behind; a follower that does not end a step within `step_patience` seconds after the lead has is left behind as well.
    """

    def __init__(self, state, save, *, start=None, key=None, patience=1.0, step_patience=60.0):
        self._sizes, self._save, self._secret = _checked(state), save, _secret(key)
        self._start, self._asked = start, None
        self._patience, self._step_patience = patience, step_patience
        self._ready, self._lock, self._pending = [], threading.Lock(), 0
        self._copy, self._making = None, threading.Lock()
        self._followers, self.rank = [], 0
        self.refused = []
        self._closed = False
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.bind(_address(self._secret))
        except OSError as error:
            self._socket.close()
            raise ElasticError(f"another worker leads already, or its name is taken ({error.strerror}): end it, or give another key=") from None
        self._socket.listen(_MOST_PENDING)
        self._listener = threading.Thread(target=self._listen, name="sublet-elastic", daemon=True)
        self._listener.start()

    @property
    def members(self):
        """How many workers there are, this one included."""
        return 1 + len(self._followers)

    @property
    def waiting(self):
        """How many newcomers are ready to join at the end of this step."""
        return len(self._ready)

    def close(self):
        """Nobody joins any more, and followers notice by the end of their connections."""
        self._closed = True
        try:
            # Wakes the thread that accepts.
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        # The name is free once nobody accepts any more.
        self._listener.join(1.0)
        self._socket.close()
        with self._lock:
            gone, self._ready = self._ready + self._followers, []
            self._followers = []
            copy, self._copy = self._copy, None
        if copy is not None:
            copy.close()
        for peer in gone:
            peer.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    # ---- a thread of ours

    def _listen(self):
        while not self._closed:
            try:
                peer, _ = self._socket.accept()
            except OSError:
                if self._closed:
                    return
                # No descriptors left, or the like: not asked again at once.
                time.sleep(0.1)
                continue
            with self._lock:
                full = self._pending + len(self._ready) >= _MOST_PENDING
                self._pending += not full
            if full or not _same_user(peer):
                if not full:
                    with self._lock:
                        self._pending -= 1
                peer.close()
                continue
            threading.Thread(target=self._welcome, args=(peer,), name="sublet-elastic", daemon=True).start()

    def _welcome(self, peer):
        try:
            deadline = time.monotonic() + _HANDSHAKE_S
            nonce = os.urandom(16)
            _send(peer, {"nonce": nonce.hex()}, deadline)
            answer = _receive(peer, deadline)
            if not hmac.compare_digest(_word(answer, "proof", str), _proof(self._secret, b"follow", nonce)):
                raise ConnectionError("it does not know the secret")
            theirs = bytes.fromhex(_word(answer, "nonce", str))
            reply = {"proof": _proof(self._secret, b"lead", theirs)}
            if answer.get("sizes") != self._sizes:
                reply["refused"] = f"its state is {answer.get('sizes')}, the lead's is {self._sizes}"
                _send(peer, reply, deadline)
                raise ConnectionError(reply["refused"])
            _send(peer, reply, deadline)
            self._prepare()
            with self._lock:
                if self._closed:
                    raise ConnectionError("nobody may join any more")
                self._ready.append(peer)
        except (OSError, ValueError) as error:
            self._refuse(str(error))
            peer.close()
        finally:
            with self._lock:
                self._pending -= 1

    def _prepare(self):
        """Memory for the next copy, where there is none: not in the program's time."""
        with self._making:
            if self._copy is None:
                copy = _Copy(self._sizes)
                with self._lock:
                    self._copy = copy

    def _refuse(self, why):
        self.refused = [*self.refused[-15:], why]

    # ---- the program's thread

    def step(self, number):
        """To be called when an iteration has ended, with its number. A Change where others take part from the next one on; else None."""
        if self._start is not None:
            self._look()
        if not self._ready and not self._followers:
            return None
        return self._end(number)

    def _look(self):
        """What the job's operator asks for, once for each number."""
        from . import resize_requested

        asked = resize_requested()
        if asked == self._asked:
            return
        self._asked = asked
        if asked:
            for rank in range(self.members, asked):
                self._start(rank)

    def _end(self, number):
        begun = time.monotonic()
        left = []
        # Those who train have to have ended the step, too.
        staying = []
        for peer in self._followers:
            try:
                deadline = begun + self._step_patience
                ended, leaves, _ = _GO.unpack(_exactly(peer, _GO.size, deadline))
                if leaves:
                    raise ConnectionError("it leaves")
                if ended != number:
                    raise ConnectionError(f"it has ended step {ended}, the lead step {number}")
                staying.append(peer)
            except OSError as error:
                left.append(str(error))
                peer.close()
        self._followers = staying
        with self._lock:
            newcomers, self._ready = self._ready, []
        self._dismiss(number, left)
        staying = list(self._followers)
        paused = time.monotonic()
        joined = self._replicate(number, newcomers, left) if newcomers else []
        self._followers = staying + joined
        gone = []
        for rank, peer in enumerate(self._followers, 1):
            try:
                peer.settimeout(self._patience)
                peer.sendall(_GO.pack(number, self.members, rank))
            except OSError as error:
                # It has died since; the others hear of it with the next step.
                gone.append(peer)
                left.append(str(error))
        self._followers = [peer for peer in self._followers if peer not in gone]
        joined = [peer for peer in joined if peer not in gone]
        if not joined and not left:
            return None
        pause_s = time.monotonic() - paused if newcomers else 0.0
        return Change(self.members, 0, len(joined), left, pause_s)

    def _dismiss(self, number, left):
        count = max(0, self.members - self._asked) if self._asked else 0
        for peer in self._followers[len(self._followers) - count :]:
            try:
                peer.settimeout(self._patience)
                peer.sendall(_GO.pack(number, 0, 0))
            except OSError:
                pass  # it has gone by itself
            peer.close()
            left.append("it was asked to leave")
        self._followers = self._followers[: len(self._followers) - count]

    def _replicate(self, number, newcomers, left):
        offered = []
        try:
            with self._lock:
                copy, self._copy = self._copy, None
            with copy or _Copy(self._sizes) as copy:
                sums = self._fill(copy)
                copy.seal()
                deadline = time.monotonic() + self._patience + copy.total / 1e9
                message = {"step": number, "total": copy.total, "sums": sums}
                for peer in newcomers:
                    try:
                        _send(peer, message, deadline, copy.fd)
                        offered.append(peer)
                    except OSError as error:
                        left.append(str(error))
                        peer.close()
        except OSError as error:
            # No memory for it: those who train go on, and newcomers notice by the end of their
            # connections.
            left.extend(f"the state could not be copied for it: {error.strerror}" for _ in newcomers)
            for peer in newcomers:
                peer.close()
            return []
        except BaseException:
            for peer in newcomers:
                peer.close()
            raise
        return self._loaded(offered, sums, deadline, left)

    def _fill(self, copy):
        sums = {}

        def save(name, view):
            self._save(name, view)
            sums[name] = _sum_of(view)

        copy.each(save)
        return sums

    def _loaded(self, offered, sums, deadline, left):
        """Those that have loaded what they were given. Read as they answer: one that is slow costs the others nothing."""
        joined = []
        with selectors.DefaultSelector() as waiting:
            for peer in offered:
                waiting.register(peer, selectors.EVENT_READ)
            while waiting.get_map() and time.monotonic() < deadline:
                for key, _ in waiting.select(max(0.0, deadline - time.monotonic())):
                    peer = key.fileobj
                    waiting.unregister(peer)
                    try:
                        # A message that has begun to come is there as a whole.
                        answer = _receive(peer, time.monotonic() + _ANSWER_S)
                        if answer.get("sums") != sums:
                            raise ConnectionError(f"it has loaded {answer.get('sums')} where the lead has {sums}")
                        joined.append(peer)
                    except OSError as error:
                        left.append(str(error))
                        peer.close()
            for key in list(waiting.get_map().values()):
                left.append("it has not loaded the state in time")
                key.fileobj.close()
        return joined


class Follow:
    """A worker that has joined: it has the lead's state after `step_number`."""

    def __init__(self, peer, step_number, members, rank, step_patience):
        self._peer, self._step_patience = peer, step_patience
        self.step_number, self.members, self.rank = step_number, members, rank

    def step(self, number):
        """To be called when an iteration has ended, with its number. A Change where the workers are others from the next one on; else None.

        A Change to no members: this worker is asked to end. Lost where the lead has gone."""
        return self._said(number, 0)

    def _said(self, number, leaves):
        try:
            self._peer.settimeout(self._step_patience)
            self._peer.sendall(_GO.pack(number, leaves, 0))
            if leaves:
                return None
            deadline = time.monotonic() + self._step_patience
            said, members, rank = _GO.unpack(_exactly(self._peer, _GO.size, deadline))
        except OSError as error:
            self.close()
            raise Lost(f"the lead of this worker is lost after step {number}: {error}") from None
        if (said, members, rank) == (number, 0, 0):
            self.close()
            self.members = 0
            return Change(0, 0)
        if said != number or not 0 < rank < members:
            self.close()
            raise Lost(f"the lead of this worker says step {said}, rank {rank} of {members} after step {number}")
        same = (members, rank) == (self.members, self.rank)
        joined = max(0, members - self.members)
        self.step_number, self.members, self.rank = number, members, rank
        return None if same else Change(members, rank, joined)

    def quit(self, number):
        """In place of step(): this worker ends with this iteration, and the others go on without it."""
        self._said(number, 1)
        self.close()

    def close(self):
        self._peer.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


def join(state, load, *, key=None, patience=60.0, step_patience=60.0):
    """Joins the worker that leads, at the end of its present iteration. Everything that takes long (libraries, the GPU) belongs before this.

    Waits `patience` seconds in all for a lead and for the end of its iteration. ElasticError where that does not come, where its state is
    another one than this, or where what arrives is not what was sent."""
    sizes, secret = _checked(state), _secret(key)
    deadline = time.monotonic() + patience
    peer = _connected(secret, deadline)
    try:
        nonce = bytes.fromhex(_word(_receive(peer, deadline), "nonce", str))
        own = os.urandom(16)
        _send(peer, {"proof": _proof(secret, b"follow", nonce), "nonce": own.hex(), "sizes": sizes}, deadline)
        reply = _receive(peer, deadline)
        if not hmac.compare_digest(_word(reply, "proof", str), _proof(secret, b"lead", own)):
            raise ElasticError("what answers is no worker of this job: it does not know the secret")
        if "refused" in reply:
            raise ElasticError(f"the lead refuses this worker: {reply['refused']}")
        step_number = _take(peer, sizes, load, deadline)
        said, members, rank = _GO.unpack(_exactly(peer, _GO.size, deadline))
        if said != step_number or not 0 < rank < members:
            raise ElasticError(f"the lead says step {said}, rank {rank} of {members}, and has sent the state of step {step_number}")
        return Follow(peer, step_number, members, rank, step_patience)
    except (OSError, ValueError) as error:
        peer.close()
        raise ElasticError(f"this worker has not joined: {error}") from None
    except BaseException:
        peer.close()
        raise


def _connected(secret, deadline):
    while True:
        peer = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            peer.settimeout(_left(deadline))
            peer.connect(_address(secret))
            if not _same_user(peer):
                raise ElasticError("what answers belongs to another user")
            return peer
        except (ConnectionRefusedError, BlockingIOError):
            peer.close()
            if time.monotonic() + 0.05 > deadline:
                raise ElasticError("no worker leads: start the one with sublet.elastic.Lead first, in the same job or with the same key=") from None
            time.sleep(0.05)
        except TimeoutError:
            peer.close()
            raise ElasticError("the worker that leads takes nobody in") from None
        except BaseException:
            peer.close()
            raise


def _take(peer, sizes, load, deadline):
    peer.settimeout(_left(deadline))
    header, fds, flags, _ = socket.recv_fds(peer, _HEADER.size, 1)
    try:
        if not header:
            raise ConnectionError("the lead has gone, or has left this worker behind")
        header += _exactly(peer, _HEADER.size - len(header), deadline)
        message = _parsed(header, peer, deadline)
        if len(fds) != 1 or flags & socket.MSG_CTRUNC:
            raise ConnectionError("the lead's state has no descriptor, or there was none left for it")
        (fd,) = fds
        step_number, sums = _word(message, "step", int), _word(message, "sums", dict)
        total = sum(sizes.values())
        if message.get("total") != total or os.fstat(fd).st_size != max(total, 1):
            raise ConnectionError(f"the lead's state is {message.get('total')} bytes in {os.fstat(fd).st_size}, and is to be {total}")
        # What can still change, or shrink under a reader, is not looked at.
        if fcntl.fcntl(fd, _F_GET_SEALS) & _SEALS != _SEALS:
            raise ConnectionError("the lead's state is not sealed")

        def take(name, view):
            found = _sum_of(view)
            if found != sums.get(name):
                raise ConnectionError(f"state {name!r} has the checksum {found}, and the lead says {sums.get(name)!r}")
            load(name, view)

        # What load() does to its view stays its own.
        _each(mmap.mmap(fd, max(total, 1), access=mmap.ACCESS_COPY), sizes, take)
    finally:
        for fd in fds:
            os.close(fd)
    _send(peer, {"sums": sums}, deadline)
    return step_number


def _each(memory, sizes, act):
    """Has `act` look at each part of a state that is mapped, and unmaps it."""
    try:
        with memoryview(memory) as whole:
            at = 0
            for name, size in sizes.items():
                with whole[at : at + size] as view:
                    act(name, view)
                at += size
        memory.close()
    except BufferError:
        raise ValueError("save() or load() keeps the view that it was given: copy, and let it go") from None
