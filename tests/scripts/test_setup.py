"""setup.sh and FindLibTorch.cmake: what they say, on made-up LibTorch folders; nothing is fetched."""

import os
import subprocess
import tempfile
import unittest
from pathlib import Path

from helpers import ROOT


def make_libtorch(folder: Path, version: str | None) -> Path:
    """A folder laid out as an unpacked LibTorch archive of `version`."""
    (folder / "lib").mkdir(parents=True)
    for name in ("libtorch_cpu.so", "libc10.so"):
        (folder / "lib" / name).touch()
    header = folder / "include/torch/csrc/api/include/torch/version.h"
    header.parent.mkdir(parents=True)
    names = ("MAJOR", "MINOR", "PATCH")
    numbers = version.split(".") if version else ()
    header.write_text("".join(f"#define TORCH_VERSION_{n} {v}\n" for n, v in zip(names, numbers)))
    return folder


class FindLibTorch(unittest.TestCase):
    def setUp(self):
        scratch = tempfile.TemporaryDirectory()
        self.addCleanup(scratch.cleanup)
        self.dir = Path(scratch.name).resolve()

    def find(self, *definitions, version="", **environment):
        """(folder, version, reason) that find_package(LibTorch) ends with."""
        script = self.dir / "find.cmake"
        script.write_text(
            f"cmake_minimum_required(VERSION 3.25)\nfind_package(LibTorch {version} QUIET)\n"
            'message("${LibTorch_ROOT_DIR}|${LibTorch_VERSION}|${LibTorch_FOUND}|${LibTorch_REASON}")\n'
        )
        command = ["cmake", f"-DCMAKE_MODULE_PATH={ROOT / 'cmake'}", *definitions, "-P", str(script)]
        unset = ("GRAFT_LIBTORCH", "LibTorch_ROOT", "CMAKE_PREFIX_PATH")
        clean = {name: value for name, value in os.environ.items() if name not in unset}
        done = subprocess.run(command, capture_output=True, text=True, env=clean | environment)
        self.assertEqual(done.returncode, 0, done.stderr)
        folder, found_version, found, reason = done.stderr.strip().split("|")
        self.assertEqual(found == "TRUE", not reason)
        return folder, found_version, reason

    def test_layouts(self):
        archive = make_libtorch(self.dir / "archive" / "libtorch", "2.9.1")
        venv = make_libtorch(self.dir / "venv/lib/python3.11/site-packages/torch", "2.10.0")
        for prefix, want in (
            (archive, archive),
            (archive.parent, archive),
            (self.dir / "venv", venv),
            (venv.parent, venv),
            (venv / "share/cmake", venv),
        ):
            prefix.mkdir(parents=True, exist_ok=True)
            folder, _, reason = self.find(f"-DCMAKE_PREFIX_PATH={prefix}")
            self.assertEqual((folder, reason), (str(want), ""), prefix)

    def test_order(self):
        first = make_libtorch(self.dir / "first", "2.8.0")
        second = make_libtorch(self.dir / "second", "2.9.0")
        other = self.dir / "other"
        both = f"-DCMAKE_PREFIX_PATH={other};{second};{first}"
        self.assertEqual(self.find(both)[0], str(second))
        self.assertEqual(self.find(CMAKE_PREFIX_PATH=f"{other}:{first}:{second}")[0], str(first))
        self.assertEqual(self.find(both, GRAFT_LIBTORCH=str(first))[0], str(first))
        self.assertEqual(self.find(f"-DLibTorch_ROOT={second}", GRAFT_LIBTORCH=str(first))[0], str(second))

    def test_versions(self):
        for version, least, good in (
            ("2.7.9", "", False), ("2.8.0", "", True), ("2.11.0", "", True), ("2.8.0", "2.10", False),
            ("2.10.0", "2.10", True), ("1.13.1", "", False), ("10.0.0", "2.10", True),
        ):  # fmt: skip
            folder = make_libtorch(self.dir / f"{version}-{least}", version)
            _, found, reason = self.find(f"-DCMAKE_PREFIX_PATH={folder}", version=least)
            self.assertEqual(found, version)
            if good:
                self.assertEqual(reason, "")
            else:
                text = f"the LibTorch in {folder} is {version}, but {least or '2.8'} or newer is needed"
                self.assertIn(text, reason)
                self.assertIn("run scripts/setup.sh", reason)

    def test_unreadable_version(self):
        folder = make_libtorch(self.dir / "x", None)
        self.assertIn("no readable torch/version.h", self.find(f"-DCMAKE_PREFIX_PATH={folder}")[2])

    def test_a_named_folder_without_libtorch_is_an_error(self):
        for name in ("GRAFT_LIBTORCH", "LibTorch_ROOT"):
            folder, _, reason = self.find(**{name: "/nowhere/libtorch"})
            self.assertEqual(folder, "")
            self.assertIn("is /nowhere/libtorch, which holds no lib/libtorch_cpu.so", reason)

    def test_nothing_at_all(self):
        alone = self.dir / "alone" / "cmake"
        alone.mkdir(parents=True)
        (alone / "FindLibTorch.cmake").write_text((ROOT / "cmake/FindLibTorch.cmake").read_text())
        _, _, reason = self.find(f"-DCMAKE_MODULE_PATH={alone}")
        self.assertIn(f"no LibTorch in CMAKE_PREFIX_PATH or {self.dir}/alone/.deps/libtorch", reason)
        self.assertIn("run scripts/setup.sh", reason)


class Setup(unittest.TestCase):
    def setup_sh(self, *args):
        return subprocess.run(["bash", ROOT / "scripts/setup.sh", *args], capture_output=True, text=True)

    def test_help(self):
        done = self.setup_sh("--help")
        self.assertEqual(done.returncode, 0)
        self.assertRegex(done.stdout, r"(?s)scripts/setup.sh \[--no-data\].*GRAFT_CACHE.*GRAFT_LIBTORCH")
        self.assertNotIn("set -euo", done.stdout)

    def test_unknown_option(self):
        done = self.setup_sh("--no-date")
        self.assertEqual(done.returncode, 1)
        self.assertIn("unknown option '--no-date'", done.stderr)
        self.assertIn("--no-data", done.stderr)


if __name__ == "__main__":
    unittest.main()
