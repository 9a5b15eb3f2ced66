#!/usr/bin/env python3
"""Keeps the code that the documentation quotes the same as the files it is quoted from.

A quote in a Markdown file is a marker and the fenced block right behind it:

    <!-- quote: sdk/templates/mixer_c/my_c_mixer.c#params -->
    ```c
    ...
    ```

The part behind '#' is a region of that file: the lines between a comment with [params] and one with
[/params]. Without '#' the whole file is quoted. Marker lines of other regions are left out, and the
indentation all lines share.

    quotes.py           exits with 1 and says which quotes differ
    quotes.py --write   brings them up to date
"""
import argparse
import difflib
import pathlib
import re
import sys
import textwrap

ROOT = pathlib.Path(__file__).resolve().parents[2]
DOCUMENTS = ("*.md", "docs/*.md", "sdk/**/*.md")
LANGUAGES = {".c": "c", ".cpp": "cpp", ".h": "c", ".hpp": "cpp", ".txt": "cmake", ".toml": "toml"}
QUOTE = re.compile(
    r"^<!-- quote: (?P<file>[^\s#]+)(?:#(?P<region>[\w-]+))? -->\n(?:(?P<fence>```)[^\n]*\n.*?^```\n)?",
    re.MULTILINE | re.DOTALL)
MARKER = re.compile(r"^\s*(?://|/\*|#) (?P<tag>\[/?[\w-]+\])(?: \*/)?$")


class Problem(Exception):
    pass


def region_of(text, region, where):
    """The lines of a region, or all of them, without the markers."""
    lines = text.splitlines()
    if region:
        places = {}
        for number, line in enumerate(lines):
            if marker := MARKER.match(line):
                places.setdefault(marker["tag"], []).append(number)
        begin, end = places.get(f"[{region}]", []), places.get(f"[/{region}]", [])
        if len(begin) != 1 or len(end) != 1 or begin[0] > end[0]:
            raise Problem(f"{where}: expected one [{region}] and one [/{region}] behind it")
        lines = lines[begin[0] + 1:end[0]]
    kept = [line for line in lines if not MARKER.match(line)]
    return textwrap.dedent("\n".join(kept)).strip("\n") + "\n"


def refreshed(document, root):
    """The document with every quote as its source has it."""
    def quote(match):
        source = root / match["file"]
        where = f"{document.relative_to(root)}: quote of {match['file']}"
        if not source.is_file():
            raise Problem(f"{where}: there is no such file")
        code = region_of(source.read_text(), match["region"], where)
        marker = match[0].splitlines()[0]
        return f"{marker}\n```{LANGUAGES.get(source.suffix, '')}\n{code}```\n"
    return QUOTE.sub(quote, document.read_text())


def check(root, write):
    """The number of quotes, and what is wrong with them."""
    count, problems = 0, []
    for document in sorted({d for pattern in DOCUMENTS for d in root.glob(pattern)}):
        before = document.read_text()
        count += len(QUOTE.findall(before))
        try:
            after = refreshed(document, root)
        except Problem as problem:
            problems.append(str(problem))
            continue
        if after != before and write:
            document.write_text(after)
        elif after != before:
            name = str(document.relative_to(root))
            problems.append("".join(difflib.unified_diff(
                before.splitlines(True), after.splitlines(True), name, name + " as its sources have it")))
    return count, problems


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="bring the quotes up to date")
    parser.add_argument("--root", type=pathlib.Path, default=ROOT, help="of the repository")
    arguments = parser.parse_args()
    count, problems = check(arguments.root.resolve(), arguments.write)
    for problem in problems:
        print(problem)
    if problems:
        sys.exit("quotes differ from their sources: run tests/docs/quotes.py --write, and read the text around them")
    print(f"{count} quotes")


if __name__ == "__main__":
    main()
