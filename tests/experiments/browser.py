"""What a headless browser without a network makes of a page."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from dataclasses import dataclass
from html import escape, unescape
from pathlib import Path

import pytest

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
needs_browser = pytest.mark.skipif(BROWSER is None, reason="no browser is installed (chromium or chrome)")
OPTIONS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run"),
    *("--disable-background-networking", "--host-resolver-rules=MAP * ~NOTFOUND", "--enable-logging=stderr"),
)
# The page measures itself and leaves what it found in an element. Labels are the texts of the drawings, which are drawn
# as paths in groups called text_1, text_2 ...; those that share more than two pixels each way overlap.
MEASURE = """
<script>
addEventListener("load", () => {
  const boxes = (root, selector) => [...root.querySelectorAll(selector)].map(e => [e, e.getBoundingClientRect()]);
  const name = e => e.closest("figure").id + " " + e.id.split("-").pop();
  const overlapping = [];
  for (const figure of document.querySelectorAll("figure")) {
    const texts = boxes(figure, "g[id*='-text_']").filter(([e, b]) => b.width > 0);
    texts.forEach(([e, a], i) => texts.slice(i + 1).forEach(([f, b]) => {
      const x = Math.min(a.right, b.right) - Math.max(a.left, b.left);
      const y = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
      if (x > 2 && y > 2) overlapping.push(name(e) + " and " + name(f));
    }));
  }
  const found = {
    width: innerWidth,
    needed: document.documentElement.scrollWidth,
    requests: performance.getEntriesByType("resource").map(r => r.name),
    drawings: Object.fromEntries(boxes(document, "figure svg").map(
      ([e, b]) => [e.closest("figure").id, [b.width, b.height]])),
    labels: document.querySelectorAll("g[id*='-text_']").length,
    overlapping: overlapping,
  };
  const element = document.createElement("pre");
  element.id = "found";
  element.textContent = JSON.stringify(found);
  parent.document.body.append(element);
});
</script>
"""


@dataclass(frozen=True)
class Sight:
    """Sizes in CSS pixels: of the window and what the page needs, and of each figure's drawing, width and height."""

    width: int
    needed: int
    requests: list[str]
    drawings: dict[str, tuple[float, float]]
    labels: int
    overlapping: list[str]
    complaints: list[str]  # lines of the console


def look_at(page: str, width: int, folder: Path) -> Sight:
    """Open a page in a frame of that width, for windows have a least width; `folder` is for the browser's own files."""
    assert BROWSER is not None
    content = escape(page.replace("</body>", f"{MEASURE}</body>"))
    frame = folder / f"{width}.html"
    frame.write_text(f'<!DOCTYPE html><body><iframe width="{width}" height="900" style="border: 0" srcdoc="{content}">')
    command = [BROWSER, *OPTIONS, f"--user-data-dir={folder / 'browser'}", "--window-size=1400,1000", "--dump-dom"]
    done = subprocess.run([*command, frame.as_uri()], capture_output=True, text=True, check=True)
    found = re.search(r'<pre id="found">(.*?)</pre>', done.stdout, re.DOTALL)
    assert found is not None, done.stderr
    complaints = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    return Sight(**json.loads(unescape(found[1])), complaints=complaints)


def assert_sound(page: Path, folder: Path, *, width: int, figures: list[str]) -> None:
    """The page fits its window, all figures are drawn and their labels apart, nothing is fetched or complained of."""
    sight = look_at(page.read_text(), width, folder)
    assert sight.needed == sight.width == width
    assert list(sight.drawings) == figures
    assert all(drawn > 200 and high > 100 for drawn, high in sight.drawings.values())
    assert sight.labels > 10 * len(figures) and sight.overlapping == []
    assert sight.requests == [] and sight.complaints == []
