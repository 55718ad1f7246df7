"""Run the compiled kernels' tests with every memory access and every undefined operation checked.

The kernels are compiled with the address and undefined-behaviour sanitizers, for this machine's best instruction set, and
loaded into the test run in place of the usual ones. Exit status 0 means that the tests pass and nothing was reported.

    python scripts/check_kernels.py
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TESTS = ("tests/test_kernels.py", "tests/test_noise.py", "tests/test_rows.py", "tests/test_chain.py")
BUILDS = "builds or cache_that or compiler or optimised or written"  # of the compiling itself, and of other sets
CASES = f"(test_kernels or test_chain or test_the_compiled or (test_rows and compiled and (llama or qwen3))) and not ({BUILDS})"
FLAGS = ("-O0", "-g1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer")


def main() -> int:
    """The exit status of the test run, in a process of its own that has the sanitizers' runtimes loaded first."""
    runtimes = [_runtime(name) for name in ("libasan.so", "libubsan.so")]
    if not all(runtimes):
        print("check_kernels: g++ has no sanitizer runtimes here; install libasan and libubsan (part of gcc)", file=sys.stderr)
        return 2
    environment = os.environ | {
        "LD_PRELOAD": " ".join(runtimes),
        "ASAN_OPTIONS": "detect_leaks=0",  # the interpreter's own
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "OMP_NUM_THREADS": "2",
    }
    inner = "import sys; sys.path.insert(0, 'scripts'); import check_kernels; sys.exit(check_kernels.run())"
    return subprocess.run([sys.executable, "-c", inner], cwd=ROOT, env=environment, check=False).returncode


def run() -> int:
    """In that process: sanitized kernels, then the tests."""
    import pytest

    from draftwise.kernels import loader

    loader._FLAGS = (*(flag for flag in loader._FLAGS if flag != "-O3"), *FLAGS)
    loader.library()
    return int(pytest.main(["-q", "-p", "no:cacheprovider", "-o", "timeout=0", "-k", CASES, *TESTS]))


def _runtime(name: str) -> str:
    found = subprocess.run(["g++", f"-print-file-name={name}"], capture_output=True, text=True, check=False).stdout.strip()
    return found if os.path.isabs(found) else ""


if __name__ == "__main__":
    sys.exit(main())
