"""Programs that the system does not start."""

from __future__ import annotations

import errno
from collections.abc import Sequence

from ebbtide.base.errors import ConfigError


def cannot_start(command: Sequence[str], error: OSError) -> ConfigError:
    """Return the error for a program that the system does not start.

    Args:
        command: The program and its arguments.
        error: Of the system.
    """
    hint = f"a script without a first line such as #!/bin/sh: try sh {command[0]}"
    return ConfigError(
        f"{command[0]!r} cannot be started ({error.strerror})",
        expected="a program that this system runs",
        hint=hint if error.errno == errno.ENOEXEC else "check the program and its permissions",
    )
