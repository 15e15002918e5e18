"""How many files a reader of a request has to open."""

from __future__ import annotations

from tests.journeys import record_journey
from tests.serve.conftest import Serve

# A bound that is raised needs a reason in docs/log.md, as those of the rooms do.
MOST_FILES = 30


def test_a_request_visits_few_files(serve: Serve) -> None:
    body = {"inputs": "the weather", "parameters": {"max_new_tokens": 4}}
    with record_journey() as journey:
        server = serve()
        server.call("/generate", body)  # builds what is built once
        journey.is_active = True
        status, _, _ = server.call("/generate", body)
        journey.is_active = False
    assert status == 200
    assert {"serve/tgi.py", "infer/engine.py", "model/decoder.py"} <= journey.files
    assert len(journey.files) <= MOST_FILES, "\n".join(sorted(journey.files))
