"""Accelerated modules under torch.compile and torch.export."""

import pytest
import torch
from torch import Tensor, nn

from implementations.peer_cases import answer, make
from txl_kernels.integrations import accelerate

pytestmark = pytest.mark.peers
COMPILED = ("wav2vec2-conformer", "w2v-bert relative_key", "seamless v2", "parakeet", "fastspeech2", "nemo", "espnet",
            "espnet legacy", "espnet transducer", "speechbrain", "ding", "labml", "rllib",
            "nemotron", "xlnet")  # fmt: skip


@pytest.mark.parametrize("name", COMPILED)
@pytest.mark.parametrize("masks", ["none", "right"])
def test_compiles_without_a_break(name: str, masks: str) -> None:
    case = make(name, "none" if name in ("ding", "labml", "rllib") else masks)
    case.module.eval()
    accelerate(case.module, strict=True)
    want = answer(case)
    torch.compiler.reset()
    compiled = torch.compile(case.module, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        torch.testing.assert_close(case.call(compiled, case.x), want, atol=2e-6, rtol=1e-5)


def test_compiled_holes_raise() -> None:
    case = make("nemo", "holes")
    case.module.eval()
    accelerate(case.module, strict=True)
    torch.compiler.reset()
    compiled = torch.compile(case.module, fullgraph=True, backend="aot_eager")
    with torch.no_grad(), pytest.raises(RuntimeError, match="hides a key between visible ones"):
        case.call(compiled, case.x)


def test_exports() -> None:
    case = make("wav2vec2-conformer", "right")
    case.module.eval()
    accelerate(case.module, strict=True)

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = case.module

        def forward(self, x: Tensor) -> Tensor:
            return case.call(self.attention, x)

    program = torch.export.export(Whole().eval(), (case.x,))
    assert "rel_attention" in str(program.graph)
    torch.testing.assert_close(program.module()(case.x), answer(case), atol=2e-6, rtol=1e-5)
