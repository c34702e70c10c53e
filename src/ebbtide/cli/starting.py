"""Programs as child processes."""

from __future__ import annotations

import contextlib
import errno
import signal
import subprocess
from collections.abc import Sequence
from typing import Any, cast

from ebbtide.base.errors import ConfigError

KILLED = " (the system sends SIGKILL where memory is full)"
LOOK_SECONDS = 0.1
"""How often a wait for a child looks at what else there is."""


def signal_words(number: int) -> str:
    """Return the name of the signal that ended a program, and why the system may have sent it."""
    name = next((known.name for known in signal.Signals if known == number), f"signal {number}")
    return name + KILLED if number == signal.SIGKILL else name


def started(command: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
    """Start a program; options are those of ``subprocess.Popen``.

    Raises:
        ConfigError: The system does not start it.
    """
    if signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:  # inherited: the system would discard the exit code
        with contextlib.suppress(ValueError):  # not the main thread: signals are somebody else's
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        return cast("subprocess.Popen[bytes]", subprocess.Popen(list(command), **options))
    except OSError as error:
        hint = f"a script without a first line such as #!/bin/sh: try sh {command[0]}"
        raise ConfigError(
            f"{command[0]!r} cannot be started ({error.strerror})",
            expected="a program that this system runs",
            hint=hint if error.errno == errno.ENOEXEC else "check the program and its permissions",
        ) from error


def wait_for(child: subprocess.Popen[bytes]) -> int:
    """Wait until a child ends, and return its exit code; a signal that comes meanwhile is handled within a moment.

    A system call that waits without a limit ends early only if the signal comes inside it. After one that comes just
    before it, in the interpreter, Python's handler would run once the child has ended.
    """
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return child.wait(LOOK_SECONDS)
