"""The page of a run in a real browser: ``python -m tests.browser``, which `make test-page` calls.

Owns the search for Chromium, the page of a run that is opened, and what must hold of it at two widths. The page runs no
script, so a page around it looks at it in a frame and writes what it found into its own document. Needs no driver.
"""

import html
import json
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from tests.test_page import page_of, write_run

WIDTHS = (420, 1600)
LEAST_PIXELS = 9
"""Height of letters below which a page is hard to read."""
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
AROUND = """<!doctype html><body style="margin:0">
<iframe id="frame" src="page.html" style="border:0" scrolling="no"></iframe>
<pre id="found"></pre><script>
const frame = document.getElementById("frame");
frame.width = WIDTH; frame.height = 900;
frame.onload = () => {
  const page = frame.contentDocument, figures = [...page.querySelectorAll("section svg")];
  const letters = [], beyond = [];
  for (const text of page.querySelectorAll("svg text, p, td, th, h1, h2, li, .bar span, .tile *")) {
    if (!text.textContent.trim() || !text.getClientRects().length) continue;
    const svg = text.closest("svg"), box = text.getBoundingClientRect();
    letters.push(parseFloat(frame.contentWindow.getComputedStyle(text).fontSize) * (svg ? svg.getScreenCTM().a : 1));
    if (!text.closest(".table") && (box.left < -1 || box.right > WIDTH + 1)) beyond.push(text.textContent.slice(0, 40));
  }
  document.getElementById("found").textContent = JSON.stringify({
    title: page.title, width: page.documentElement.scrollWidth, letters: Math.min(...letters), beyond,
    figures: figures.length, empty: figures.filter(f => f.getBoundingClientRect().height < 20).length});
};
</script></body>"""


def chromium() -> str:
    """The browser: CHROMIUM, or the first that is found on PATH."""
    for name in (os.environ["CHROMIUM"],) if os.environ.get("CHROMIUM") else NAMES:
        if (found := shutil.which(name)) is not None:
            return found
    raise SystemExit(
        "no Chromium is found on PATH: install one (Debian: apt-get install chromium), or name it: "
        "CHROMIUM=/path/to/chromium make test-page"
    )


def opened(browser: str, page: Path, *arguments: str) -> tuple[str, list[str]]:
    """(stdout, messages on the console) of a headless browser that opens the page."""
    with tempfile.TemporaryDirectory() as profile:
        done = subprocess.run(
            [
                *(browser, "--headless", "--no-sandbox", "--disable-gpu", "--allow-file-access-from-files"),
                *("--enable-logging=stderr", f"--user-data-dir={profile}", "--virtual-time-budget=5000"),
                *(*arguments, page.as_uri()),
            ],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
    if done.returncode:
        raise SystemExit(f"{browser} failed:\n{done.stderr[-2000:]}")
    return done.stdout, re.findall(r"CONSOLE[:(].*", done.stderr)


def looked_at(browser: str, page: Path, width: int) -> dict[str, Any]:
    """What a page looks like in a frame of that width, in pixels."""
    around = page.with_name(f"around-{width}.html")
    around.write_text(AROUND.replace("WIDTH", str(width)))
    document, console = opened(browser, around, "--dump-dom")
    found = re.search(r'<pre id="found">(.+?)</pre>', document)
    assert found is not None, f"the page did not load: {console}"
    return {**json.loads(html.unescape(found[1])), "console": console}


def check(found: dict[str, Any], figures: int, width: int) -> None:
    """Fails unless the page is drawn whole and readable."""
    assert found["console"] == [], f"the console has messages: {found['console']}"
    assert (found["figures"], found["empty"]) == (figures, 0), f"{found} of {figures} figures are drawn"
    assert found["width"] <= width, f"at {width} pixels the page is {found['width']} wide and must be scrolled"
    assert found["beyond"] == [], f"texts end beyond the edge at {width} pixels: {found['beyond']}"
    assert found["letters"] >= LEAST_PIXELS, f"at {width} pixels letters are {found['letters']:.1f} pixels high"


def main() -> None:
    """Opens the page at each width, and leaves pictures in light and dark, and a print, in build/."""
    browser, build = chromium(), Path("build").resolve()
    build.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        text = page_of(write_run(Path(folder)))
        page = Path(folder) / "page.html"
        for width in WIDTHS:
            found = looked_at(browser, page, width)
            for scheme, arguments in {"light": (), "dark": ("--blink-settings=preferredColorScheme=0",)}.items():
                picture = build / f"page-{width}-{scheme}.png"
                opened(browser, page, f"--window-size={width},2400", f"--screenshot={picture}", *arguments)
            print(f"{width} pixels: {found}, pictures in {build}")
            check(found, text.count("<svg"), width)
        opened(browser, page, f"--print-to-pdf={build / 'page.pdf'}", "--no-pdf-header-footer")


if __name__ == "__main__":
    main()
