"""Runs all tests in stages, and keeps what each stage said of this commit.

    python -m tests.stages [STAGE...]

Without names, all stages run, in the order of :data:`STAGES`. ``build/full.json`` holds the commit,
and of each stage that ended its exit code, its seconds, what pytest counted and the unstable tests.
A stage that has passed on the same commit, with nothing changed since, is not run again; so a run
that was ended goes on where it stopped.
"""

import argparse
import json
import re
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

RECORD = Path("build/full.json")
VLLM_RELEASES = ("0.33.0", "0.31.0", "0.30.0", "0.29.0", "0.28.0")
"""Releases of vLLM that are served beside the default one."""
ANEW = "ARGS=--hypothesis-profile anew"

STAGES: dict[str, list[str]] = {
    "lint": ["lint"],
    "types": ["typecheck"],
    "quick tests, covered": ["test", f"{ANEW} --cov --cov-append --cov-report=term:skip-covered"],
    "the rest": ["test-rest"],
    "vLLM": ["test-vllm"],
    **{f"vLLM {each}": ["test-vllm", "SHORT=1", f"VLLM={each}"] for each in VLLM_RELEASES},
    "SGLang": ["test-sglang"],
    **{f"Python {each}": ["test-python", f"NEWER={each}"] for each in ("3.12", "3.13")},
    "containers": ["test-container"],
    "release": ["release"],
    "site": ["docs"],
}
"""Stage → what ``make`` is called with."""

COUNT = re.compile(r"(\d+) (passed|failed|skipped|xfailed|errors?)\b")
CLOSING = re.compile(r"^=+ .*\d+ (?:passed|failed|skipped|error).* in [\d.]+s.*=+$")
COVERED = re.compile(r"^TOTAL .*?(\d+)%$")


def said(line: str, entry: dict[str, Any]) -> None:
    """Notes what a line of the output tells of the stage."""
    if CLOSING.match(line):
        counts = Counter(entry["counts"])
        counts.update({what: int(number) for number, what in COUNT.findall(line)})
        entry["counts"] = dict(counts)
    elif line.startswith("UNSTABLE "):
        entry["unstable"].append(line.removeprefix("UNSTABLE "))
    elif found := COVERED.match(line):
        entry["covered_percent"] = int(found[1])


def run(arguments: list[str]) -> dict[str, Any]:
    """Runs a stage, with its output shown; the entry of the record."""
    entry: dict[str, Any] = {"counts": {}, "unstable": []}
    started = time.monotonic()
    command = ["make", *arguments]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            said(line.rstrip(), entry)
    return {"exit_code": process.returncode, "seconds": round(time.monotonic() - started), **entry}


def git(*arguments: str) -> str:
    """What git answers."""
    command = ["git", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def main() -> None:
    """See the module.

    Raises:
        SystemExit: with 1 if one of these stages failed; with 2 if there is no such stage.
    """
    parser = argparse.ArgumentParser(prog="python -m tests.stages")
    parser.add_argument("stage", nargs="*", default=[], help=", ".join(map(repr, STAGES)))
    names = parser.parse_args().stage or list(STAGES)
    if unknown := set(names) - STAGES.keys():
        parser.error(f"no such stages: {sorted(unknown)}; there are {list(STAGES)}")
    commit = git("rev-parse", "HEAD")
    if git("status", "--porcelain"):
        commit += ", changed"
    record = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    if record.get("commit") != commit or "changed" in commit:
        record = {"commit": commit, "stages": {}}
    stages = record["stages"]
    for name in names:
        arguments = STAGES[name]
        if stages.get(name, {}).get("exit_code") == 0:
            continue
        print(f"=== {name}: make {' '.join(arguments)}", flush=True)
        Path(".coverage").unlink(missing_ok=True)  # of both calls of pytest, and of no earlier run
        stages[name] = run(arguments)
        RECORD.parent.mkdir(exist_ok=True)
        RECORD.write_text(json.dumps(record, indent=1))
    for name, entry in stages.items():
        print(f"{name}: {json.dumps(entry)}")
    sys.exit(any(stages[name]["exit_code"] for name in names))


if __name__ == "__main__":
    main()
