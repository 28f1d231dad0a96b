"""README.md: its ten lines print what it says they print, and its links lead somewhere."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()


def test_the_ten_lines_print_what_stands_below_them():
    code, printed = re.search(r"```python\n(.*?)```\n\n```\n(.*?)```", README, re.S).groups()
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.stdout == printed, done.stderr


def test_every_link_leads_somewhere():
    links = re.findall(r"\]\(([^)#:]+)\)", README)
    assert len(links) > 10 and not [link for link in links if not (ROOT / link).exists()]
