"""A command on a terminal that a test can look at: in tmux where there is one, which knows what the screen shows; else on a plain
pseudo-terminal, where all there is is what was written."""

from __future__ import annotations

import contextlib
import os
import re
import select
import shlex
import shutil
import signal
import struct
import subprocess
import time
import uuid
from collections.abc import Callable, Mapping, Sequence

_SIZES = ("COLUMNS", "LINES")  # whoever runs the tests may have set them, and they would beat the terminal's own size
_CODES = re.compile(r"\x1b(\[[0-9;?<>=]*[ -/]*[@-~]|\][^\x07\x1b]*(\x07|\x1b\\)|[@-Z\\-_])")


class PtyScreen:
    """A program on a pseudo-terminal; everything it writes is kept.

    Attributes:
        pid: of the program.
        written: all bytes that it wrote.
    """

    def __init__(self, command: Sequence[str], *, size: tuple[int, int], environ: Mapping[str, str]) -> None:
        import pty

        self.pid, self._fd = pty.fork()
        if self.pid == 0:
            os.environ.update(environ)
            for name in _SIZES:
                os.environ.pop(name, None)
            self._set_size(0, size)
            os.execvp(command[0], list(command))
        self.written = b""
        self.resize(size)

    @staticmethod
    def _set_size(fd: int, size: tuple[int, int]) -> None:
        import fcntl
        import termios

        fcntl.ioctl(fd, termios.TIOCSWINSZ, struct.pack("HHHH", size[1], size[0], 0, 0))

    def resize(self, size: tuple[int, int]) -> None:
        """Another size of the terminal."""
        self._set_size(self._fd, size)

    def read(self, seconds: float) -> bytes:
        """What it writes within some seconds."""
        deadline, new = time.monotonic() + seconds, b""
        while (left := deadline - time.monotonic()) > 0:
            if not select.select([self._fd], [], [], left)[0]:
                break
            try:
                chunk = os.read(self._fd, 1 << 20)
            except OSError:
                break
            if not chunk:
                break
            new += chunk
        self.written += new
        return new

    def wait_for(self, text: str, seconds: float = 20.0) -> None:
        """Read until a text was written, escape codes left out."""
        deadline = time.monotonic() + seconds
        while text not in self.text:
            assert time.monotonic() < deadline, f"{text!r} did not show up; it wrote {self.text[-1500:]!r}"
            self.read(0.1)

    @property
    def text(self) -> str:
        """What was written, without escape codes."""
        return _CODES.sub("", self.written.decode("utf-8", "replace"))

    def press(self, keys: str) -> None:
        """Type; halves of surrogate pairs stand for single bytes, as in file names."""
        os.write(self._fd, keys.encode("utf-8", "surrogateescape"))

    def leave(self, seconds: float = 15.0) -> int:
        """Read to the end and return the exit code (negative for a signal)."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self.read(0.05)
            done, status = os.waitpid(self.pid, os.WNOHANG)
            if done:
                self.read(0.2)
                os.close(self._fd)
                return os.waitstatus_to_exitcode(status)
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        raise AssertionError(f"it does not leave; it wrote {self.text[-1500:]!r}")


class TmuxScreen:
    """A program in a tmux server of its own. Raises FileNotFoundError where there is no tmux."""

    def __init__(self, command: Sequence[str], *, size: tuple[int, int], environ: Mapping[str, str]) -> None:
        if shutil.which("tmux") is None:
            raise FileNotFoundError("tmux")
        self._server = f"rimuru-test-{uuid.uuid4().hex[:12]}"
        words = " ".join(f"{name}={shlex.quote(value)}" for name, value in environ.items())
        # What the shell says afterwards shows that the terminal is as it was.
        unset = " ".join(f"-u {name}" for name in _SIZES)
        after = "echo \"left with $?\"; stty -a | grep -o -e '-\\?icanon' -e '-\\?echo '; exec cat"
        line = f"env {unset} {words} {shlex.join(command)}; {after}"
        self._run("-f", "/dev/null", "new-session", "-d", "-x", str(size[0]), "-y", str(size[1]), "sh", "-c", line)

    def _run(self, *words: str) -> str:
        done = subprocess.run(["tmux", "-L", self._server, *words], capture_output=True, timeout=20, check=False)
        return done.stdout.decode("utf-8", "replace")

    def text(self) -> str:
        """What the screen shows now."""
        return self._run("capture-pane", "-p")

    def press(self, *keys: str) -> None:
        """Press keys as tmux names them."""
        self._run("send-keys", *keys)

    def resize(self, size: tuple[int, int]) -> None:
        """Another size of the terminal."""
        self._run("resize-window", "-x", str(size[0]), "-y", str(size[1]))

    def wait_for(self, wanted: str | Callable[[str], bool], seconds: float = 20.0) -> str:
        """Wait until the screen shows a text, or something that a function accepts."""
        deadline = time.monotonic() + seconds
        while True:
            text = self.text()
            if wanted in text if isinstance(wanted, str) else wanted(text):
                return text
            assert time.monotonic() < deadline, f"{wanted!r} did not show up; the screen has\n{text}"
            time.sleep(0.1)

    def close(self) -> None:
        """End the program and its server."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._run("kill-server")
