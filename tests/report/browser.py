"""A page as a headless browser renders it."""

import json
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--host-resolver-rules=MAP * ~NOTFOUND",
    "--enable-logging=stderr",
    "--window-size=1280,2000",
    "--virtual-time-budget=20000",
    "--dump-dom",
)
VOID = {"meta", "link", "img", "br", "hr", "input", "source"}


def find_browser():
    """Path of a Chromium, or None."""
    return next(filter(None, map(shutil.which, BROWSERS)), None)


@dataclass
class BrowserPage(HTMLParser):
    """What is on the page after its scripts have run."""

    dom: str
    console: list[str]
    requests: list[str]
    status: str = ""
    troubles: list[str] = field(default_factory=list)
    drawings: dict[str, int] = field(default_factory=dict)
    tokens: list[tuple[str, str]] = field(default_factory=list)
    tags: list[str] = field(default_factory=list)
    text: str = ""

    def __post_init__(self):
        super().__init__(convert_charrefs=True)
        self._open = []
        self.feed(self.dom)
        self.close()

    def handle_starttag(self, tag, attrs):
        attributes = dict(attrs)
        self.tags.append(tag)
        if tag == "html":
            self.status = attributes.get("data-status", "")
            self.troubles = json.loads(attributes.get("data-troubles", "[]"))
        if attributes.get("class", "").startswith("chart"):
            self.drawings[attributes["id"]] = 0
        if tag in ("svg", "canvas"):
            for chart in [name for name in self._open if name in self.drawings]:
                self.drawings[chart] += 1
        if tag == "span" and self._open and self._open[-1] == "text":
            self.tokens.append((attributes["class"], ""))
        if tag not in VOID:
            self._open.append(attributes.get("id") or tag)

    def handle_endtag(self, tag):
        if tag not in VOID and self._open:
            self._open.pop()

    def handle_data(self, data):
        self.text += data if "script" not in self._open and "style" not in self._open else ""
        if len(self._open) > 1 and self._open[-2:] == ["text", "span"]:
            kind, text = self.tokens[-1]
            self.tokens[-1] = (kind, text + data)


def look_at(page: Path, dark=False) -> BrowserPage:
    """Open a page, wait until its scripts rest, and read it."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "net.json"
        scheme = f"--blink-settings=preferredColorScheme={0 if dark else 1}"
        profile = (f"--user-data-dir={folder}/profile", f"--log-net-log={log}")
        done = subprocess.run(
            [find_browser(), *FLAGS, *profile, scheme, page.as_uri()],
            capture_output=True,
            check=True,
            timeout=180,
        )
        requests = _requests(log.read_text())
    console = re.findall(r"CONSOLE[^\n]*", done.stderr.decode(errors="replace"))
    return BrowserPage(done.stdout.decode(), console, requests)


def _requests(log: str) -> list[str]:
    """Addresses that the page requested; the browser's own requests have no origin."""
    addresses = []
    for line in re.findall(r'"params":(\{[^\n]*"initiator"[^\n]*?\})[,}]', log):
        url = re.search(r'"url":"([^"]*)"', line)
        if url and '"initiator":"not an origin"' not in line and not url[1].startswith("file:"):
            addresses.append(url[1])
    return addresses
