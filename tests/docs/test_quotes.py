"""What quotes.py finds, and what it writes."""
import pathlib
import tempfile
import unittest

import quotes

SOURCE = """int before;
/* [outer] */
  int a;
  // [inner]
    int b;
  // [/inner]
/* [/outer] */
"""


class Quotes(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = pathlib.Path(folder.name).resolve()
        (self.root / "a.c").write_text(SOURCE)

    def document(self, text):
        (self.root / "doc.md").write_text(text)
        return self.root / "doc.md"

    def test_writes_a_region_without_markers_and_indentation(self):
        document = self.document("Text.\n<!-- quote: a.c#outer -->\nMore.\n")
        self.assertEqual(quotes.check(self.root, write=True), (1, []))
        self.assertEqual(document.read_text(),
                         "Text.\n<!-- quote: a.c#outer -->\n```c\nint a;\n  int b;\n```\nMore.\n")
        self.assertEqual(quotes.check(self.root, write=False), (1, []))

    def test_a_drift_is_shown_and_mended(self):
        document = self.document("<!-- quote: a.c#inner -->\n```c\nint c;\n```\n")
        count, problems = quotes.check(self.root, write=False)
        self.assertEqual(count, 1)
        self.assertIn("-int c;\n+int b;\n", problems[0])
        quotes.check(self.root, write=True)
        self.assertIn("int b;", document.read_text())

    def test_a_missing_file_or_region_is_named(self):
        self.document("<!-- quote: b.c -->\n")
        self.assertEqual(quotes.check(self.root, write=True)[1],
                         ["doc.md: quote of b.c: there is no such file"])
        self.document("<!-- quote: a.c#other -->\n")
        self.assertEqual(quotes.check(self.root, write=True)[1],
                         ["doc.md: quote of a.c: expected one [other] and one [/other] behind it"])


if __name__ == "__main__":
    unittest.main()
