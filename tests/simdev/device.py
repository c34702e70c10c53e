"""Makes the built device torch's accelerator, with the Python module ``torch.simdev`` that torch requires.

Each setting of ``csrc/config.h`` can also come from the environment, as ``SIMDEV_<NAME>``.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib.machinery
import importlib.util
import os
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from tests.simdev.build import NAME, CannotBuildError

DEVICE = "simdev"
_SETTINGS = (
    *("devices", "stream_pool", "copy_delay_us", "copy_bytes_per_s", "kernel_delay_us", "jitter_us", "capacity"),
    "middle_segment",
)
_SWITCHES = ("poison", "blocking", "races", "timed_events", "capturing")
_SEED_MASK = 2**64 - 1
_OWNER = os.getpid()


def native() -> Any:
    """Return the built module.

    Raises:
        RuntimeError: The device was not loaded.
    """
    if NAME not in sys.modules:
        raise RuntimeError("the simulated device is not loaded: run pytest --simdev")
    return sys.modules[NAME]


def load(path: Path) -> None:
    """Load the built module into this process, for good.

    Raises:
        CannotBuildError: It does not load.
    """
    torch.utils.rename_privateuse1_backend(DEVICE)
    loader = importlib.machinery.ExtensionFileLoader(NAME, str(path))
    spec = importlib.util.spec_from_file_location(NAME, path, loader=loader)
    if spec is None:
        raise CannotBuildError(f"{path} is no module")
    try:
        module = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
    except ImportError as error:
        raise CannotBuildError(f"{path} does not load: {error}") from error
    sys.modules[NAME] = module
    for name in (*_SETTINGS, *_SWITCHES):
        if (value := os.environ.get(f"SIMDEV_{name.upper()}")) is not None:
            module.configure(name, int(value))
    torch._register_device_module(DEVICE, _device_module())
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    torch.empty(1, pin_memory=True)  # initialises the device: until then torch takes no memory for pinned
    atexit.register(_settle)


def configure(**values: int) -> dict[str, int]:
    """Change settings of the device; return their previous values."""
    return {name: native().configure(name, int(value)) for name, value in values.items()}


@contextlib.contextmanager
def configured(**values: int) -> Iterator[None]:
    """Change settings of the device within a context."""
    before = configure(**values)
    try:
        yield
    finally:
        configure(**before)


@contextlib.contextmanager
def held(stream: torch.Stream) -> Iterator[None]:
    """Hold a stream until the end of the block; nothing in the block may wait for it."""
    mark = native().hold(stream.device_index, stream.stream_id)
    try:
        yield
    finally:
        native().release(mark)


def violations() -> list[str]:
    """Return and clear the races and other misuse seen so far."""
    return native().violations(True)


def counters() -> dict[str, int]:
    """Return the operations that the device has run, by kind."""
    return dict(native().counters())


def simulated_seconds() -> tuple[float, float]:
    """Wait for the device; return its simulated time, and the part in which the default stream ran kernels."""
    now, busy = native().simulated_ns(_index(), 0)
    return now / 1e9, busy / 1e9


def _settle() -> None:
    if os.getpid() == _OWNER:
        with contextlib.suppress(RuntimeError):  # an unreported kernel that failed late
            native().synchronize(-1)


def _index(device: Any = None) -> int:
    if device is None:
        return native().current_device()
    index = device if isinstance(device, int) else torch.device(device).index
    return native().current_device() if index is None else index


class _Runtime:
    """The calls of ``torch.cuda.cudart()`` that pin memory which already exists."""

    @staticmethod
    def cudaHostRegister(address: int, nbytes: int, flags: int) -> int:
        return native().register_host(address, nbytes)

    @staticmethod
    def cudaHostUnregister(address: int) -> int:
        return native().unregister_host(address)


class _DeviceScope:
    """``torch.simdev.device``."""

    def __init__(self, device: Any) -> None:
        self.index = _index(device)

    def __enter__(self) -> None:
        self.before = native().exchange_device(self.index)

    def __exit__(self, *_: object) -> None:
        native().exchange_device(self.before)


def _default_stream(index: int) -> torch.Stream:
    kind = torch.accelerator.current_stream(index).device_type
    return torch.Stream(stream_id=0, device_index=index, device_type=kind)


def _limit_memory(fraction: float, device: Any = None) -> None:
    total = torch.accelerator.get_memory_info(_index(device))[1]
    configure(capacity=0 if fraction >= 1.0 else int(fraction * total))


def _properties(device: Any = None) -> types.SimpleNamespace:
    total = torch.accelerator.get_memory_info(_index(device))[1]
    return types.SimpleNamespace(name=DEVICE, total_memory=total, multi_processor_count=1, major=0, minor=0)


def _device_module() -> types.ModuleType:
    """Return ``torch.simdev``, with the names of ``torch.cuda``."""
    module, all_devices = types.ModuleType(f"torch.{DEVICE}"), range(native().device_count())
    names: dict[str, Any] = {
        "_initialized": True,  # torch.utils.checkpoint keeps the random state of no other device
        "_is_in_bad_fork": lambda: os.getpid() != _OWNER,
        "_lazy_init": lambda: None,
        "_sleep": lambda cycles: native().sleep(int(cycles) // 1000),  # of a device of 1 GHz
        "current_device": native().current_device,
        "current_stream": lambda device=None: torch.accelerator.current_stream(_index(device)),
        "cudart": lambda: _Runtime,
        "default_stream": lambda device=None: _default_stream(_index(device)),
        "device": _DeviceScope,
        "device_count": native().device_count,
        "Event": torch.Event,
        "get_amp_supported_dtype": lambda: [torch.bfloat16, torch.float16],
        "get_device_capability": lambda device=None: (0, 0),
        "get_device_name": lambda device=None: DEVICE,
        "get_device_properties": _properties,
        "get_rng_state": lambda device=DEVICE: native().get_rng_state(_index(device)),
        "get_rng_state_all": lambda: [native().get_rng_state(i) for i in all_devices],
        "init": lambda: None,
        "initial_seed": lambda: native().initial_seed(_index()),
        "is_available": lambda: native().device_count() > 0,
        "is_bf16_supported": lambda *_, **__: True,
        "is_initialized": lambda: True,
        "manual_seed": lambda seed: native().manual_seed(_index(), int(seed) & _SEED_MASK),
        "manual_seed_all": lambda seed: [native().manual_seed(i, int(seed) & _SEED_MASK) for i in all_devices],
        "mem_get_info": lambda device=None: torch.accelerator.get_memory_info(_index(device)),
        "set_device": lambda device: native().exchange_device(_index(device)),
        "set_per_process_memory_fraction": _limit_memory,
        "set_rng_state": lambda state, device=DEVICE: native().set_rng_state(_index(device), state),
        "set_rng_state_all": lambda states: [native().set_rng_state(i, s) for i, s in enumerate(states)],
        "set_stream": torch.accelerator.set_stream,
        "simulated_seconds": simulated_seconds,
        "Stream": torch.Stream,
        "stream": lambda stream: stream,
        "synchronize": lambda device=None: native().synchronize(_index(device)),
    }
    shared = "max_memory_allocated max_memory_reserved memory_allocated memory_reserved memory_stats empty_cache"
    for name in [*shared.split(), "reset_peak_memory_stats"]:
        names[name] = getattr(torch.accelerator, name)
    module.__dict__.update(names)
    return module
