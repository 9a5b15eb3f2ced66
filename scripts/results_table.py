#!/usr/bin/env python3
"""Prints what training runs reached against the tokens they read: results_table.py RUN..."""
import json
import pathlib
import sys


def rows(run: pathlib.Path):
    evaluations = {}  # of several at one token count the last stands
    for line in (run / "metrics.jsonl").read_text().splitlines():
        figures = json.loads(line)
        if figures["kind"] == "eval":
            evaluations[figures["stage"], figures["tokens"]] = figures
    for (stage, tokens), figures in evaluations.items():
        agreement, next_token = (figures.get(key) for key in ("agreement", "next_token"))
        yield [
            run.name,
            stage,
            str(tokens),
            f"{figures['perplexity']:.4g}",
            "-" if agreement is None else f"{agreement:.2f}",
            "-" if next_token is None else f"{next_token:.2f}",
            f"{figures['seconds']:.0f}",
        ]


def main() -> None:
    table = [["run", "stage", "tokens", "perplexity", "agreement", "next token", "seconds"]]
    runs = [pathlib.Path(name) for name in sys.argv[1:]]
    for run in runs:
        table += rows(run)
    widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
    for row in table:
        print("  ".join(c.ljust(w) if i < 2 else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths))).rstrip())
    record = json.loads((runs[0] / "run.json").read_text())
    print(f"\nteacher {record['teacher_perplexity']:.4g}; {record['held_out']}; {record['protocol']}")
    print(f"agreement: {record.get('agreement_protocol', '-')}")


if __name__ == "__main__":
    main()
