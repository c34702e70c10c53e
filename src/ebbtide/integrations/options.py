"""Check the options of the hosts' callbacks when a callback is made, before anything is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ebbtide.arguments import check_choosers, chosen_policy, options_of
from ebbtide.wrap.strategy import check_strategy_name


def check_options(options: Mapping[str, Any]) -> None:
    """Check arguments of ``enable_activation_offloading`` without a model.

    Args:
        options: All its arguments but the model, by name.

    Raises:
        ConfigError: A value cannot be used.
    """
    chosen_policy(options["enable_ckpt"], options["policy"])
    check_strategy_name(options["strategy"])
    check_choosers(options["blocks"], tensor_filter=options["tensor_filter"], keep_filter=options["keep_filter"])
    names = ("target", "min_bytes", "window", "disk_path", "verify", "host_budget", "synchronous")
    options_of(*(options[name] for name in names))
