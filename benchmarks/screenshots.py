"""Pictures of a report for the documentation, taken by a real browser: light, dark, and as wide as a phone.

    python -m benchmarks.screenshots runs/demo [--out docs/assets]

Needs Chromium or Chrome on the path. The report is written again from the run folder: the pictures show what this
version draws.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
WIDE, PHONE = (1000, 1180), (390, 844)
"""Width and height in pixels of what is shown."""

_DARK = "--blink-settings=preferredColorScheme=0"


def main() -> None:
    """Write the three pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run_folder", type=Path)
    parser.add_argument("--out", type=Path, default=Path("docs/assets"))
    given = parser.parse_args()
    browser = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    if browser is None:
        raise SystemExit(f"no browser on the path; expected one of {', '.join(BROWSERS)}; hint: install Chromium")
    given.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.html")
        command = [sys.executable, "-m", "ebbtide", "report", str(given.run_folder), "--output", str(report)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        phone = Path(folder, "phone.html")
        phone.write_text(framed(report.name))
        shoot(browser, report, given.out / "report-light.png", WIDE)
        shoot(browser, report, given.out / "report-dark.png", WIDE, _DARK)
        shoot(browser, phone, given.out / "report-phone.png", PHONE)


def framed(page: str) -> str:
    """Return a page that shows another one as wide as a phone: a browser's own window may not be that narrow."""
    width, height = PHONE
    style = f"width:{width}px;height:{height}px;border:0"
    return f'<!doctype html><body style="margin:0"><iframe src="{page}" style="{style}"></iframe>'


def shoot(browser: str, page: Path, picture: Path, size: tuple[int, int], *flags: str) -> None:
    """Take a picture of a page.

    Args:
        browser: The program.
        page: A file.
        picture: Where the picture goes.
        size: Width and height in pixels.
        flags: Further flags of the browser.
    """
    window = "--window-size={},{}".format(*size)
    usual = ["--headless", "--disable-gpu", "--no-sandbox", "--hide-scrollbars", window]
    command = [browser, *usual, *flags, f"--screenshot={picture.resolve()}", page.resolve().as_uri()]
    subprocess.run(command, check=True, timeout=120, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    print(picture)


if __name__ == "__main__":
    main()
