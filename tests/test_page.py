"""report.html: whole, safe, self-contained, and right in a real browser on a screen and on a phone."""

import json
import re
import shutil
import subprocess
from html import escape
from html.parser import HTMLParser

import pytest
from synthetic import TRANSFORMER_CLAIMS, Point, ablated, study, transformer

from gcjax import results
from gcjax.__main__ import run
from gcjax.errors import GcjaxError
from gcjax.reporting.report import report

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
WIDTHS = (360, 1280)
VOID = {"meta", "link", "img", "br"}
NASTY = "<script>alert(1)</script> & 'quotes'"


class _Page(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.open, self.images, self.ids, self.links, self.text, self.scripts = [], [], [], [], "", 0
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        values = dict(attrs)
        self.open += [tag] * (tag not in VOID)
        self.images += [values] * (tag == "img")
        self.ids += [values[name] for name in ("id",) if name in values]
        self.links += [values[name] for name in ("href",) if name in values]
        self.scripts += tag == "script"

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """An MLP's study with runs that failed, a transformer's, and the page over both."""
    base = tmp_path_factory.mktemp("page")
    points = [Point("Res+None", end=0.5, statuses=["diverged", "unfinished"]), Point("Res+ReLU", spiked=1)]
    ds = study(points, seeds=3, layers=4).assign_attrs(device=NASTY)
    results.save(ds, base / "mlp" / "results.nc")
    points = [transformer("SiLU"), ablated()]
    ds = study(points, seeds=3, layers=3, matrices=("gate", "down"), claims=TRANSFORMER_CLAIMS, language=True)
    results.save(ds, base / "llama" / "results.nc")
    report(base / "mlp", base / "llama", formats=("html",), out=base / "all.html", echo=False)
    return base


@pytest.fixture(scope="module")
def page(folder):
    return _Page((folder / "all.html").read_text(encoding="utf-8"))


def test_every_element_is_closed_and_every_link_leads_somewhere(page):
    assert page.open == []
    assert len(set(page.ids)) == len(page.ids)
    assert {link for link in page.links if link.startswith("#")} == {"#s1", "#s2"} <= {f"#{name}" for name in page.ids}


def test_it_needs_nothing_beside_it_and_is_small(folder, page):
    text = (folder / "all.html").read_text(encoding="utf-8")
    assert not re.search(r"""(src|href)=["'](?!data:|\#)""", text)
    assert not re.search(r"url\(|@import", text)
    assert (folder / "all.html").stat().st_size < 5e6
    assert not list(folder.rglob("figures"))


def test_results_cannot_smuggle_markup(page):
    assert page.scripts == 0
    assert NASTY in page.text


def test_it_says_what_the_results_say(page):
    for text in (
        "6 runs: 4 finished, 1 diverged, 1 unfinished",
        "1 of 6 runs diverged: Res+None (1)",
        "1 of 6 runs unfinished",
        "late loss spikes",
        "gate-ablation",
        "reproduced",
        "not tested",
        "Down u1",
        "Not drawn:",
        "optimizers (no variant",
        "gcjax train --config configs/synthetic.py",
        "seeds 0 to 2",
        "0000000",
        '"name": "synthetic"',
    ):
        assert text in page.text, text


def test_every_picture_has_an_alternative_text_that_says_what_to_see(page):
    assert len(page.images) > 10
    assert all(len(image["alt"]) > 30 and image["src"].startswith("data:image/") for image in page.images)


def test_one_result_has_its_page_beside_it(folder, tmp_path):
    shutil.copytree(folder / "mlp", tmp_path / "w")
    written = report(tmp_path / "w", formats=("html",), echo=False)
    assert written[-1] == tmp_path / "w" / "report.html"
    assert _Page(written[-1].read_text(encoding="utf-8")).links == ["data:,"]


def test_several_on_the_command_line(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    run(["report", str(folder / "mlp"), str(folder / "mlp" / "results.nc"), "--formats", "html"])
    assert capsys.readouterr().out.splitlines()[-1] == "report.html"
    assert _Page((tmp_path / "report.html").read_text(encoding="utf-8")).links == ["data:,", "#s1", "#s2"]


def test_nothing_to_report_on():
    with pytest.raises(GcjaxError, match="give a workdir"):
        report()


PROBE = """<script>
const images = [...document.images];
images.forEach(image => image.loading = "eager");
Promise.all(images.map(image => image.decode())).then(() => {
  const wide = [...document.querySelectorAll("body *")].filter(one => !one.closest(".wide, pre") &&
    one.getBoundingClientRect().right > innerWidth + 1).map(one => one.tagName);
  parent.postMessage(JSON.stringify({
    scroll: document.documentElement.scrollWidth, inner: innerWidth, wide,
    images: images.length, empty: images.filter(image => !(image.naturalWidth > 0 && image.clientWidth > 0)).length,
    tables: [...document.querySelectorAll(".wide")].length, back: getComputedStyle(document.body).backgroundColor,
  }), "*");
});
</script>"""


@pytest.mark.skipif(BROWSER is None, reason="no Chromium here")
def test_in_a_browser(folder, page, tmp_path):
    """No console message; all pictures are seen; nothing is wider than the window, at a phone's width and a screen's; dark."""
    text = (folder / "all.html").read_text(encoding="utf-8")
    inside = escape(text.replace("</body>", PROBE + "</body>"))  # a window cannot be as narrow as a phone, a frame can
    frames = [f'<iframe width="{width}" height="900" style="border: 0" srcdoc="{inside}"></iframe>' for width in WIDTHS]
    collect = f"""<script>const seen = []; onmessage = event => {{ seen.push(JSON.parse(event.data));
        if (seen.length == {len(WIDTHS)}) document.body.innerHTML = "<pre>" + JSON.stringify(seen) + "</pre>" }}</script>"""
    (tmp_path / "probe.html").write_text(f"<!doctype html><body>{collect}{''.join(frames)}", encoding="utf-8")
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}",
               "--window-size=1400,1000", "--enable-logging=stderr", "--virtual-time-budget=20000", "--dump-dom",
               "--blink-settings=preferredColorScheme=0", (tmp_path / "probe.html").as_uri()]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert "CONSOLE" not in done.stderr, done.stderr
    every = json.loads(re.search(r"<pre>(\[.*\])</pre>", done.stdout)[1])
    assert sorted(found["inner"] for found in every) == sorted(WIDTHS)
    for found in every:
        assert found["scroll"] <= found["inner"], found
        assert found["wide"] == []
        assert (found["images"], found["empty"]) == (len(page.images), 0)
        assert found["back"] == "rgb(21, 23, 26)"
