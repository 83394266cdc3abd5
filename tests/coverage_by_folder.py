"""Prints the coverage of the last `pytest --cov`, a line for each folder of the package."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import defaultdict
from pathlib import PurePath


def main() -> None:
    """Read what coverage has written, and print it."""
    command = [sys.executable, "-m", "coverage", "json", "-q", "-o", "-"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    folders: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for name, file in json.loads(done.stdout)["files"].items():
        found = file["summary"]
        for folder in (str(PurePath(name).parent), "all"):
            folders[folder][0] += found["num_statements"]
            folders[folder][1] += found["covered_lines"]
    print("\nCoverage by unit and transport tests, in their own process:")
    for folder, (statements, covered) in sorted(folders.items()):
        print(f"  {folder:36} {statements:6} statements {covered / max(1, statements):6.0%}")


if __name__ == "__main__":
    main()
