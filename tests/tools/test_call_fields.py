"""The generated fields of a call, in C++ and C."""

import re

import call_fields


def test_generated_text_is_up_to_date() -> None:
    for file, text in call_fields.texts().items():
        assert file.read_text() == text, f"{file}: run python tools/call_fields.py"


def test_structs_of_the_first_version_keep_their_fields() -> None:
    """Programs were compiled with them: a new field is of a later version (`SINCE`)."""
    settings = "left right zero_row scale dropout_p softcap position_scale zero_outside".split()
    inputs = "q k v r content_bias position_bias k_mem v_mem r_bias q_pos sink".split()
    found = []
    for text in call_fields.c_fields():
        members = re.findall(r"^  \w+ ([\w, ]+);", text, re.MULTILINE)
        found.append([name for names in members for name in names.split(", ")])
    first = ["B", "H", "L", "D", "Hkv", "Dv", "M", "Dp", "T", *settings, *inputs, "start", "end"]
    assert found[0][: len(first)] == first
    assert found[1][: len(inputs)] == inputs
