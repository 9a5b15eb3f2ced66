"""What the scripts' tests share: the scripts on the import path, and a way to run their main()."""

import contextlib
import io
import sys
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "scripts"
sys.path.insert(0, str(SCRIPTS))
sys.dont_write_bytecode = True


class Outcome(NamedTuple):
    status: int
    stdout: str
    stderr: str


def run(script: ModuleType, *args) -> Outcome:
    """Runs a script's main() with `args`; an exception it lets out fails the test."""
    stdout, stderr = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
        try:
            status = script.main([str(arg) for arg in args])
        except SystemExit as wrong_usage:
            status = wrong_usage.code
    return Outcome(status, stdout.getvalue(), stderr.getvalue())
