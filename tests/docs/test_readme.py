"""The README is a first screen, and the glossary can be read in a minute; both stay so."""

from __future__ import annotations

from pathlib import Path


def test_the_readme_has_at_most_120_lines() -> None:
    assert len((Path(__file__).parents[2] / "README.md").read_text().splitlines()) <= 120


def test_the_glossary_has_at_most_20_terms() -> None:
    text = (Path(__file__).parents[2] / "docs" / "architecture.md").read_text()
    rows = [
        line for line in text.partition("## Glossary")[2].partition("\n## ")[0].splitlines() if line.startswith("| ")
    ]
    terms = rows[1:]  # below the head of the table
    assert 10 < len(terms) <= 20, [row.split("|")[1].strip() for row in terms]
