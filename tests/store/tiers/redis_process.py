"""A real redis-server on a free loopback port, in a folder of its own."""

from __future__ import annotations

import shutil
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from urllib.parse import quote

import pytest
import redis

INSTALL = "redis-server is not installed: apt-get install -y redis-server (Debian, Ubuntu), or dnf install valkey"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class RedisProcess:
    """A server that can be killed, frozen and started again on the same port and folder."""

    def __init__(self, *options: str, scheme: str = "redis", password: str | None = None) -> None:
        program = shutil.which("redis-server")
        if program is None:
            pytest.fail(INSTALL)
        self.folder = Path(tempfile.mkdtemp())
        self.port = free_port()
        auth = f":{quote(password, safe='')}@" if password else ""
        self.url = f"{scheme}://{auth}127.0.0.1:{self.port}/0"
        listen = ("--port", "0", "--tls-port", str(self.port)) if scheme == "rediss" else ("--port", str(self.port))
        secret = ("--requirepass", password) if password else ()
        self._command = [program, *listen, "--bind", "127.0.0.1", "--dir", str(self.folder), *secret, *options]
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(self._command, stdout=log, stderr=log)
        for _ in range(400):
            try:
                socket.create_connection(("127.0.0.1", self.port), 1).close()
                return
            except OSError:
                assert self._process.poll() is None, (self.folder / "log").read_text()
                time.sleep(0.025)
        raise AssertionError("redis-server does not accept connections")

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def flush(self) -> None:
        with redis.Redis(port=self.port) as client:
            client.flushall()

    def close(self) -> None:
        self.kill()
        shutil.rmtree(self.folder)
