"""A hook of the documentation: formulas become MathML, so that no script or request draws them.

`pymdownx.arithmatex` marks `$...$` and `$$...$$`; every browser of today draws MathML by itself.
"""

import html
import re
from typing import Any

from latex2mathml.converter import convert

__all__ = ["on_page_content"]

INLINE = re.compile(r'<span class="arithmatex">\\\((.*?)\\\)</span>', re.DOTALL)
DISPLAY = re.compile(r'<div class="arithmatex">\s*\\\[(.*?)\\\]\s*</div>', re.DOTALL)


def on_page_content(content: str, **_: Any) -> str:
    """Replace every marked formula of a page."""
    content = DISPLAY.sub(lambda match: _mathml(match[1], "block"), content)
    return INLINE.sub(lambda match: _mathml(match[1], "inline"), content)


def _mathml(formula: str, display: str) -> str:
    return convert(html.unescape(formula).strip(), display=display)
