"""The generated fields of a call, in C++ and C."""

import call_fields


def test_generated_text_is_up_to_date() -> None:
    for file, text in call_fields.texts().items():
        assert file.read_text() == text, f"{file}: run python tools/call_fields.py"
