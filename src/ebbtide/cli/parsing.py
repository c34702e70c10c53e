"""The argument parser of the verbs that have few flags of their own."""

from __future__ import annotations

import argparse
from typing import NoReturn

from ebbtide.base.errors import ConfigError


class Parser(argparse.ArgumentParser):
    """argparse, with the errors of this command line."""

    def error(self, message: str) -> NoReturn:
        """Raise instead of leaving the process.

        Raises:
            ConfigError: Always.
        """
        raise ConfigError(message, hint=f"`{self.prog} --help` lists the flags")
