#!/usr/bin/env python3
"""Fetches pinned wheels into a cache and unpacks what is needed from them.

    wheels.py fetch REQUIREMENTS              prints the path of each wheel the file pins
    wheels.py unpack WHEEL DEST PATTERN...    unpacks the members that match, e.g. 'torch/include/*=include'

REQUIREMENTS is a pip requirements file that pins every package with ==version and --hash=sha256:...
A wheel already in the cache with that hash is not fetched again, so a second run needs no network.
The cache is GRAFT_CACHE, by default ~/.cache/graft. Standard library and pip only.
"""

import argparse
import fnmatch
import hashlib
import os
import re
import subprocess
import sys
import tempfile
import zipfile
import zlib
from pathlib import Path

# What the wheels are for: the machine, not the Python that runs this script. They are only unpacked,
# so any Python can fetch the cp311 build.
_TARGET = ["--python-version", "3.11", "--implementation", "cp", "--only-binary=:all:"]
_TARGET += [
    arg
    for tag in ("manylinux_2_28", "manylinux_2_25", "manylinux_2_17", "manylinux2014")
    for arg in ("--platform", f"{tag}_x86_64")
]


class WheelError(Exception):
    """A wheel that could not be fetched or unpacked; the message says how to get on."""


def cache_dir() -> Path:
    default = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "graft"
    return Path(os.environ.get("GRAFT_CACHE") or default)


def sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_pins(requirements: Path) -> list[tuple[str, str, set[str]]]:
    """Each pinned package of a requirements file as (name, version, allowed sha256)."""
    text = re.sub(r"(^|\s)#.*", "", requirements.read_text()).replace("\\\n", " ")
    pins = []
    for line in filter(None, (line.strip() for line in text.splitlines())):
        match = re.match(r"([A-Za-z0-9._-]+)==(\S+)", line)
        hashes = set(re.findall(r"--hash=sha256:([0-9a-f]{64})", line))
        if not match or not hashes:
            raise WheelError(f"{requirements}: '{line}' is not NAME==VERSION with --hash=sha256:...")
        pins.append((match[1], match[2], hashes))
    return pins


def find_cached(cache: Path, name: str, version: str, hashes: set[str]) -> Path | None:
    prefix = re.sub(r"[-_.]+", "_", name)
    for path in sorted(cache.glob(f"{prefix}-{version}-*.whl")):
        if sha256(path) in hashes:
            return path
    return None


def fetch(requirements: Path, cache: Path | None = None) -> list[Path]:
    """Paths of the wheels that `requirements` pins, fetched into the cache where they are missing."""
    cache = (cache or cache_dir()) / "wheels"
    cache.mkdir(parents=True, exist_ok=True)
    pins = read_pins(requirements)
    found = [find_cached(cache, *pin) for pin in pins]
    if not all(found):
        with tempfile.TemporaryDirectory(dir=cache) as partial:
            _pip_download(requirements, Path(partial))
            # A wheel appears in the cache under its name only when it is whole and checked.
            for wheel in Path(partial).glob("*.whl"):
                wheel.replace(cache / wheel.name)
        found = [find_cached(cache, *pin) for pin in pins]
    for (name, version, _), path in zip(pins, found):
        if path is None:
            raise WheelError(f"{name} {version}: pip fetched no wheel with the pinned sha256")
    return found


def _pip_download(requirements: Path, dest: Path) -> None:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    command += ["--no-deps", "--require-hashes", *_TARGET, "--dest", str(dest), "-r", str(requirements)]
    done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    if done.returncode != 0:
        raise WheelError(
            f"pip could not fetch what {requirements} pins:\n{done.stderr.strip()}\n"
            "Check the network (pip takes a proxy from https_proxy and a mirror from PIP_INDEX_URL), "
            f"or put the wheel into {dest.parent} by hand, then run this again."
        )


def unpack(wheel: Path, dest: Path, rules: list[str]) -> int:
    """Unpacks the members that match a rule PATTERN[=TARGET] and returns how many.

    The part of the pattern before the last '/' is replaced by TARGET (default: nothing), so
    'torch/include/*=include' puts torch/include/a/b.h at DEST/include/a/b.h.
    """
    try:
        with zipfile.ZipFile(wheel) as archive:
            return sum(_unpack_rule(archive, dest, rule) for rule in rules)
    except (zipfile.BadZipFile, zlib.error) as error:
        raise WheelError(f"{wheel} is damaged: {error}") from error


def _unpack_rule(archive: zipfile.ZipFile, dest: Path, rule: str) -> int:
    pattern, _, target = rule.partition("=")
    base = pattern.rpartition("/")[0]
    files = [name for name in fnmatch.filter(archive.namelist(), pattern) if not name.endswith("/")]
    if not files:
        raise WheelError(f"{Path(archive.filename).name} has no member '{pattern}'")
    for name in files:
        _write_member(archive, name, dest / target / name[len(base) :].lstrip("/"))
    return len(files)


def _write_member(archive: zipfile.ZipFile, member: str, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with archive.open(member) as source, open(path, "wb") as sink:
        while block := source.read(1 << 20):
            sink.write(block)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    fetch_args = commands.add_parser("fetch", help="print the path of each pinned wheel")
    fetch_args.add_argument("requirements", type=Path)
    unpack_args = commands.add_parser("unpack", help="unpack the members that match PATTERN[=TARGET]")
    unpack_args.add_argument("wheel", type=Path)
    unpack_args.add_argument("dest", type=Path)
    unpack_args.add_argument("rules", nargs="+", metavar="PATTERN[=TARGET]")
    args = parser.parse_args(argv)
    try:
        if args.command == "fetch":
            print(*fetch(args.requirements), sep="\n")
        else:
            unpack(args.wheel, args.dest, args.rules)
    except (WheelError, OSError) as error:
        print(f"wheels.py: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
