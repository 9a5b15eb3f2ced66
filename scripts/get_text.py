#!/usr/bin/env python3
"""Writes Jane Austen's six novels, the demo's text, as OUT/<novel>.txt in UTF-8.

    get_text.py OUT [--package-dir DIR]

They come out of Debian's package r-cran-janeaustenr (public domain text, one R string a line). The
package is read where it is installed; otherwise it is downloaded with apt-get, which checks Debian's
signature, and unpacked without being installed, so R is not needed. --package-dir names an unpacked
janeaustenr folder instead. A line ends with one newline; nothing else is changed.
Run it with .deps/venv/bin/python, which scripts/setup.sh makes.
"""

import argparse
import gzip
import hashlib
import os
import shutil
import struct
import subprocess
import sys
import tempfile
import zlib
from pathlib import Path

import wheels

try:
    import rdata
except ImportError as error:
    sys.exit(f"get_text.py: {error}: run scripts/setup.sh, then use .deps/venv/bin/python")

PACKAGE = "r-cran-janeaustenr"
INSTALLED = Path("usr/lib/R/site-library/janeaustenr")

# R object -> (file name, sha256 of the text that the published figures were measured on).
NOVELS = {
    "emma": ("emma", "7c67b5985c6d0de1efaeb5d342d52cb82c38083c40e2295129e30e87ee690ebe"),
    "mansfieldpark": ("mansfield_park", "98bc90519cdf4ef663ad7de2734bb529435ef24f7abbde6bb1a50898871dafe9"),
    "northangerabbey": ("northanger_abbey", "51f91bbe0517db8e65cff009b097ce0a1836124c4e0532ac19e6c0cad982abed"),
    "persuasion": ("persuasion", "8061549557aebd2fd6e353d18d9197cb707029112bd52d4d8b174583a925848a"),
    "prideprejudice": ("pride___prejudice", "dfc684d4f857fa938268f9ab9c5567b64bd0691251eca959644adeabe6287a4d"),
    "sensesensibility": ("sense___sensibility", "105e1651fe93bed7130078578efd31e0c557d68667ba672ddc876f735b30fe09"),
}


class TextError(Exception):
    """The text could not be made; the message names the file and the way out."""


def read_lazy_load(base: Path) -> dict[str, object]:
    """The objects of an R lazy-load database, base.rdx (an index) and base.rdb (the values).

    Each value is a 4-byte big-endian length followed by zlib data of a serialised R object.
    """
    database = base.with_suffix(".rdb").read_bytes()
    objects = {}
    for name, (offset, length) in read_index(base.with_suffix(".rdx")).items():
        packed = database[int(offset) : int(offset) + int(length)]
        try:
            (size,) = struct.unpack_from(">I", packed)
            value = zlib.decompress(packed[4:])
        except (struct.error, zlib.error) as error:
            raise TextError(f"{base}.rdb: object '{name}' is damaged: {error}") from error
        if len(value) != size:
            raise TextError(f"{base}.rdb: object '{name}' has {len(value)} bytes, expected {size}")
        objects[str(name)] = convert_r_object(value)
    return objects


def read_index(path: Path) -> dict[str, tuple[int, int]]:
    """Name -> (offset, length) of the objects in the .rdb file beside the .rdx file `path`."""
    try:
        return convert_r_object(gzip.decompress(path.read_bytes()))["variables"]
    except Exception as error:  # rdata raises nothing narrower on damaged data
        raise TextError(f"{path} is not the index of an R data base: {error}") from error


def convert_r_object(serialised: bytes):
    """The Python value of an uncompressed R serialisation."""
    return rdata.conversion.convert(rdata.parser.parse_data(serialised, extension=".rds"))


def join_lines(lines) -> str:
    """One text of an R character vector; a missing line (NA) is an error."""
    for number, line in enumerate(lines, 1):
        if not isinstance(line, str):
            raise TextError(f"line {number} is {line!r}, not text")
    return "\n".join(lines) + "\n"


def read_novels(package_dir: Path) -> dict[str, str]:
    """File name -> text of every novel in an unpacked janeaustenr package."""
    base = package_dir / "data" / "Rdata"
    if not base.with_suffix(".rdx").is_file():
        raise TextError(f"{package_dir} has no data/Rdata.rdx: it is not an installed janeaustenr")
    objects = read_lazy_load(base)
    texts = {}
    for name, (file_name, _) in NOVELS.items():
        if name not in objects:
            raise TextError(f"{base}.rdb has no object '{name}', only {', '.join(sorted(objects))}")
        texts[file_name] = join_lines(objects[name])
    return texts


def download_package(into: Path) -> Path:
    """Fetches and unpacks the Debian package under `into`; returns its janeaustenr folder."""
    cache = wheels.cache_dir() / "debs"
    cache.mkdir(parents=True, exist_ok=True)
    debs = sorted(cache.glob(f"{PACKAGE}_*.deb"))
    if not debs:
        _run(["apt-get", "download", "-qq", PACKAGE], into, "run 'apt-get update' as root first")
        debs = [Path(shutil.move(deb, cache)) for deb in into.glob(f"{PACKAGE}_*.deb")]
    _run(["dpkg-deb", "-x", str(debs[-1]), str(into)], into, f"remove {debs[-1]} and run this again")
    return into / INSTALLED


def _run(command: list[str], folder: Path, way_out: str) -> None:
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    except FileNotFoundError as error:
        raise TextError(
            f"{command[0]} is not here: on a machine without Debian's packages give --package-dir "
            "an installed R package janeaustenr"
        ) from error
    if done.returncode != 0:
        raise TextError(f"'{' '.join(command)}' failed: {way_out}\n{done.stderr.strip()}")


def load_texts(package_dir: Path | None) -> dict[str, str]:
    if package_dir is not None:
        return read_novels(package_dir)
    if (Path("/") / INSTALLED).is_dir():
        return read_novels(Path("/") / INSTALLED)
    with tempfile.TemporaryDirectory() as scratch:
        return read_novels(download_package(Path(scratch)))


def digest(text: bytes) -> str:
    return hashlib.sha256(text).hexdigest()


def is_made(out: Path) -> bool:
    """True when every novel is in `out`, exactly as published figures were measured on it."""
    files = {out / f"{name}.txt": expected for name, expected in NOVELS.values()}
    return all(path.is_file() and digest(path.read_bytes()) == want for path, want in files.items())


def write_texts(texts: dict[str, str], out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    expected = dict(NOVELS.values())
    for name, text in texts.items():
        data = text.encode("utf-8")
        if digest(data) != expected[name]:
            print(
                f"get_text.py: warning: {name} is another edition than the one the published figures "
                "were measured on; expect slightly different figures",
                file=sys.stderr,
            )
        partial = out / f".{name}.txt.partial"
        partial.write_bytes(data)
        partial.replace(out / f"{name}.txt")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, help="folder to write")
    parser.add_argument("--package-dir", type=Path, help="an unpacked R package janeaustenr")
    args = parser.parse_args(argv)
    out = Path(os.path.abspath(args.out))
    try:
        if is_made(out):
            print(f"text: {args.out} (made already)")
            return 0
        write_texts(load_texts(args.package_dir), out)
    except (TextError, OSError) as error:
        print(f"get_text.py: {error}", file=sys.stderr)
        return 1
    print(f"text: {args.out} ({len(NOVELS)} novels)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
