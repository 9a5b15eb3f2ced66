"""wheels.py: reading pins, the cache, what pip's failure looks like, and unpacking."""

import hashlib
import subprocess
import tempfile
import unittest
import zipfile
from pathlib import Path
from unittest import mock

from helpers import SCRIPTS, run

import wheels

HASH = "0" * 64


class ReadPins(unittest.TestCase):
    def read(self, text):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "requirements.txt"
            path.write_text(text)
            return wheels.read_pins(path)

    def test_pins(self):
        text = f"# why\na-b==1.2 \\\n    --hash=sha256:{HASH} \\\n    --hash=sha256:{'1' * 64}\n\nc==3 --hash=sha256:{HASH}  # x\n"
        self.assertEqual(self.read(text), [("a-b", "1.2", {HASH, "1" * 64}), ("c", "3", {HASH})])
        self.assertEqual(self.read("# nothing\n"), [])

    def test_what_is_not_pinned_is_named(self):
        for line in (f"a>=1 --hash=sha256:{HASH}", "a==1", "a==1 --hash=sha256:123", "-r other.txt"):
            with self.assertRaisesRegex(wheels.WheelError, f"'{line}' is not NAME==VERSION"):
                self.read(line)

    def test_our_own_files_are_pinned(self):
        files = sorted(SCRIPTS.glob("requirements*.txt"))
        self.assertEqual(len(files), 4)
        for path in files:
            self.assertGreater(len(wheels.read_pins(path)), 0, path)


class Cached(unittest.TestCase):
    def setUp(self):
        scratch = tempfile.TemporaryDirectory()
        self.addCleanup(scratch.cleanup)
        self.dir = Path(scratch.name)
        self.cache = self.dir / "cache"
        self.wheel = self.dir / "a_b-1.0-py3-none-any.whl"
        with zipfile.ZipFile(self.wheel, "w") as archive:
            archive.writestr("pkg/lib/liba.so", b"\x7fELF")
            archive.writestr("pkg/lib/liba.so.1", b"one")
            archive.writestr("pkg/include/x/y.h", "#pragma once")
            archive.writestr("pkg/include/z.h", "z")
        digest = hashlib.sha256(self.wheel.read_bytes()).hexdigest()
        self.requirements = self.dir / "requirements.txt"
        self.requirements.write_text(f"a-b==1.0 --hash=sha256:{digest}\n")

    def pip(self, wheel=None, status=0, stderr=""):
        """Stands in for pip download: drops `wheel` into its --dest."""

        def download(command, **_):
            if wheel is not None:
                dest = Path(command[command.index("--dest") + 1])
                (dest / self.wheel.name).write_bytes(wheel)
            return subprocess.CompletedProcess(command, status, "", stderr)

        return mock.patch.object(wheels.subprocess, "run", side_effect=download)

    def test_fetched_once_then_taken_from_the_cache(self):
        with self.pip(self.wheel.read_bytes()) as pip:
            first = wheels.fetch(self.requirements, self.cache)
            second = wheels.fetch(self.requirements, self.cache)
        self.assertEqual(first, [self.cache / "wheels" / self.wheel.name])
        self.assertEqual(first, second)
        self.assertEqual(pip.call_count, 1)
        self.assertIn("--require-hashes", pip.call_args.args[0])

    def test_damaged_cache_is_fetched_again(self):
        (self.cache / "wheels").mkdir(parents=True)
        (self.cache / "wheels" / self.wheel.name).write_bytes(b"cut sho")
        with self.pip(self.wheel.read_bytes()) as pip:
            [path] = wheels.fetch(self.requirements, self.cache)
        self.assertEqual(pip.call_count, 1)
        self.assertEqual(path.read_bytes(), self.wheel.read_bytes())

    def test_wrong_bytes_are_refused(self):
        with self.pip(b"something else"):
            with self.assertRaisesRegex(wheels.WheelError, "a-b 1.0: pip fetched no wheel with the pinned"):
                wheels.fetch(self.requirements, self.cache)

    def test_pip_failing_says_how_to_get_on(self):
        with self.pip(status=1, stderr="ERROR: no route to host"), mock.patch.dict(
            wheels.os.environ, {"GRAFT_CACHE": str(self.cache)}
        ):
            done = run(wheels, "fetch", self.requirements)
        self.assertEqual(done.status, 1)
        self.assertRegex(done.stderr, "(?s)no route to host.*PIP_INDEX_URL.*" + str(self.cache / "wheels"))
        self.assertEqual(list((self.cache / "wheels").iterdir()), [])

    def test_unpack_moves_what_matches(self):
        out = self.dir / "out"
        count = wheels.unpack(self.wheel, out, ["pkg/include/*=include", "pkg/lib/liba.so=lib"])
        self.assertEqual(count, 3)
        got = sorted(str(p.relative_to(out)) for p in out.rglob("*") if p.is_file())
        self.assertEqual(got, ["include/x/y.h", "include/z.h", "lib/liba.so"])
        self.assertEqual((out / "lib/liba.so").read_bytes(), b"\x7fELF")

    def test_unpack_names_what_is_not_there(self):
        done = run(wheels, "unpack", self.wheel, self.dir / "out", "pkg/bin/*")
        self.assertEqual(done.status, 1)
        self.assertRegex(done.stderr, "a_b-1.0-py3-none-any.whl has no member 'pkg/bin/\\*'")

    def test_unpack_of_a_damaged_wheel(self):
        self.wheel.write_bytes(self.wheel.read_bytes()[:50])
        done = run(wheels, "unpack", self.wheel, self.dir / "out", "pkg/*")
        self.assertEqual(done.status, 1)
        self.assertRegex(done.stderr, f"{self.wheel.name} is damaged")


if __name__ == "__main__":
    unittest.main()
