"""Notices that a training job has failed, decides what to do about it, and does it once."""

__all__: list[str] = []
