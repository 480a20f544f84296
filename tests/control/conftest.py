"""For the tests of job control."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A TLS certificate that is its own authority, and its key."""
    folder = tmp_path_factory.mktemp("tls")
    made = [folder / "cert.pem", folder / "key.pem"]
    kind = ["-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=node-7", "-days", "2"]
    subprocess.run(
        ["openssl", "req", *kind, "-out", made[0], "-keyout", made[1]],
        check=True,
        capture_output=True,
    )
    return made[0], made[1]
