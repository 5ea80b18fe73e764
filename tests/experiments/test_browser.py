"""The looker itself: it must see what it is there to find."""

from pathlib import Path

from tests.experiments.browser import look_at, needs_browser

pytestmark = needs_browser
LABEL = '<g id="own-text_{}"><rect x="{}" y="10" width="30" height="10"/></g>'
PAGE = """<!DOCTYPE html><html><body><figure id="own"><svg width="200" height="50">{}</svg></figure>{}</body></html>"""


def test_a_sound_page_has_nothing_to_report(tmp_path: Path) -> None:
    sight = look_at(PAGE.format(LABEL.format(1, 10) + LABEL.format(2, 60), ""), 400, tmp_path)
    assert sight.width == sight.needed == 400 and sight.drawings == {"own": [200, 50]} and sight.labels == 2
    assert not (sight.requests or sight.overlapping or sight.complaints)


def test_faults_are_seen(tmp_path: Path) -> None:
    faults = (
        '<img src="http://nowhere.invalid/a.png"/><p style="width: 700px">wide</p><script>nothing.at.all()</script>'
    )
    sight = look_at(PAGE.format(LABEL.format(1, 10) + LABEL.format(2, 30), faults), 400, tmp_path)
    assert sight.overlapping == ["own text_1 and own text_2"]
    assert sight.requests == ["http://nowhere.invalid/a.png"]
    assert sight.needed > sight.width == 400
    assert any("nothing is not defined" in line for line in sight.complaints)
