"""The fuzzers, a few seconds each; `pytest tests/fuzz --fuzz-minutes 12` tries an hour of new
inputs."""

import math
import time

import pytest
from campaign import FUZZERS, campaign

COUNTS = {"arguments": 1500, "options": 30, "files": 60, "kills": 1}


@pytest.mark.parametrize("name", FUZZERS)
def test_fuzz(name: str, request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]) -> None:
    minutes = request.config.getoption("--fuzz-minutes")
    first, count, seconds = (int(time.time()), 10**9, minutes * 60) if minutes else (0, COUNTS[name], math.inf)
    outcome = campaign(name, first, count, seconds)
    with capsys.disabled():
        print(f"\n{outcome}")
    assert outcome.tried > 0
    assert not outcome.findings, "\n\n".join(outcome.findings)


def test_what_a_campaign_finds() -> None:
    outcome = campaign("planted", 0, 6, hang=6)
    assert outcome.tried == 6
    (wrong,), (crash,), (hang,) = outcome.wrong, outcome.crashes, outcome.hangs
    assert wrong.startswith("python tests/fuzz/campaign.py planted --only 1\nTraceback")
    assert wrong.endswith("AssertionError: planted\n")
    assert crash.startswith("python tests/fuzz/campaign.py planted --only 3\nended with -6")
    assert hang == "python tests/fuzz/campaign.py planted --only 4\nhung for 6 s"
