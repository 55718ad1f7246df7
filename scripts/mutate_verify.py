"""Break verification on purpose, one fault at a time, and show which test notices.

Each mutation replaces one piece of text in a copy of the source and runs the tests of the laws against it. Exit status 0
means that the untouched copy passes and that every mutation is caught.

    python scripts/mutate_verify.py
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
TESTS = ("test_verify_law.py", "test_verify_edges.py", "test_noise.py", "test_step_law.py")


class Mutation(NamedTuple):
    """A fault: `old`, found once in `file`, becomes `new`."""

    fault: str
    file: str
    old: str
    new: str


MUTATIONS = (
    Mutation(
        "`<=` for `<` when the uniform is 0",
        "sampling.py",
        "self._uniform(depth, candidate) < probability",
        "self._uniform(depth, candidate) <= probability",
    ),
    Mutation(
        "residual not renormalised",
        "verify.py",
        "return (residual / mass if mass > _NO_MASS else p), mass",
        "return (residual if mass > _NO_MASS else p), mass",
    ),
    Mutation(
        "residual from p",
        "verify.py",
        "(weight * p - q).clip(min=0)",
        "weight * p",
    ),
    Mutation(
        "bonus from the wrong row",
        "verify.py",
        "noise.draw(p, depth))",
        "noise.draw(p if below[node] or node < 0 else _wide(row(draft.parents[node])), depth))",
    ),
    Mutation(
        "break at the first failure in `block`",
        "verify.py",
        "noise.accept(weight[node], len(walk) - 2, node):",
        "all(noise.accept(weight[above], depth, above) for depth, above in enumerate(walk[1:])):",
    ),
    Mutation(
        "q of the wrong sibling",
        "verify.py",
        "q = proposals.of(child)",
        "q = proposals.of(below[node][0])",
    ),
    Mutation(
        "unchanged q without replacement",
        "verify.py",
        "if self._draft.drawn[node] is Drawn.WITHOUT_REPLACEMENT:",
        "if False:",
    ),
    Mutation(
        "noise of `block` keyed by absolute position",
        "sampling.py",
        "_key(self.seed, Purpose.ACCEPT, self.root, depth, candidate)",
        "_key(self.seed, Purpose.ACCEPT, self.root + depth)",
    ),
    Mutation(
        "equal-token siblings not merged",
        "verify.py",
        "if heir != child:",
        "if False:",
    ),
    Mutation(
        "history of the wrong node in the penalties",
        "engine/step.py",
        "[draft.tokens[above] for above in draft.path(node)]",
        "draft.tokens[: node + 1]",
    ),
    Mutation(
        "warper skipped on the bonus row",
        "engine/step.py",
        "seq.distribution(*_at(node, logits_NV, draft))",
        "seq.distribution(*_at(node, logits_NV, draft)) if node in draft.parents else logits_NV[node + 1].softmax(0)",
    ),
    Mutation(
        "warper skipped on the bonus row of `match`",
        "engine/step.py",
        "seq.target_token(*_at(node, logits_NV, draft))",
        "seq.target_token(*_at(node, logits_NV, draft)) if node in draft.parents else "
        "seq.noise().target(logits_NV[node + 1].softmax(0), len(draft.path(node)))",
    ),
    Mutation(
        "a draft's token dropped for its own probability",
        "drafters/growth.py",
        "            return self.whole()\n",
        "            own = [self._q[row][token] for row, token in zip(self._q_row, self.tokens)]\n"
        "            return self.whole().only(range(len(self) - (own[-1] < 0.4)))\n",
    ),
)


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        for part in ("src", "tests"):
            shutil.copytree(ROOT / part, copy / part, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", copy)
        failed = run_tests(copy)
        if failed is not None:
            print(f"the tests fail without any mutation, at {failed}; mend that first")
            return 1
        print("no mutation: all pass")
        missed = [mutation.fault for mutation in MUTATIONS if not caught(mutation, copy)]
    print(f"{len(MUTATIONS) - len(missed)} of {len(MUTATIONS)} mutations caught")
    return 1 if missed else 0


def caught(mutation: Mutation, copy: Path) -> bool:
    path = copy / "src" / "draftwise" / mutation.file
    source = path.read_text(encoding="utf-8")
    found = source.count(mutation.old)
    if found != 1:
        raise SystemExit(f"{mutation.fault}: {mutation.file} has the text {found} times, not once: {mutation.old!r}")
    path.write_text(source.replace(mutation.old, mutation.new), encoding="utf-8")
    failed = run_tests(copy)
    path.write_text(source, encoding="utf-8")
    print(f"{mutation.fault:50} {failed or 'NOT CAUGHT'}", flush=True)
    return failed is not None


def run_tests(copy: Path) -> str | None:
    """The first test that fails in `copy`, None if all pass."""
    command = [sys.executable, "-B", "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *(f"tests/{name}" for name in TESTS)]
    done = subprocess.run(command, cwd=copy, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return None
    failure = re.search(r"^FAILED tests/(.+?)(?: - |$)", done.stdout, re.MULTILINE)
    if done.returncode != 1 or failure is None:
        raise SystemExit(f"the tests did not run:\n{done.stdout[-3000:]}{done.stderr[-1000:]}")
    return failure[1]


if __name__ == "__main__":
    sys.exit(main())
