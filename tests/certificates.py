"""Certificates for tests of TLS, made with openssl."""

from __future__ import annotations

import subprocess
from pathlib import Path

__all__ = ["Certificates"]


class Certificates:
    """An authority, and what it signs."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self.name = folder, name
        self.ca = folder / f"{name}.pem"
        self._key = folder / f"{name}.key"
        self._openssl("req", "-x509", "-days", "1", "-subj", f"/CN={name}", "-keyout", self._key, "-out", self.ca)

    def sign(self, name: str, alternative: str) -> tuple[str, str]:
        """A certificate and its key."""
        stem = self.folder / f"{self.name}-{name}"
        key, request, cert = (stem.with_suffix(end) for end in (".key", ".csr", ".pem"))
        self._openssl("req", "-subj", f"/CN={name}", "-keyout", key, "-out", request)
        extension = stem.with_suffix(".ext")
        extension.write_text(f"subjectAltName={alternative}\n")
        words = ["x509", "-req", "-days", "1", "-in", request, "-CA", self.ca, "-CAkey", self._key, "-CAcreateserial"]
        self._run(*words, "-extfile", extension, "-out", cert)
        return str(cert), str(key)

    def _openssl(self, *words: object) -> None:
        self._run(*words, "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")

    @staticmethod
    def _run(*words: object) -> None:
        done = subprocess.run(["openssl", *map(str, words)], capture_output=True, text=True, timeout=30)
        assert done.returncode == 0, done.stderr
