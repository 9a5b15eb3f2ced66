#!/usr/bin/env python3
"""Writes docs/conformance-results.md: what the conformance kit says of the plugins and examples, and of its mutants.

    scripts/conformance_tables.py [BUILD]          BUILD: build/release, with everything built
"""
import collections
import json
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MIXERS = ("gdn", "hedgehog", "hedgemamba")
PLUGINS = MIXERS + ("taylor", "projection_copy", "attention_to_mamba", "layer_alignment", "kl", "cross_entropy")


def validate(build, file):
    partners = [word for m in MIXERS for word in ("--partner", build / f"lib/graft/plugins/{m}.so")]
    done = subprocess.run([build / "bin/graft-validate", file, "--json", "--timeout", "200", *partners],
                          capture_output=True, text=True)
    if done.returncode not in (0, 1):
        sys.exit(f"graft-validate {file}: {done.stderr}")
    return json.loads(done.stdout)


def group_counts(tests):
    groups = collections.OrderedDict()
    for t in tests:
        counts = groups.setdefault(t["test"].split(".")[0], collections.Counter())
        counts[t["verdict"]] += 1
    return groups


def shortened(row, most=160):
    """A table's row with the long lists in its last cell cut."""
    cells = [re.sub(r"\s+", " ", cell).strip() for cell in row.strip("| ").split(" | ")]
    last = cells[-1] if len(cells[-1]) <= most else cells[-1][:most].rsplit(" ", 1)[0] + " ..."
    return "| " + " | ".join(cells[:-1] + [last]) + " |"


def main():
    build = (ROOT / (sys.argv[1] if len(sys.argv) > 1 else "build/release")).resolve()
    files = {name: build / f"lib/graft/plugins/{name}.so" for name in PLUGINS}
    for example in ("kda", "retnet"):  # built by the test install.examples
        files[f"{example} (example)"] = build / f"tests/install/examples/author/{example}/build/plugins/{example}.so"
    reports = {name: validate(build, file) for name, file in files.items() if file.exists()}
    commit = subprocess.run(["git", "-C", ROOT, "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()

    lines = ["# The conformance kit's results", "",
             f"Written by `scripts/conformance_tables.py` at {commit}: `graft-validate PLUGIN --timeout 200` with the three mixers as",
             "partners, seed 1. `ctest -L conformance` runs the same.", "",
             "| plugin | pass | fail | skip | tests by group |", "|-|-|-|-|-|"]
    for name, report in reports.items():
        groups = ", ".join(f"{g} {sum(c.values()) - c['skip']}" for g, c in group_counts(report["tests"]).items()
                           if sum(c.values()) > c["skip"])
        lines.append(f"| {name} | {report['pass']} | {report['fail']} | {report['skip']} | {groups} |")
    lines += ["", "## What is skipped, and why", "", "| plugin | test | reason |", "|-|-|-|"]
    for name, report in reports.items():
        for t in report["tests"]:
            if t["verdict"] == "skip":
                lines.append(f"| {name} | {t['test']} | {t['detail']} |")
    for name, report in reports.items():
        for t in report["tests"]:
            if t["verdict"] == "fail":
                lines.append(f"\nFAILED: {name}, {t['test']}: {t['detail']}")

    said = subprocess.run([build / "tests/conformance_mutants_test"], capture_output=True, text=True).stdout
    table = [line for line in said.splitlines() if line.startswith("| ")]
    caught = sum("NOT CAUGHT" not in line for line in table[1:])
    lines += ["", "## The mutants", "", f"Plugins that are broken on purpose, {caught} of {len(table) - 1} caught by the test that is meant for each",
              "(sdk/conformance/mutants; `conformance_mutants_test`).", ""]
    lines += table[:1] + ["|-|-|-|-|"] + [shortened(row) for row in table[1:]]
    text = "\n".join(lines).replace(str(ROOT) + "/", "") + "\n"
    (ROOT / "docs/conformance-results.md").write_text(text)
    print(f"{len(reports)} plugins, {sum(r['fail'] for r in reports.values())} failures, {caught} of {len(table) - 1} mutants caught")
    sys.exit(any(r["fail"] for r in reports.values()))


if __name__ == "__main__":
    main()
