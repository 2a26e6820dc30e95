"""Text in the manner of text8: articles of enwik8 as lower-case letters and single spaces.

Markup is taken off, digits are spelled, all else becomes a space. It is made here from enwik8 by
rules of our own, so its length and its scores are near those of text8 but not the same file.
"""

import re
from pathlib import Path

import numpy as np

__all__ = ["LETTERS", "cleaned", "text8_ids"]

LETTERS = " abcdefghijklmnopqrstuvwxyz"
DIGITS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]

RULES = [
    (re.compile(r"<ref[^<]*</ref>|<[^>]*>"), " "),
    (re.compile(r"&lt;.*?&gt;|&[a-z]+;"), " "),
    (re.compile(r"\{\{[^{}]*\}\}"), " "),
    (re.compile(r"\[\[(?:image|category|[a-z\-]{2,12}):[^\]]*\]\]"), " "),
    (re.compile(r"\[\[[^\]|]*\|"), " "),
    (re.compile(r"\[https?:[^ \]]*|https?:\S*"), " "),
]
ARTICLES = re.compile(r"<text[^>]*>(.*?)</text>", re.DOTALL)


def cleaned(article: str) -> str:
    """Letters a-z and single spaces of an article with wiki markup."""
    text = article.lower()
    for rule, instead in RULES:
        text = rule.sub(instead, text)
    for digit, word in enumerate(DIGITS):
        text = text.replace(str(digit), f" {word} ")
    return " ".join(re.sub("[^a-z]", " ", text).split())


def text8_ids(enwik8: Path, limit: int | None = None) -> np.ndarray:
    """Ids of the cleaned articles, space 0 and a 1 to z 26.

    Args:
        enwik8: the file of `data_enwik8`.
        limit: characters of enwik8 to read; all by default.
    """
    with enwik8.open("rb") as file:
        raw = file.read() if limit is None else file.read(limit)
    text = raw.decode(errors="ignore")
    articles = (found.group(1) for found in ARTICLES.finditer(text))
    kept = " ".join(cleaned(a) for a in articles if not a.lstrip().lower().startswith("#redirect"))
    codes = np.frombuffer(kept.encode("ascii"), dtype=np.uint8)
    return np.where(codes == ord(" "), 0, codes - (ord("a") - 1)).astype(np.uint8)
