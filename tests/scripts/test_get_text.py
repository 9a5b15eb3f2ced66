"""get_text.py: R's lazy-load format, the joining of lines, the files, and bad input."""

import gzip
import struct
import tempfile
import unittest
import zlib
from pathlib import Path
from unittest import mock

from helpers import run

import get_text


# R's serialisation, written here from its specification ("R Internals", 1.8) so that the reader is not
# tested against itself: XDR, version 2, only what a lazy-load index and character vectors need.
NIL, SYMBOL, PAIR_LIST, CHARACTER, LOGICAL, INTEGER, STRINGS, LIST = 254, 1, 2, 9, 10, 13, 16, 19
HAS_ATTRIBUTES, HAS_TAG, UTF8, ASCII = 1 << 9, 1 << 10, 1 << 15, 1 << 18


def u32(*values: int) -> bytes:
    return struct.pack(f">{len(values)}I", *values)


def r_char(text: str | None) -> bytes:
    if text is None:
        return u32(CHARACTER, 0xFFFFFFFF)
    data = text.encode()
    return u32(CHARACTER | (ASCII if data.isascii() else UTF8), len(data)) + data


def r_strings(values) -> bytes:
    return u32(STRINGS, len(values)) + b"".join(map(r_char, values))


def r_integers(*values: int) -> bytes:
    return u32(INTEGER, len(values), *values)


def r_list(items: dict[str, bytes]) -> bytes:
    names = u32(PAIR_LIST | HAS_TAG, SYMBOL) + r_char("names") + r_strings(list(items)) + u32(NIL)
    return u32(LIST | HAS_ATTRIBUTES, len(items)) + b"".join(items.values()) + names


def serialised(value: bytes) -> bytes:
    return b"X\n" + u32(2, 0x00030600, 0x00020300) + value


def write_package(folder: Path, objects: dict[str, bytes]) -> Path:
    """An installed R package whose data set holds the serialised `objects`."""
    data = folder / "janeaustenr" / "data"
    data.mkdir(parents=True)
    database, places = b"", {}
    for name, value in objects.items():
        value = serialised(value)
        packed = u32(len(value)) + zlib.compress(value)
        places[name] = r_integers(len(database), len(packed))
        database += packed
    # A symbol is written once and referred to afterwards: "names" of the outer list is reference 1.
    index = serialised(
        u32(LIST | HAS_ATTRIBUTES, 1) + r_list(places) + u32(PAIR_LIST | HAS_TAG, (1 << 8) | 255)
        + r_strings(["variables"]) + u32(NIL)
    )  # fmt: skip
    (data / "Rdata.rdx").write_bytes(gzip.compress(index))
    (data / "Rdata.rdb").write_bytes(database)
    return data.parent


def novels(**changed) -> dict[str, bytes]:
    lines = {name: r_strings([name.upper(), "", "£20,000 — she said"]) for name in get_text.NOVELS}
    return lines | changed


class GetText(unittest.TestCase):
    def setUp(self):
        scratch = tempfile.TemporaryDirectory()
        self.addCleanup(scratch.cleanup)
        self.dir = Path(scratch.name)
        self.out = self.dir / "text"

    def run_on(self, objects: dict[str, bytes]):
        return run(get_text, self.out, "--package-dir", write_package(self.dir, objects))

    def fails(self, done, pattern):
        self.assertEqual(done.status, 1, done.stderr)
        self.assertRegex(done.stderr, pattern)
        self.assertEqual(list(self.out.glob("*")), [], "something half-made was left")

    def test_one_file_a_novel_in_utf8(self):
        done = self.run_on(novels())
        self.assertEqual(done.status, 0, done.stderr)
        want = ["emma", "mansfield_park", "northanger_abbey", "persuasion", "pride___prejudice",
                "sense___sensibility"]  # fmt: skip
        self.assertEqual(sorted(p.name for p in self.out.iterdir()), [f"{name}.txt" for name in want])
        text = (self.out / "pride___prejudice.txt").read_bytes()
        self.assertEqual(text, "PRIDEPREJUDICE\n\n£20,000 — she said\n".encode("utf-8"))

    def test_another_edition_is_said(self):
        self.assertRegex(self.run_on(novels()).stderr, "persuasion is another edition")

    def test_second_run_leaves_it_alone(self):
        text = get_text.join_lines(["EMMA", "", "£20,000 — she said"])
        known = {name: (file, get_text.digest(text.encode())) for name, (file, _) in get_text.NOVELS.items()}
        with mock.patch.dict(get_text.NOVELS, known):
            objects = {name: r_strings(text.split("\n")[:-1]) for name in known}
            self.assertEqual(self.run_on(objects).stderr, "")
            done = run(get_text, self.out, "--package-dir", self.dir / "gone")
        self.assertEqual(done.status, 0, done.stderr)
        self.assertIn("made already", done.stdout)

    def test_a_changed_file_is_made_anew(self):
        package = write_package(self.dir, novels())
        run(get_text, self.out, "--package-dir", package)
        (self.out / "emma.txt").write_text("cut sho")
        self.assertEqual(run(get_text, self.out, "--package-dir", package).status, 0)
        self.assertTrue((self.out / "emma.txt").read_text().startswith("EMMA\n"))

    def test_join_lines(self):
        for lines, want in ((["a"], "a\n"), (["a", ""], "a\n\n"), (["", " b "], "\n b \n")):
            self.assertEqual(get_text.join_lines(lines), want)
        with self.assertRaisesRegex(get_text.TextError, "line 2 is None, not text"):
            get_text.join_lines(["a", None])

    def test_missing_novel(self):
        objects = novels()
        del objects["persuasion"]
        self.fails(self.run_on(objects), "no object 'persuasion', only emma, mansfieldpark")

    def test_missing_line(self):
        self.fails(self.run_on(novels(emma=r_strings(["a", None]))), "line 2 is")

    def test_not_a_package(self):
        done = run(get_text, self.out, "--package-dir", self.dir)
        self.fails(done, "no data/Rdata.rdx: it is not an installed janeaustenr")

    def test_damaged_database(self):
        package = write_package(self.dir, novels())
        database = package / "data" / "Rdata.rdb"
        whole = database.read_bytes()
        database.write_bytes(whole[:-10])
        done = run(get_text, self.out, "--package-dir", package)
        self.fails(done, "object 'sensesensibility' is damaged")
        database.write_bytes(u32(7) + whole[4:])
        done = run(get_text, self.out, "--package-dir", package)
        self.fails(done, r"object 'emma' has \d+ bytes, expected 7")

    def test_damaged_index(self):
        package = write_package(self.dir, novels())
        index = package / "data" / "Rdata.rdx"
        for data in (b"", b"text", gzip.compress(b"text"), index.read_bytes()[:40]):
            index.write_bytes(data)
            done = run(get_text, self.out, "--package-dir", package)
            self.fails(done, "Rdata.rdx is not the index of an R data base")


if __name__ == "__main__":
    unittest.main()
