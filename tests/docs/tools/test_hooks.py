"""Notebooks, equations and docstrings, as the site shows them."""

from __future__ import annotations

import base64
import json
from pathlib import Path

from docs.tools.docstrings import displayed
from docs.tools.elsewhere import as_page
from docs.tools.equations import on_page_content


def test_a_notebook_becomes_a_page_with_its_outputs_in_order(tmp_path: Path) -> None:
    cells = [
        {"cell_type": "markdown", "source": ["# Title\n", "words"]},
        {
            "cell_type": "code",
            "source": "1 + 1",
            "outputs": [
                {"output_type": "stream", "text": ["a\n", "b\n"]},
                {"output_type": "execute_result", "data": {"text/plain": ["2"]}},
                {"output_type": "display_data", "data": {"text/html": "<b>2</b>"}},
                {
                    "output_type": "display_data",
                    "data": {"image/png": base64.b64encode(b"bits").decode(), "text/plain": "x"},
                },
            ],
        },
    ]
    path = tmp_path / "story.ipynb"
    path.write_text(json.dumps({"cells": cells}))
    page, figures = as_page(path)
    parts = [
        "# Title\nwords", "````python\n1 + 1\n````", "````text\na\nb\n````", "````text\n2\n````",
        "<b>2</b>", "](story-0.png)", "notebooks/story.ipynb",
    ]  # fmt: skip
    places = [page.index(part) for part in parts]
    assert places == sorted(places)
    assert figures == [b"bits"]


def test_equations_become_mathml_and_nothing_else_changes() -> None:
    page = (
        '<p>costs $5 <span class="arithmatex">\\(a &lt; b\\)</span>, or</p>'
        '<div class="arithmatex">\\[\\frac{1}{2}\\]</div><code>\\(c\\)</code>'
    )
    found = on_page_content(page)
    assert found.startswith("<p>costs $5 <math ")
    assert "<mi>a</mi>" in found
    assert "<mfrac>" in found
    assert 'display="block"' in found
    assert "arithmatex" not in found
    assert found.endswith("<code>\\(c\\)</code>")


def test_math_directives_of_docstrings_become_equations() -> None:
    text = "Words.\n\n    .. math:: a =\n        b\n\n    with c\n\n.. math:: d"
    assert displayed(text) == "Words.\n\n    $$a = b$$\n\n    with c\n\n$$d$$"
