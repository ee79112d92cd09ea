"""The generated header of the fields of a call."""

import call_fields


def test_header_is_up_to_date() -> None:
    assert call_fields.HEADER.read_text() == call_fields.text(), "run python tools/call_fields.py"
