"""Which modules `accelerate` takes: include, exclude, and what has no relative positions."""

from typing import Any

import pytest
import torch
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


@pytest.mark.parametrize("version", ["seamless_m4t", "seamless_m4t_v2"])
def test_seamless_whose_adapter_has_no_positions(version: str) -> None:
    """strict=True takes the encoder's attention, and the output stays the same."""
    m = bare_peers.transformers(version)
    prefix = "SeamlessM4T" + ("v2" if version.endswith("v2") else "")
    torch.manual_seed(0)
    config = getattr(m, f"{prefix}Config")(
        hidden_size=32, speech_encoder_layers=2, speech_encoder_attention_heads=2, speech_encoder_intermediate_size=32,
        feature_projection_input_dim=16, num_adapter_layers=1, add_adapter=True,
    )  # fmt: skip
    config._attn_implementation = "sdpa"
    encoder = getattr(m, f"{prefix}SpeechEncoder")(config).eval()
    for p in encoder.parameters():
        if p.dim() == 1 or not p.any():
            nn.init.normal_(p, 0.5, 0.2)
    x = torch.randn(2, 40, 16)
    mask = (torch.arange(40) < torch.tensor([[40], [28]])).long()
    with torch.no_grad():
        want = encoder(x, attention_mask=mask).last_hidden_state
        report = accelerate(encoder, strict=True)
        got = encoder(x, attention_mask=mask).last_hidden_state
    assert len(report.accelerated) == 2
    assert "2 of 2 accelerated" in str(report)
    assert [row.reason for row in report.rows if not row.concerns] == ["no relative positions"]
    assert not report.fallbacks
    for b, length in enumerate((want.size(1), 3)):
        torch.testing.assert_close(got[b, :length], want[b, :length], atol=2e-4, rtol=1e-3)


def test_nothing_relative_is_nothing_to_accelerate() -> None:
    m = bare_peers.nemo_transformer()
    module = m.MultiHeadAttention(m.TransformerEncoderConfig(d_model=64, n_heads=4, self_attention_model="abs_pos"))
    assert "nothing to do: no relative positions" in str(accelerate(module))
    with pytest.raises(ValueError, match="strict=True"):
        accelerate(module, strict=True)
