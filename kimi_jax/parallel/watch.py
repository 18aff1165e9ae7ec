"""Which process of a job died: a TCP connection from every process to process 0, silent until the end.

The kernel closes the connections of a process that dies, at whatever instant, so the others know at once and by name;
it also probes those of a host that vanished. Nothing here needs a turn of the interpreter in time: however long one
computes or compiles, it is not taken for dead. JAX's own heartbeats (threads of the runtime) stand behind it: they
find a process that is there and stopped, and may be the first to speak where process 0 dies.
"""

import json
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

PROBE_SECONDS = 5
"""A silent connection is probed this often."""
PROBES = 4
"""Probes without an answer after which a host is gone: 25 s in all."""
LEAVE_SECONDS = 2.0
"""How long process 0 stays for the others to read why the job ends."""

Say = Callable[[str], None]


class Watch:
    """A process's connections to the others. Ends this process (`os._exit`) when another one ends before `done`.

    - `index`, `count`, `host`: of this process.
    """

    def __init__(self, index: int, count: int, host: str) -> None:
        self.index, self.count, self.host = index, count, host
        self._peers: dict[int, socket.socket] = {}
        self._lock = threading.Lock()
        self._ended = False

    def serve(self, loopback: bool) -> str:
        """On process 0: begins to listen. **Returns:** what the others pass to `join`."""
        token = secrets.token_hex(16)
        both = not loopback and socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        address = ("127.0.0.1" if loopback else "", 0)
        server = socket.create_server(address, family=family, dualstack_ipv6=both, backlog=max(128, self.count))
        self._thread(self._accept, server, token)
        return json.dumps({"port": server.getsockname()[1], "token": token, "host": self.host})

    def join(self, coordinator_host: str, published: str, timeout: float) -> None:
        """On another process: connects to process 0. **Raises:** `OSError` where it cannot be reached."""
        place = json.loads(published)
        connection = socket.create_connection((coordinator_host, place["port"]), timeout)
        connection.settimeout(None)
        _probe(connection)
        _send(connection, {"token": place["token"], "index": self.index, "host": self.host})
        self._peers[0] = connection
        self._thread(self._read, connection, 0, place["host"])

    def done(self) -> None:
        """Tells the others that this process may go from now on."""
        self._tell({"done": True})

    def fail(self, message: str) -> None:
        """Tells the others that this process fails and why; they end. The caller ends this process."""
        with self._lock:
            self._ended = True  # that they go is no news
        self._tell({"end": f"process {self.index} ({self.host}) failed: {message}"})
        if self.index == 0:
            self._wait_for_peers()

    def _thread(self, function: Callable[..., None], *arguments: Any) -> None:
        threading.Thread(target=function, args=arguments, daemon=True, name="kimi_jax watch").start()

    def _accept(self, server: socket.socket, token: str) -> None:
        while len(self._peers) < self.count - 1:
            connection, _ = server.accept()
            self._thread(self._greet, connection, token)
        server.close()

    def _greet(self, connection: socket.socket, token: str) -> None:
        _probe(connection)
        connection.settimeout(PROBE_SECONDS * PROBES)
        lines = connection.makefile()
        try:
            hello = json.loads(lines.readline(4096))
            known = secrets.compare_digest(str(hello["token"]), token)
        except (OSError, ValueError, KeyError, TypeError):
            known = False
        if not known:
            connection.close()
            return
        connection.settimeout(None)
        self._peers[int(hello["index"])] = connection
        self._read(connection, int(hello["index"]), str(hello["host"]))

    def _read(self, connection: socket.socket, index: int, host: str) -> None:
        """Waits for what another process says last; runs in a thread of its own."""
        done = False
        try:
            for line in connection.makefile():
                message = json.loads(line)
                done = done or "done" in message
                if "end" in message:
                    self._end(str(message["end"]))
        except (OSError, ValueError):
            pass
        if not done:
            self._end(f"process {index} ({host}) died")
        self._peers.pop(index, None)

    def _end(self, why: str) -> None:
        with self._lock:
            if self._ended:
                return
            self._ended = True
        say(f"{why}; process {self.index} ({self.host}) ends too")
        if self.index == 0:
            self._tell({"end": why})
            self._wait_for_peers()
        sys.stdout.flush()
        os._exit(1)

    def _wait_for_peers(self) -> None:
        # Were process 0 gone first, JAX would end the others with a message about that.
        until = time.monotonic() + LEAVE_SECONDS
        while self._peers and time.monotonic() < until:
            time.sleep(0.05)

    def _tell(self, message: dict[str, Any]) -> None:
        for connection in list(self._peers.values()):
            try:
                _send(connection, message)
            except OSError:
                continue


def say(text: str) -> None:
    """One line on standard error, whole even where several processes share it."""
    os.write(2, f"kimi-jax: {text}\n".encode())


def _send(connection: socket.socket, message: dict[str, Any]) -> None:
    connection.sendall((json.dumps(message) + "\n").encode())


def _probe(connection: socket.socket) -> None:
    """Lets the kernel find out that the other host is gone."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", PROBE_SECONDS), ("TCP_KEEPINTVL", PROBE_SECONDS), ("TCP_KEEPCNT", PROBES)):
        if hasattr(socket, option):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
