"""Compile the C++ kernels once for the user's machine and load them.

Knows compilers, instruction sets and the cache folder; knows nothing of weights or models.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import torch

from draftwise.checkpoint import cache_dir

SOURCES = Path(__file__).parent / "cpu"

_AVX2 = ("avx2", "fma", "f16c")
_AVX512 = ("avx512f", "avx512bw", "avx512vl", "avx512dq")
_BF16 = (*_AVX2, *_AVX512, "avx512vbmi", "avx512_bf16", "avx512_vnni")
INSTRUCTION_SETS: dict[str, tuple[str, ...]] = {
    "amx": (*_BF16, "amx_tile", "amx_bf16"),
    "avx512_bf16": _BF16,
    "avx512": (*_AVX2, *_AVX512),
    "avx2": _AVX2,
    "portable": (),
}
"""Best first: a name, and the processor flags that it needs, as Linux spells them."""

_FLAGS = ("-std=c++17", "-O3", "-fPIC", "-ffp-contract=off", "-fno-math-errno", "-w")


class BuildError(RuntimeError):
    """The kernels cannot be compiled here. The message says why and what to install."""


@functools.cache
def processor_flags() -> frozenset[str]:
    """The features the processor and the kernel of the operating system offer; empty where Linux does not say."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line.split(":", 1)[1].split() for line in lines if line.startswith("flags")), []))


def instruction_sets() -> list[str]:
    """Those of INSTRUCTION_SETS that run on this machine, best first."""
    offered = [name for name, needs in INSTRUCTION_SETS.items() if processor_flags().issuperset(needs)]
    return [name for name in offered if name != "amx" or tiles_granted()]


@functools.cache
def tiles_granted() -> bool:
    """Ask Linux for leave to use the processor's tiles (AMX), which a process needs once."""
    arch_prctl, request_permission, tile_data = 158, 0x1023, 18
    return platform.machine() == "x86_64" and ctypes.CDLL(None).syscall(arch_prctl, request_permission, tile_data) == 0


def _compiler_flag(feature: str) -> str:
    return f"-m{feature.replace('_', '-' if feature.startswith('amx') else '')}"


@functools.cache
def library(instruction_set: str | None = None) -> ctypes.CDLL | None:
    """The compiled kernels, for the best instruction set unless one is named; None, with one warning, where there are none."""
    try:
        return load(instruction_set or instruction_sets()[0])
    except BuildError as error:
        warnings.warn(f"no fast CPU kernels, falling back to torch: {error}", RuntimeWarning, stacklevel=2)
        return None


def loaded() -> ctypes.CDLL | None:
    """The compiled kernels if a model uses them already: for what is right without them and only faster with them."""
    return library() if library.cache_info().currsize else None


def version() -> str:
    """Names the kernels that `loaded` gives; empty where there are none."""
    lib = loaded()
    return "" if lib is None else Path(lib._name).stem


def load(instruction_set: str) -> ctypes.CDLL:
    """Load the kernels for `instruction_set`, compiling them first where the cache has none. Raises BuildError."""
    compiler = _compiler()
    name = f"{instruction_set}-{_key(compiler, instruction_set)}.so"
    folder = cache_dir() / "kernels"
    target = folder / name
    if not target.exists():
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with open(folder / f"{name}.lock", "w") as lock:  # the second of two processes waits and finds the file
                fcntl.flock(lock, fcntl.LOCK_EX)
                if not target.exists():
                    _compile(compiler, instruction_set, target)
        except OSError:  # a folder that cannot be written: compile for this process alone
            with tempfile.TemporaryDirectory(prefix="draftwise-") as private:
                _compile(compiler, instruction_set, Path(private) / name)
                return ctypes.CDLL(str(Path(private) / name))
    return ctypes.CDLL(str(target))


def _compiler() -> str:
    for name in ("g++", "clang++", "c++"):
        if path := shutil.which(name):
            return os.path.realpath(path)
    raise BuildError("no C++ compiler found; install g++ (apt install g++, dnf install gcc-c++)")


def _key(compiler: str, instruction_set: str) -> str:
    state = os.stat(compiler)
    parts = [torch.__version__, compiler, str(state.st_size), str(state.st_mtime_ns), platform.machine(), *_FLAGS]
    parts += INSTRUCTION_SETS[instruction_set]
    digest = hashlib.sha256("\0".join(parts).encode())
    for source in sorted(SOURCES.iterdir()):
        digest.update(source.name.encode() + source.read_bytes())
    return digest.hexdigest()[:16]


def layout_key() -> str:
    """Changes when the sources do, and with them perhaps how weights are laid out."""
    sources = sorted(source for source in SOURCES.iterdir() if source.name in ("pack.h", "weights.h"))
    return hashlib.sha256(b"\0".join(source.read_bytes() for source in sources)).hexdigest()[:12]


def _compile(compiler: str, instruction_set: str, target: Path) -> None:
    """Compile and link next to `target`, then move into place in one step. Raises BuildError, or OSError by the folder."""
    print("compiling CPU kernels, once for this machine, ~30 s", file=sys.stderr, flush=True)
    torch_root = Path(torch.__file__).parent
    features = [_compiler_flag(feature) for feature in INSTRUCTION_SETS[instruction_set]]
    includes = [f"-I{torch_root / 'include'}", f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"]
    with tempfile.TemporaryDirectory(dir=target.parent) as private:
        objects, running = [], []
        for source in sorted(SOURCES.glob("*.cpp")):
            extra = ["-std=c++20", "-fopenmp", *includes] if source.name == "threads.cpp" else features
            objects.append(str(Path(private) / f"{source.stem}.o"))
            command = [compiler, *_FLAGS, *extra, "-c", str(source), "-o", objects[-1]]
            running.append((command, subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)))
        for command, process in running:
            output, _ = process.communicate()
            _check(command, process.returncode, output)
        # linked to torch, so that its OpenMP runtime is the one that is found; never to the compiler's own
        made = str(Path(private) / target.name)
        command = [compiler, "-shared", *objects, "-o", made, f"-L{torch_root / 'lib'}", "-ltorch_cpu", "-lc10"]
        linked = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
        _check(command, linked.returncode, linked.stdout)
        os.replace(made, target)


def _check(command: list[str], status: int, output: str) -> None:
    if status:
        lines = [line for line in output.splitlines() if "error" in line] or output.splitlines()[-1:] or [f"status {status}"]
        raise BuildError(f"{os.path.basename(command[0])} failed ({lines[0].strip()}); g++ 11 or newer is known to work")
