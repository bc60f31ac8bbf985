"""Pictures of a report for its page of documentation, light and dark.

`python -m docs.tools.screenshots report.html docs/report-light.png docs/report-dark.png`
"""

from __future__ import annotations

import argparse
import io
import shutil
from pathlib import Path
from typing import Final, Literal

from PIL import Image
from playwright.sync_api import sync_playwright

WIDTH: Final = 1360
HEIGHT: Final = 960
STEPS: Final = 12
"""How often `n` is pressed: the disagreement token that the picture looks at."""


def picture(page: Path, scheme: Literal["light", "dark"]) -> Image.Image:
    """Take the token viewer of a report, one token in disagreement in focus.

    Parameters
    ----------
    page : Path
        The report.
    scheme : {"light", "dark"}
        The colour scheme of the reader's system.
    """
    with sync_playwright() as driver:
        browser = driver.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"]
        )
        tab = browser.new_page(
            viewport={"width": WIDTH, "height": HEIGHT},
            color_scheme=scheme,
            reduced_motion="reduce",
        )
        tab.goto(page.resolve().as_uri())
        tab.wait_for_selector("#viewer[data-ready]", state="attached")
        tab.select_option('[data-set="colour"]', "delta_d")
        for _ in range(STEPS):
            tab.keyboard.press("n")
        tab.evaluate("document.querySelector('#viewer .bar').scrollIntoView()")
        tab.wait_for_timeout(500)
        drawn = tab.screenshot()
        browser.close()
    return Image.open(io.BytesIO(drawn))


def main() -> None:
    """Take both pictures."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("page", "light", "dark"):
        parser.add_argument(name, type=Path)
    asked = parser.parse_args()
    schemes: tuple[Literal["light", "dark"], ...] = ("light", "dark")
    for scheme in schemes:
        colours = picture(asked.page, scheme).convert("RGB").quantize(128)
        colours.save(getattr(asked, scheme), optimize=True)


if __name__ == "__main__":
    main()
