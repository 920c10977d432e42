"""What the ModelCheckpoint callback is made of: where files go, what is saved when, how a fit resumes."""

from __future__ import annotations

__all__: list[str] = []
