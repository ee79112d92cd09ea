"""Which modules `accelerate` takes: include, exclude, and what has no relative positions."""

from typing import Any

import pytest
from torch import nn

from implementations import bare_peers
from implementations.peer_cases import make
from txl_kernels.integrations import accelerate, is_accelerated, restore

pytestmark = pytest.mark.peers


class Encoder(nn.Module):
    """Two layers, each with an attention of ESPnet's."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleDict({"attention": make("espnet").module}) for _ in range(2))


def model() -> nn.ModuleDict:
    return nn.ModuleDict({"encoder": Encoder(), "decoder": nn.ModuleList([make("nemo").module])})


def taken(**options: Any) -> set[str]:
    m = model()
    report = accelerate(m, **options)
    assert is_accelerated(m) == bool(report.accelerated)
    return {row.name for row in report.accelerated}


ALL = {"encoder.layers.0.attention", "encoder.layers.1.attention", "decoder.0"}
CHOICES: list[tuple[dict[str, Any], set[str]]] = [
    ({}, ALL),
    ({"include": "encoder"}, ALL - {"decoder.0"}),
    ({"include": Encoder}, ALL - {"decoder.0"}),
    ({"include": "Encoder"}, ALL - {"decoder.0"}),
    ({"exclude": "encoder.layers.0"}, ALL - {"encoder.layers.0.attention"}),
    ({"exclude": ["*.1.attention", "decoder"]}, {"encoder.layers.0.attention"}),
    ({"include": ["RelPositionMultiHeadAttention", "encoder.layers.0*"], "exclude": "decoder"},
     {"encoder.layers.0.attention"}),
    ({"exclude": nn.Module}, set()),
]  # fmt: skip


@pytest.mark.parametrize(("options", "wanted"), CHOICES, ids=range(len(CHOICES)))
def test_include_and_exclude(options: dict[str, Any], wanted: set[str]) -> None:
    assert taken(**options) == wanted


def test_what_is_not_selected_is_said_and_stays_as_it_is() -> None:
    m = model()
    accelerate(m, include="decoder", window=(4, 4))
    report = accelerate(m, exclude="decoder", strict=True)
    assert "nothing to do: excluded" not in str(report)  # it is accelerated already
    assert m["decoder"][0].setting("window") == (4, 4)
    again = str(report)
    assert again == str(accelerate(m, exclude="decoder", strict=True))
    assert restore(m) == 3
    assert not is_accelerated(m)
    assert "nothing to do: not included" in str(accelerate(m, include="encoder"))


def test_nothing_relative_is_nothing_to_accelerate() -> None:
    m = bare_peers.nemo_transformer()
    module = m.MultiHeadAttention(m.TransformerEncoderConfig(d_model=64, n_heads=4, self_attention_model="abs_pos"))
    assert "nothing to do: no relative positions" in str(accelerate(module))
    with pytest.raises(ValueError, match="strict=True"):
        accelerate(module, strict=True)
