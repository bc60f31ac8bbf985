"""Run every notebook of this folder from top to bottom, as a reader would.

`python notebooks/run.py` executes each `*.py` (jupytext, py:percent) in the folder that holds
it and fails with the traceback of the first cell that fails. `--output DIR` keeps the executed
notebooks there, `--update` rewrites the `.ipynb` beside each source.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import jupytext
import nbformat
from nbclient import NotebookClient

HERE = Path(__file__).parent


def execute(source: Path, target: Path | None) -> None:
    """Run one notebook; write it with its outputs to `target` where one is given."""
    notebook = jupytext.read(source)
    client = NotebookClient(
        notebook, timeout=900, kernel_name="python3", resources={"metadata": {"path": str(HERE)}}
    )
    client.execute()
    if target is not None:
        target.parent.mkdir(parents=True, exist_ok=True)
        for cell in notebook.cells:
            cell.metadata.pop("execution", None)  # times of day would change every run
        nbformat.write(notebook, target)


def main() -> None:
    """Parse the options and run all notebooks."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, help="keep the executed notebooks in this folder")
    parser.add_argument("--update", action="store_true", help="rewrite the .ipynb files here")
    options = parser.parse_args()
    for source in sorted(HERE.glob("*.py")):
        if source.name == Path(__file__).name:
            continue
        folder = HERE if options.update else options.output
        target = folder / f"{source.stem}.ipynb" if folder else None
        execute(source, target)
        print(f"{source.name}: every cell ran")


if __name__ == "__main__":
    main()
