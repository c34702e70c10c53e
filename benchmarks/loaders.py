"""The loaders of sharded models that the suite on loading compares, and what one rank measures of one of them.

A rank is a process of its own, forked from one that has imported a training program's packages and done nothing else;
before it measures it loads a tiny model with the same loader, so that a library's one-time imports and setup are not
part of loading a model.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import json
import mmap
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ebbtide.store.share import fields_of

MIB = 1 << 20
IMPORTED = (
    "transformers.models.qwen3.modeling_qwen3",
    "accelerate.utils.fsdp_utils",
    "ebbtide.loading",
    "ebbtide.track",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "benchmarks.loaders",
)
"""What a program has imported anyway."""
WIDE = {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 12, "vocab_size": 38400}
SMALL = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 4, "vocab_size": 32000}
TINY = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2, "vocab_size": 256}
HEADS = {"num_attention_heads": 16, "num_key_value_heads": 8, "tie_word_embeddings": False}


def write_checkpoint(folder: Path, sizes: dict[str, int], file_size: str) -> None:
    """Write a decoder with random weights in bf16."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(**sizes, **HEADS, head_dim=sizes["hidden_size"] // 16)
    torch.set_default_dtype(torch.bfloat16)
    model = Qwen3ForCausalLM(config)
    model.save_pretrained(folder, max_shard_size=file_size)


def _on_meta(path: str, dtype: torch.dtype) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path), dtype=dtype)


def _whole(path: str, dtype: torch.dtype) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=dtype)


def _shard(model: Any) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def ours(path: str, dtype: torch.dtype, source: str = "auto") -> Any:
    """``load_sharded``: each rank reads its slices, or one rank reads (``"broadcast"``)."""
    import ebbtide

    return ebbtide.load_sharded(_on_meta(path, torch.bfloat16), path, shard=_shard, dtype=dtype, source=source)


def plain(path: str, dtype: torch.dtype) -> Any:
    """``from_pretrained`` on every rank, then ``fully_shard``."""
    return _shard(_whole(path, dtype))


def transformers_native(path: str, dtype: torch.dtype) -> Any:
    """``from_pretrained`` with a ``DistributedConfig``; wraps by the library's own plan."""
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    world = torch.distributed.get_world_size()
    return AutoModelForCausalLM.from_pretrained(
        path, dtype=dtype, distributed_config=DistributedConfig(fsdp_size=world)
    )


def accelerate_efficient(path: str, dtype: torch.dtype) -> Any:
    """Accelerate's loading from a full state dict on the first rank."""
    from types import SimpleNamespace

    from accelerate.utils.fsdp_utils import fsdp2_load_full_state_dict

    first = torch.distributed.get_rank() == 0
    whole = _whole(path, dtype) if first else None
    values = whole.state_dict() if whole is not None else {}
    model = _shard(_on_meta(path, dtype))
    fsdp2_load_full_state_dict(SimpleNamespace(is_main_process=first), model, values)
    return model


def dcp_broadcast(path: str, dtype: torch.dtype) -> Any:
    """``set_model_state_dict`` with ``broadcast_from_rank0``."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    values = _whole(path, dtype).state_dict() if torch.distributed.get_rank() == 0 else {}
    model = _shard(_on_meta(path, dtype))
    set_model_state_dict(model, values, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
    return model


def dcp_load(path: str, dtype: torch.dtype) -> Any:
    """``dcp.load`` with the reader of Hugging Face checkpoints, into the dtype of the file; then converted."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

    model = _shard(_on_meta(path, torch.bfloat16)).to_empty(device="cpu")
    values = model.state_dict()
    dcp.load(values, storage_reader=HuggingFaceStorageReader(path))
    return model.to(dtype)


def raw_reads(path: str, dtype: torch.dtype) -> Any:
    """Direct reads of every file, blocks divided among ranks and threads; nothing is kept, so there is no model."""
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    local = threading.local()

    def read(block: tuple[int, int]) -> int:
        if not hasattr(local, "buffer"):
            local.buffer = mmap.mmap(-1, RAW_BUFFER_BYTES)
        return os.preadv(block[0], [local.buffer], block[1])

    with contextlib.ExitStack() as stack:
        blocks, total = list[tuple[int, int]](), 0
        for name in sorted(Path(path).glob("*.safetensors")):
            file = os.open(name, os.O_RDONLY | os.O_DIRECT)
            stack.callback(os.close, file)
            size = os.fstat(file).st_size
            for number, at in enumerate(range(0, size, RAW_BUFFER_BYTES)):
                if number % world == rank:
                    blocks.append((file, at))
                    total += min(RAW_BUFFER_BYTES, size - at)
        done = sum(stack.enter_context(ThreadPoolExecutor(RAW_THREADS)).map(read, blocks))
    if done != total:
        raise OSError(f"{done} of {total} bytes were read")
    return torch.nn.Module()


RAW_THREADS = 4
RAW_BUFFER_BYTES = 16 * MIB
RAW = "raw reads"
PLAIN = "from_pretrained on each rank"
LOADERS: dict[str, Callable[[str, torch.dtype], Any]] = {
    "ebbtide, slices": ours,
    "ebbtide, broadcast": partial(ours, source="broadcast"),
    PLAIN: plain,
    "transformers DistributedConfig": transformers_native,
    "accelerate, from rank 0": accelerate_efficient,
    "DCP, from rank 0": dcp_broadcast,
    "DCP, load": dcp_load,
    RAW: raw_reads,
}


def _status(field: str) -> int:
    return fields_of(Path("/proc/self/status"), unit=1024)[f"{field}:"]


def _disk_bytes() -> int:
    return fields_of(Path("/proc/self/io"))["read_bytes:"]


class _PrivatePeak:
    """The highest private memory of this process while it is open, sampled every few milliseconds."""

    def __enter__(self) -> _PrivatePeak:
        self.nbytes, self._stop = 0, threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(0.005):
            self.nbytes = max(self.nbytes, _status("RssAnon"))


def rank_main(rank: int, world: int, folder: str, loader: str, dtype: str, record: bool) -> None:
    """Load with one loader in this rank, and write its measurements to ``<folder>/rank-<rank>.json``.

    Args:
        rank: Rank of this process.
        world: Number of ranks.
        folder: Where ranks meet; the checkpoints ``big`` and ``tiny`` are next to it.
        loader: One of ``LOADERS``.
        dtype: Name of the dtype of the parameters.
        record: Also record memory over time on the first rank, into ``<folder>/run``.
    """
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world))
    os.environ.update(GLOO_SOCKET_IFNAME="lo", TOKENIZERS_PARALLELISM="false")
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=world)
    home, as_dtype = Path(folder).parent, getattr(torch, dtype)
    LOADERS[loader](str(home / "tiny"), as_dtype)
    gc.collect()
    torch.distributed.barrier()
    found = _measured(loader, str(home / "big"), as_dtype, Path(folder) / "run" if record and rank == 0 else None)
    (Path(folder) / f"rank-{rank}.json").write_text(json.dumps(found))
    torch.distributed.destroy_process_group()


def _measured(loader: str, path: str, dtype: torch.dtype, run: Path | None) -> dict[str, Any]:
    if run is not None:
        return _recorded(loader, path, dtype, run)
    base, base_private, disk = _status("VmRSS"), _status("RssAnon"), _disk_bytes()
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
    with _PrivatePeak() as private:
        started, processor = time.perf_counter(), time.process_time()
        model = LOADERS[loader](path, dtype)
        locals_ = _touched(model)
        processor = time.process_time() - processor
        torch.distributed.barrier()
        seconds = time.perf_counter() - started
    found = {
        "seconds": seconds,
        "processor_seconds": processor,
        "base_bytes": base,
        "peak_bytes": _status("VmHWM") - base,
        "private_peak_bytes": private.nbytes - base_private,
        "shard_bytes": sum(t.numel() * t.element_size() for t in locals_.values()),
        "disk_bytes": _disk_bytes() - disk,
    }
    for tensor in locals_.values():  # as the first optimizer step does: a private mapping copies its pages now
        tensor.view(torch.uint8).view(-1)[::4096].add_(0)
    torch.distributed.barrier()
    return {
        **found,
        "written_seconds": time.perf_counter() - started,
        "digests": {n: _digest(t) for n, t in locals_.items()},
        "buffers": {n: _digest(b.detach()) for n, b in model.named_buffers()},
    }


def _recorded(loader: str, path: str, dtype: torch.dtype, run: Path) -> dict[str, Any]:
    """Load while memory is recorded; ``load_sharded`` emits its own events, those of others are emitted here."""
    import ebbtide
    from ebbtide.base.events import BUS

    with ebbtide.track_memory(run, mode=loader, model="Qwen3 with random weights", sample_seconds=0.01):
        if not loader.startswith("ebbtide"):
            BUS.emit("load", edge="begin", source=loader, rank=0, bytes=None, seconds=None)
        started = time.perf_counter()
        _touched(LOADERS[loader](path, dtype))
        seconds = time.perf_counter() - started
        if not loader.startswith("ebbtide"):
            BUS.emit("load", edge="end", source=loader, rank=0, bytes=None, seconds=round(seconds, 3))
    for _ in ("loaded", "written"):  # where the ranks that are measured wait
        torch.distributed.barrier()
    return {"seconds": seconds}


def _touched(model: Any) -> dict[str, torch.Tensor]:
    """Return this rank's shards with every page touched: an untouched page has not been read."""
    locals_ = {n: getattr(p, "_local_tensor", p).detach() for n, p in model.named_parameters()}
    for tensor in locals_.values():
        tensor.view(torch.uint8).view(-1)[::4096].sum()
    return locals_


def _digest(tensor: torch.Tensor) -> str:
    if tensor.is_meta:
        return "on meta"  # some loaders leave buffers there
    data = tensor.contiguous().view(-1).view(torch.uint8).numpy()
    return f"{tuple(tensor.shape)} {tensor.dtype} {hashlib.sha256(data).hexdigest()}"
