"""Draw docs/report.png: the report of a run that moved twice, beside another, as Chromium shows it."""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from portable.errors import UserError

WIDTH, HEIGHT = 1100, 1180
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chromium-headless-shell")
SETTINGS = (
    "--train.steps 400 --train.warmup_steps 40 --train.eval_every 50 --checkpoint.every_steps 100 "
    "--log.every_steps 5 --log.sample_tokens 0 --quiet --data.seq_len 64 --data.max_samples 60 "
    "--model.config.num_hidden_layers 2 --model.config.hidden_size 64 --model.config.intermediate_size 128"
)
LAUNCHES = (
    "--output_dir runs/moved --train.learning_rate 3e-3 --train.stop_after 150",
    "--output_dir runs/moved --train.learning_rate 3e-3 --train.stop_after 280 --strategy zero2 --nproc 2",
    "--output_dir runs/moved --train.learning_rate 3e-3 --nproc 2",
    "--output_dir runs/higher-rate --train.learning_rate 6e-3",
)


def main() -> int:
    """Train, and take the picture; about two minutes on two cores."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("docs/report.png"))
    out: Path = parser.parse_args().out.resolve()
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        raise UserError(f"install Chromium: none of {', '.join(BROWSERS)} is on PATH")
    with tempfile.TemporaryDirectory() as name:
        for launch in LAUNCHES:
            words = [*SETTINGS.split(), *launch.split()]
            subprocess.run([sys.executable, "-m", "portable.cli", *words], cwd=name, check=True)
        report = [sys.executable, "-m", "portable.reporting.html_report", "runs/moved", "runs/higher-rate"]
        subprocess.run([*report, "--out", "page.html"], cwd=name, check=True)
        shot = [f"--screenshot={out}", f"--window-size={WIDTH},{HEIGHT}", "--hide-scrollbars"]
        page = (Path(name) / "page.html").as_uri()
        flags = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={name}/profile"]
        subprocess.run([browser, *flags, *shot, page], check=True, capture_output=True, timeout=120)
    print(f"{out}: {out.stat().st_size:,} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
