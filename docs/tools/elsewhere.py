"""Pages from elsewhere in the repository: the executed notebooks, and the page of `data_dumps/`."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages and their figures; called by MkDocs before it reads pages."""
    recorded = (ROOT / "data_dumps" / "README.md").read_text(encoding="utf-8")
    recorded = recorded.replace("](../docs/", "](")
    files.append(File.generated(config, "recorded.md", content=recorded))
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        name = f"notebooks/{path.stem}"
        page, figures = as_page(path)
        files.append(File.generated(config, f"{name}.md", content=page))
        for number, figure in enumerate(figures):
            files.append(File.generated(config, f"{name}-{number}.png", content=figure))
    return files


def as_page(path: Path) -> tuple[str, list[bytes]]:
    """A notebook as Markdown, and the figures that it names.

    Parameters
    ----------
    path : Path
        An executed notebook, as `notebooks/run.py --update` leaves it.

    Returns
    -------
    page : str
        Cells and outputs in their order.
    figures : list of bytes
        PNG files; the page calls them `<stem>-<number>.png`.
    """
    parts: list[str] = []
    figures: list[bytes] = []
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] != "code":
            parts.append(source)
            continue
        parts.append(_fenced(source, "python"))
        for output in cell["outputs"]:
            parts.append(_output(output, path.stem, figures))
    made = f"\n\n---\n\nThis page is `notebooks/{path.name}` as the tests run it.\n"
    return "\n\n".join(parts) + made, figures


def _output(output: dict[str, Any], stem: str, figures: list[bytes]) -> str:
    """One output of a cell: a figure, a rendered result, or text."""
    if output["output_type"] == "stream":
        return _fenced("".join(output["text"]).rstrip("\n"), "text")
    data = {kind: "".join(lines) for kind, lines in output.get("data", {}).items()}
    if "image/png" in data:
        figures.append(base64.b64decode(data["image/png"]))
        return f"![Figure {len(figures)} of the notebook]({stem}-{len(figures) - 1}.png)"
    if "text/html" in data:
        return f'<div class="notebook-output">\n{data["text/html"]}\n</div>'
    return _fenced(data.get("text/plain", ""), "text")


def _fenced(text: str, language: str) -> str:
    """Text in a fence that it cannot close."""
    return f"````{language}\n{text}\n````"
