"""One fresh process a job, without paying the imports each time.

A server process (``python -m forge.harness.worker --serve DEVICE``) imports everything once and
forks a worker for each job. It never touches CUDA, so every worker starts with its own context,
allocator and compile caches, as a new interpreter would.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

# For a server that has closed its end of the pipe to exit.
GRACE_S = 5.0
# -P: a worker imports what this process does, not what lies in the current folder.
COMMAND = (sys.executable, "-P", "-m", "forge.harness.worker", "--serve")


class Workers:
    """Starts workers for ``device``. A context manager: leaving it ends what still runs.

    Args:
        log: file for what the server itself prints.
        environment: environment variables of the workers.
        command: the server; gets ``device`` as its last argument.
    """

    def __init__(
        self, device: str, log: Path, environment: dict[str, str], command: Sequence[str] = COMMAND
    ) -> None:
        self.command = [*command, device]
        self.log, self.environment = log, environment
        self.server: subprocess.Popen[bytes] | None = None
        self.child = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End what runs; the next job starts a server anew."""
        self._end_child()
        self._end_server()

    def run(self, job: Path, result: Path, output: Path, timeout_s: float) -> str:
        """Have a fresh worker do ``job``; its printed text goes to ``output``.

        Returns:
            How it ended: ``exited with code 0``, ``killed by SIGKILL``, ``stopped after 900 s`` ...
        """
        server = self._server()
        assert server.stdin is not None
        request = json.dumps({"job": str(job), "result": str(result), "output": str(output)})
        try:
            server.stdin.write(request.encode() + b"\n")
            self.child = int(self._answer(server, None) or 0)
            answer = self._answer(server, timeout_s) if self.child else b""
        except BrokenPipeError:
            answer = b""
        except TimeoutError:
            self._end_child()
            self._answer(server, None)
            return f"stopped after {timeout_s:g} s"
        self._end_child()
        if not answer:
            return self._lost(server, output)
        code = int(answer)
        if code < 0:
            return f"killed by {signal.Signals(-code).name}"
        return f"exited with code {code}"

    def _lost(self, server: subprocess.Popen[bytes], output: Path) -> str:
        try:
            code = server.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            code = 0
        self._end_server()
        if code < 0:  # nothing that was printed before is the reason
            output.write_bytes(b"")
            return f"lost, its server was killed by {signal.Signals(-code).name}"
        output.write_bytes(self.log.read_bytes())
        return "could not start"

    def _server(self) -> subprocess.Popen[bytes]:
        if self.server is None:
            with self.log.open("wb") as log:
                self.server = subprocess.Popen(
                    self.command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    env=self.environment,
                    bufsize=0,
                    start_new_session=True,
                )
        return self.server

    @staticmethod
    def _answer(server: subprocess.Popen[bytes], timeout_s: float | None) -> bytes:
        assert server.stdout is not None
        ready, _, _ = select.select([server.stdout], [], [], timeout_s)
        if not ready:
            raise TimeoutError
        return server.stdout.readline()

    def _end_child(self) -> None:
        # The whole session: compilers start helpers of their own.
        if self.child:
            _kill_session(self.child)
        self.child = 0

    def _end_server(self) -> None:
        if self.server is not None:
            _kill_session(self.server.pid)
            with self.server:  # closes its pipes, and waits
                pass
        self.server = None


def _kill_session(leader: int) -> None:
    try:
        os.killpg(leader, signal.SIGKILL)
    except ProcessLookupError:
        return
