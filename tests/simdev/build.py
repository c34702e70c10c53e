"""Builds the simulated device with the system's compiler, once for each torch, Python, compiler and source.

python -m tests.simdev.build
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch.utils.cpp_extension import include_paths, library_paths

HERE = Path(__file__).parent
FOLDER = HERE.parents[1] / "build" / "simdev"
NAME = "ebbtide_simdev"
JOBS = 2
SECONDS = 600
FLAGS = ["-O1", "-std=c++20", "-fPIC", "-Wall", "-Wno-interference-size", f"-DTORCH_EXTENSION_NAME={NAME}"]
LIBRARIES = ["-lc10", "-ltorch", "-ltorch_cpu", "-ltorch_python"]


class CannotBuildError(RuntimeError):
    """This machine, or this torch, cannot build the device; the text is the reason."""


def build() -> Path:
    """Return the path of the built module; build it if necessary.

    Raises:
        CannotBuildError: There is no compiler, it fails, or the folder cannot be written.
    """
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        raise CannotBuildError("no C++ compiler (looked for $CXX, g++, clang++)")
    sources = sorted((HERE / "csrc").iterdir())
    made = FOLDER / _key(compiler, sources) / f"{NAME}.so"
    try:
        made.parent.mkdir(parents=True, exist_ok=True)
        with (made.parent / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not made.exists():
                _compile(compiler, [path for path in sources if path.suffix == ".cpp"], made)
    except OSError as error:
        raise CannotBuildError(f"{made.parent}: {error}") from error
    return made


def _key(compiler: str, sources: list[Path]) -> str:
    """Return a digest of the build's inputs."""
    digest = hashlib.sha256()
    for text in (torch.__version__, str(torch.version.git_version), sys.version, *FLAGS, _run([compiler, "--version"])):
        digest.update(text.encode())
    for path in sources:
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def _compile(compiler: str, sources: list[Path], made: Path) -> None:
    print(f"building the simulated device in {made.parent} (about a minute, once)", file=sys.stderr, flush=True)
    includes = [f"-isystem{path}" for path in (*include_paths(), sysconfig.get_paths()["include"])]
    objects = [made.parent / f"{path.stem}.o" for path in sources]
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    commands = [
        [compiler, *FLAGS, abi, *includes, "-c", str(source), "-o", str(target)]
        for source, target in zip(sources, objects, strict=True)
    ]
    with ThreadPoolExecutor(JOBS) as pool:
        list(pool.map(_run, commands))
    paths = [flag for path in library_paths() for flag in (f"-L{path}", f"-Wl,-rpath,{path}")]
    partial = made.with_suffix(".partial")
    _run([compiler, "-shared", *map(str, objects), *paths, *LIBRARIES, "-lpthread", "-o", str(partial)])
    partial.rename(made)
    for path in objects:
        path.unlink()


def _run(command: list[str]) -> str:
    """Return the output of a command.

    Raises:
        CannotBuildError: It failed.
    """
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CannotBuildError(f"{command[0]}: {error}") from error
    if done.returncode:
        lines = done.stderr.splitlines()
        raise CannotBuildError(next((line for line in lines if "error" in line), (lines or ["no message"])[-1]))
    return done.stdout


if __name__ == "__main__":
    try:
        print(build())
    except CannotBuildError as error:
        print(f"the simulated device cannot be built: {error}")  # its tests are then skipped with this reason
