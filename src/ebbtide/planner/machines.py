"""Named machines: rates of compute, memory and links, for plans made elsewhere.

[Note: named machines] Rates of compute and memory are published best measurements of single operations, times the
share of them that the kernels of a training step reached on an H200 (``benchmarks/suites/rounds.py``, traced): matrix
products nearly all, fused attention and its backward less, element-wise kernels, which read and write in every layout,
least. Other devices are assumed to be alike.
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
        stores_on_disk: The store is a disk, as that of a CPU is: host memory does not limit it. Files may say
            ``can_cancel``, its old name.
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
    stores_on_disk: bool = False

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
        if not isinstance(self.stores_on_disk, bool):
            raise ConfigError(
                f"stores_on_disk of machine {self.name!r} is {self.stores_on_disk!r}",
                expected="true or false",
                hint="false for copies on the streams of an accelerator, true for a disk",
            )

    def rates(self, ranks: int = 1) -> Rates:
        """Return the copy rates of each of ``ranks`` devices that copy at once: its link, or its share of the host."""
        share = self.host_bytes_per_second / ranks
        return Rates(
            out_bytes_per_second=min(self.out_bytes_per_second, share),
            in_bytes_per_second=min(self.in_bytes_per_second, share),
        )

    def save(self, path: str | Path) -> None:
        """Write the machine into a file that ``machine_named`` reads.

        Raises:
            DataError: The name does not end in .json, or the file cannot be written.
        """
        check_json_name(Path(path), repr(str(path)), hint="machine= reads such names, as machine.json, as files")
        write_text(Path(path), json.dumps(asdict(self), indent=1) + "\n")


PRODUCTS, ATTENTION, MEMORY = 0.97, 0.82, 0.6
"""Shares of the best rates that a training step reaches. See [Note: named machines]."""

# Devices and GiB of each; TFLOP/s: products in half precision and in float32, attention;
# GB/s: memory, copy-outs and copy-ins; GiB and GB/s of the host.
_ROWS: tuple[tuple[str, int, float, float, float, float, float, float, float, int, float], ...] = (
    ("b200", 8, 178, 1745, 80, 1360, 8000, 52.8, 55, 2048, 717),
    ("h200", 8, 139, 790, 52, 616, 4800, 52.8, 55, 2048, 921),
    ("h100", 8, 79, 790, 52, 616, 3350, 52.8, 55, 2048, 921),
    ("h20", 8, 95, 148, 44, 115, 4000, 52.8, 55, 2048, 921),
    ("gh200", 1, 94, 828, 52, 616, 4000, 300, 380, 480, 500),
    ("a100", 8, 79, 271, 18, 200, 2000, 24, 24.5, 1024, 409),
    ("a100-40g", 8, 39, 271, 18, 200, 1555, 24, 24.5, 1024, 409),
    ("l40s", 8, 44, 362, 91.6, 280, 864, 24, 24.5, 1536, 409),
    ("a10", 4, 22, 125, 31.2, 97, 600, 24, 24.5, 1024, 409),
    ("a10g", 8, 22, 70, 35, 54, 600, 24, 24.5, 768, 409),
    ("5090", 1, 31, 209.5, 104.8, 178, 1792, 52.8, 55, 128, 90),
    ("4090", 1, 23.5, 165, 60, 140, 1000, 25, 25, 128, 90),
    ("mi300x", 8, 191, 668, 163.4, 520, 5300, 52.8, 55, 1536, 921),
)
MACHINES = {
    name: Machine(
        name=name,
        devices=devices,
        memory_bytes=int(memory * 1024**3),
        flop_per_second=PRODUCTS * half * 1e12,
        flop32_per_second=PRODUCTS * single * 1e12,
        attention_flop_per_second=ATTENTION * attention * 1e12,
        memory_bytes_per_second=MEMORY * own * 1e9,
        out_bytes_per_second=out * 1e9,
        in_bytes_per_second=into * 1e9,
        host_memory_bytes=host * 1024**3,
        host_bytes_per_second=shared * 1e9,
    )
    for name, devices, memory, half, single, attention, own, out, into, host, shared in _ROWS
}
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


def machine_named(named: str | PathLike[str] | Machine, *, name: str = "machine") -> Machine:
    """Return a machine of the table, or the one in a file.

    Args:
        named: A name in ``MACHINES``, also with its maker's (``RTX 4090``); the path of a JSON file with the fields of
            ``Machine``; or a machine.
        name: Name of the setting in errors.

    Raises:
        ConfigError: There is no such machine.
        DataError: The file cannot be read.
    """
    if isinstance(named, Machine):
        return named
    text, hint = fspath(named), "`ebbtide doctor --out machine.json` writes the one it runs on"
    device = re.sub("[ _]+", "-", _MAKERS.sub("", text.strip().lower()))
    known = MACHINES.get(_ALSO.get(device, device))
    if known is not None:
        return known
    if not text.endswith(".json"):
        raise ConfigError(
            f"{name} is {text!r}",
            expected="one of " + ", ".join(MACHINES) + ", or a JSON file that describes one",
            hint=nearest(text.lower(), MACHINES) or hint,
        )
    found = json_object(Path(text), repr(text), expected="a file that describes a machine", hint=hint)
    if "stores_on_disk" not in found and "can_cancel" in found:
        found["stores_on_disk"] = found.pop("can_cancel")
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
