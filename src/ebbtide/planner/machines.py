"""Named machines: rates of compute, memory and links, for plans made elsewhere.

Rates are published best measurements of single operations. A step reaches less of each, in similar proportion, so
ratios (which copies hide, which recomputes pay off) are more accurate than times.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import asdict, dataclass, fields
from os import PathLike, fspath
from pathlib import Path

from ebbtide.base.errors import ConfigError, DataError, EbbtideError, nearest
from ebbtide.base.files import check_json_name, json_object, write_text
from ebbtide.planner.profile import Rates


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """A node and its devices.

    Attributes:
        name: Its usual name.
        devices: How many of them a node has.
        memory_bytes: Of one device.
        flop_per_second: Matrix products of one device in bfloat16 or float16.
        flop32_per_second: The same in float32.
        attention_flop_per_second: Fused attention of one device.
        memory_bytes_per_second: Of one device's own memory.
        out_bytes_per_second: Copies from one device to the store, without concurrent copies.
        in_bytes_per_second: Copies back.
        host_memory_bytes: Of the node.
        host_bytes_per_second: Rate of the node's memory, all channels.
        launch_seconds: The least time of an operator.
        can_cancel: The store cancels copies that have not begun: a disk, the store of a CPU.
    """

    name: str
    devices: int = 1
    memory_bytes: int
    flop_per_second: float
    flop32_per_second: float
    attention_flop_per_second: float
    memory_bytes_per_second: float
    out_bytes_per_second: float
    in_bytes_per_second: float
    host_memory_bytes: int
    host_bytes_per_second: float
    launch_seconds: float = 4e-6
    can_cancel: bool = False

    def __post_init__(self) -> None:
        for field in fields(self)[1:-1]:
            value = getattr(self, field.name)
            kinds = int if field.type == "int" else (int, float)
            number = isinstance(value, kinds) and not isinstance(value, bool) and math.isfinite(value)
            if not (number and (value > 0 or (field.name == "launch_seconds" and value == 0))):
                raise ConfigError(
                    f"{field.name} of machine {self.name!r} is {value!r}",
                    expected="a whole number above 0" if kinds is int else "a number above 0",
                    hint="`ebbtide doctor --out machine.json` writes the machine that it runs on",
                )
        if not isinstance(self.can_cancel, bool):
            raise ConfigError(
                f"can_cancel of machine {self.name!r} is {self.can_cancel!r}",
                expected="true or false",
                hint="false for copies on the streams of an accelerator, true for a disk",
            )

    def rates(self, ranks: int = 1) -> Rates:
        """Return the copy rates of each of ``ranks`` devices that copy at once: its link, or its share of the host."""
        share = self.host_bytes_per_second / ranks
        return Rates(
            out_bytes_per_second=min(self.out_bytes_per_second, share),
            in_bytes_per_second=min(self.in_bytes_per_second, share),
            can_cancel=self.can_cancel,
        )

    def save(self, path: str | Path) -> None:
        """Write the machine into a file that ``machine_named`` reads.

        Raises:
            DataError: The name does not end in .json, or the file cannot be written.
        """
        check_json_name(Path(path), repr(str(path)), hint="machine= reads such names, as machine.json, as files")
        write_text(Path(path), json.dumps(asdict(self), indent=1) + "\n")


_GIB = 1024**3

MACHINES = {
    "b200": Machine(
        name="b200", devices=8, memory_bytes=178 * _GIB, flop_per_second=1745e12, flop32_per_second=80e12,
        attention_flop_per_second=1360e12, memory_bytes_per_second=8.0e12, out_bytes_per_second=52.8e9,
        in_bytes_per_second=55e9, host_memory_bytes=2048 * _GIB, host_bytes_per_second=717e9,
    ),
    "h200": Machine(
        name="h200", devices=8, memory_bytes=139 * _GIB, flop_per_second=790e12, flop32_per_second=52e12,
        attention_flop_per_second=616e12, memory_bytes_per_second=4.8e12, out_bytes_per_second=52.8e9,
        in_bytes_per_second=55e9, host_memory_bytes=2048 * _GIB, host_bytes_per_second=921e9,
    ),
    "h100": Machine(
        name="h100", devices=8, memory_bytes=79 * _GIB, flop_per_second=790e12, flop32_per_second=52e12,
        attention_flop_per_second=616e12, memory_bytes_per_second=3.35e12, out_bytes_per_second=52.8e9,
        in_bytes_per_second=55e9, host_memory_bytes=2048 * _GIB, host_bytes_per_second=921e9,
    ),
    "h20": Machine(
        name="h20", devices=8, memory_bytes=95 * _GIB, flop_per_second=148e12, flop32_per_second=44e12,
        attention_flop_per_second=115e12, memory_bytes_per_second=4.0e12, out_bytes_per_second=52.8e9,
        in_bytes_per_second=55e9, host_memory_bytes=2048 * _GIB, host_bytes_per_second=921e9,
    ),
    "gh200": Machine(
        name="gh200", devices=1, memory_bytes=94 * _GIB, flop_per_second=828e12, flop32_per_second=52e12,
        attention_flop_per_second=616e12, memory_bytes_per_second=4.0e12, out_bytes_per_second=300e9,
        in_bytes_per_second=380e9, host_memory_bytes=480 * _GIB, host_bytes_per_second=500e9,
    ),
    "a100": Machine(
        name="a100", devices=8, memory_bytes=79 * _GIB, flop_per_second=271e12, flop32_per_second=18e12,
        attention_flop_per_second=200e12, memory_bytes_per_second=2.0e12, out_bytes_per_second=24e9,
        in_bytes_per_second=24.5e9, host_memory_bytes=1024 * _GIB, host_bytes_per_second=409e9,
    ),
    "a100-40g": Machine(
        name="a100-40g", devices=8, memory_bytes=39 * _GIB, flop_per_second=271e12, flop32_per_second=18e12,
        attention_flop_per_second=200e12, memory_bytes_per_second=1.555e12, out_bytes_per_second=24e9,
        in_bytes_per_second=24.5e9, host_memory_bytes=1024 * _GIB, host_bytes_per_second=409e9,
    ),
    "l40s": Machine(
        name="l40s", devices=8, memory_bytes=44 * _GIB, flop_per_second=362e12, flop32_per_second=91.6e12,
        attention_flop_per_second=280e12, memory_bytes_per_second=0.864e12, out_bytes_per_second=24e9,
        in_bytes_per_second=24.5e9, host_memory_bytes=1536 * _GIB, host_bytes_per_second=409e9,
    ),
    "a10": Machine(
        name="a10", devices=4, memory_bytes=22 * _GIB, flop_per_second=125e12, flop32_per_second=31.2e12,
        attention_flop_per_second=97e12, memory_bytes_per_second=0.6e12, out_bytes_per_second=24e9,
        in_bytes_per_second=24.5e9, host_memory_bytes=1024 * _GIB, host_bytes_per_second=409e9,
    ),
    "a10g": Machine(
        name="a10g", devices=8, memory_bytes=22 * _GIB, flop_per_second=70e12, flop32_per_second=35e12,
        attention_flop_per_second=54e12, memory_bytes_per_second=0.6e12, out_bytes_per_second=24e9,
        in_bytes_per_second=24.5e9, host_memory_bytes=768 * _GIB, host_bytes_per_second=409e9,
    ),
    "5090": Machine(
        name="5090", devices=1, memory_bytes=31 * _GIB, flop_per_second=209.5e12, flop32_per_second=104.8e12,
        attention_flop_per_second=178e12, memory_bytes_per_second=1.792e12, out_bytes_per_second=52.8e9,
        in_bytes_per_second=55e9, host_memory_bytes=128 * _GIB, host_bytes_per_second=90e9,
    ),
    "4090": Machine(
        name="4090", devices=1, memory_bytes=int(23.5 * _GIB), flop_per_second=165e12, flop32_per_second=60e12,
        attention_flop_per_second=140e12, memory_bytes_per_second=1.0e12, out_bytes_per_second=25e9,
        in_bytes_per_second=25e9, host_memory_bytes=128 * _GIB, host_bytes_per_second=90e9,
    ),
    "mi300x": Machine(
        name="mi300x", devices=8, memory_bytes=191 * _GIB, flop_per_second=668e12, flop32_per_second=163.4e12,
        attention_flop_per_second=520e12, memory_bytes_per_second=5.3e12, out_bytes_per_second=52.8e9,
        in_bytes_per_second=55e9, host_memory_bytes=1536 * _GIB, host_bytes_per_second=921e9,
    ),
}  # fmt: skip
"""Products in bfloat16, measured: stas00/ml-engineering (B200 1745, H100 and H200 794.5, A100 271.2, GH200 828.6,
MI300X 668.4 TFLOP/s). Of the others, the dense figure of the data sheet with float32 sums: NVIDIA's H20 148, L40S 362,
A10 125, AWS's A10G 70, and the white papers of Ada (RTX 4090, 165) and RTX Blackwell (RTX 5090, 209.5).
Products in float32 of the B200, H20, L40S, A10, A10G, RTX 5090 and MI300X: data sheets.
Attention: the FlashAttention-3 paper (H100, causal, forward). That of others is assumed, as a part of the products.
Links: nvbandwidth on H100 over PCIe 5 (taken for the B200, H20, RTX 5090 and MI300X, too), on A100 over PCIe 4 (L40S,
A10, A10G), on GH200 over C2C; the RTX 4090's is assumed.
Memory: data sheets, less what drivers take. Nodes: DGX B200, DGX A100, AWS g6e.48xlarge (L40S) and g5.48xlarge (A10G),
OCI BM.GPU.A10.4, and the MI300X systems of MLPerf Inference 4.1."""

_ALSO = {"a100-40gb": "a100-40g", "a100-80g": "a100", "a100-80gb": "a100"}
"""Other names of the same devices."""

_MAKERS = re.compile(r"^(?:(?:nvidia|geforce|rtx|amd|instinct)[ _-]*)+")


def machine_named(named: str | PathLike[str] | Machine) -> Machine:
    """Return a machine of the table, or the one in a file.

    Args:
        named: A name in ``MACHINES``, also with its maker's (``RTX 4090``); the path of a JSON file with the fields of
            ``Machine``; or a machine.

    Raises:
        ConfigError: There is no such machine.
        DataError: The file cannot be read.
    """
    if isinstance(named, Machine):
        return named
    text = fspath(named)
    name = re.sub("[ _]+", "-", _MAKERS.sub("", text.strip().lower()))
    known = MACHINES.get(_ALSO.get(name, name))
    if known is not None:
        return known
    if not text.endswith(".json"):
        raise ConfigError(
            f"machine is {text!r}",
            expected="one of " + ", ".join(MACHINES) + ", or a JSON file that describes one",
            hint=nearest(text.lower(), MACHINES) or "`ebbtide doctor --out machine.json` writes the one it runs on",
        )
    hint = "`ebbtide doctor --out machine.json` writes the one it runs on"
    found = json_object(Path(text), repr(text), expected="a file that describes a machine", hint=hint)
    try:
        return Machine(**found)
    except EbbtideError:
        raise
    except (ValueError, TypeError) as error:
        raise DataError(
            f"{text!r} describes no machine ({error})",
            expected="the fields " + ", ".join(field.name for field in fields(Machine)),
            hint=hint,
        ) from error
