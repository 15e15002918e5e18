"""Report the progress of a job to Kubeflow Trainer v2. Its controller sets the server's address in the environment.

https://github.com/kubeflow/trainer/tree/master/docs/proposals/2779-trainjob-progress
"""

from __future__ import annotations

import json
import os
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jingu.runtime.http import post

_PREFIX = "KUBEFLOW_TRAINER_SERVER_"
_SECONDS = 10.0


@dataclass(frozen=True)
class StatusServer:
    """The server that receives the status of this job.

    Attributes:
        url: where to post the status.
        certificate: file with the CA certificate of the server; None: the system's certificates.
        token: file with the job's bearer token.
    """

    url: str
    certificate: Path | None
    token: Path

    def post(self, status: Mapping[str, Any]) -> None:
        """Send the status of the trainer (`trainerStatus`), as JSON.

        Raises:
            OSError: the server cannot be reached or refuses the status, or a file cannot be read.
            HTTPException: the answer is not HTTP.
            ValueError: the address is not a URL.
        """
        context = ssl.create_default_context(cafile=self.certificate) if self.certificate is not None else None
        # Read the token each time: it expires, and the file then contains a new one.
        headers = {
            "Authorization": f"Bearer {self.token.read_text(encoding='utf-8').strip()}",
            "Content-Type": "application/json",
        }
        body = json.dumps({"trainerStatus": status}).encode()
        post(self.url, body, headers, _SECONDS, context)


def find_status_server() -> StatusServer | None:
    """Return the server that the environment variables name; None outside of Kubeflow."""
    url, certificate, token = (os.environ.get(f"{_PREFIX}{name}") for name in ("URL", "CA_CERT", "TOKEN"))
    if not url or not token:
        return None
    return StatusServer(url, Path(certificate) if certificate else None, Path(token))
