"""Build the documentation site: `python docs/site.py [--serve]`, or `make site`.

The pages are the documents of the repository. They are linked into one folder in their own places, so that the same
relative links work there.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "build" / "site" / "source"
PAGES = ("README.md", "README.zh-CN.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "AGENTS.md", "LICENSE")
PAGES += ("tests/PROMISES.md",)
# What documents link to besides pages: files to read, and pictures.
FOLDERS = ("docs", "examples", "docker")


def lay_out() -> None:
    """Link all documents, and the files that they link to, into the folder of the sources."""
    shutil.rmtree(SOURCE, ignore_errors=True)
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                link(path)
    for name in PAGES:
        link(ROOT / name)


def link(path: Path) -> None:
    """Link a file of the repository into the sources."""
    target = SOURCE / path.relative_to(ROOT)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.symlink_to(path)


def main() -> int:
    """Build the site, or serve it while its documents change; return the exit code. Warnings are errors."""
    lay_out()
    zensical = [sys.executable, "-m", "zensical"]
    if "--serve" in sys.argv:
        return subprocess.run([*zensical, "serve"], cwd=ROOT, check=False).returncode
    result = subprocess.run([*zensical, "build", "--clean", "--strict"], cwd=ROOT, capture_output=True, text=True)
    if result.returncode:
        # Its traceback says nothing more.
        print((result.stdout + result.stderr).partition("Traceback")[0], file=sys.stderr)
    return result.returncode


if __name__ == "__main__":
    sys.exit(main())
