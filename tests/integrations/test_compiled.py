"""Accelerated modules under torch.compile and torch.export."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from implementations.peer_cases import PeerCase, answer, make
from txl_kernels.integrations import accelerate

pytestmark = [
    pytest.mark.peers,
    pytest.mark.filterwarnings("ignore:Support for mismatched key_padding_mask and attn_mask"),  # WavLM's
    pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`-wrapped function"),
]
COMPILED = ("wav2vec2-conformer", "w2v-bert relative_key", "seamless v2", "parakeet", "fastspeech2", "nemo", "espnet",
            "espnet legacy", "espnet transducer", "speechbrain", "ding", "rllib",
            "nemotron", "xlnet", "nemo local", "cosyvoice", "enformer", "granite", "gemma", "gemma 4", "t5", "t5 decoder",
            "umt5", "mpnet", "wavlm")  # fmt: skip


@pytest.mark.parametrize("name", COMPILED)
@pytest.mark.parametrize("masks", ["none", "right"])
def test_compiles_without_a_break(name: str, masks: str) -> None:
    case = make(name, "none" if name in ("ding", "rllib", "enformer", "granite") else masks)
    case.module.eval()
    accelerate(case.module, strict=True)
    want = answer(case)
    torch.compiler.reset()
    compiled = torch.compile(case.module, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        torch.testing.assert_close(case.call(compiled, case.x), want, atol=2e-6, rtol=1e-5)


class Twice(nn.Module):
    """A case's attention after another."""

    def __init__(self, case: PeerCase) -> None:
        super().__init__()
        self.first, self.second = case.module, copy.deepcopy(case.module)
        self._call = case.call

    def forward(self, x: Tensor) -> Tensor:
        return self._call(self.second, self._call(self.first, x))


def model_of(name: str) -> tuple[nn.Module, Tensor, Tensor]:
    """A model, its input, and its output before it is accelerated."""
    case = make(name, "right")
    model = Twice(case).eval()
    with torch.no_grad():
        return model, case.x, model(case.x)


def test_exports_the_operator_where_asked() -> None:
    model, x, want = model_of("wav2vec2-conformer")
    accelerate(model, strict=True, export="operator")
    program = torch.export.export(model, (x,))
    assert "txl_kernels.rel_attention" in str(program.graph)
    torch.testing.assert_close(program.module()(x), want, atol=1e-5, rtol=1e-4)


def test_exports_the_original_and_says_so_once() -> None:
    model, x, want = model_of("nemo")
    theirs = [str(node.target) for node in torch.export.export(model, (x,)).graph.nodes]
    report = accelerate(model, strict=True)
    with pytest.warns(UserWarning, match="its original attention is written down") as told:
        program = torch.export.export(model, (x,))
    assert sum("is exported" in str(w.message) for w in told) == 1
    assert [str(node.target) for node in program.graph.nodes] == theirs
    assert torch.equal(program.module()(x), want)
    assert not report.fallbacks
    with torch.no_grad():
        torch.testing.assert_close(model(x), want, atol=1e-5, rtol=1e-4)
    assert not report.fallbacks


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dynamo", [True, False])
@pytest.mark.parametrize("export", ["original", "operator"])
def test_onnx_gets_the_original(export: Any, dynamo: bool, tmp_path: Path) -> None:
    """And runs without this package."""
    onnxruntime = pytest.importorskip("onnxruntime")
    model, x, want = model_of("nemo")
    accelerate(model, strict=True, export=export)
    torch.onnx.export(model, (x,), tmp_path / "model.onnx", dynamo=dynamo, verbose=False)
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    (out,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    torch.testing.assert_close(torch.from_numpy(out), want, atol=2e-6, rtol=1e-5)


def test_a_window_is_not_exported_without_a_word() -> None:
    model, x, _ = model_of("nemo")
    accelerate(model, strict=True, window=(4, 4))
    with pytest.raises(RuntimeError, match=r"window=\(4, 4\)\) holds for the kernels alone"):
        torch.export.export(model, (x,))


@pytest.mark.filterwarnings("ignore:.*torch.jit.*is deprecated")
def test_jit_script_says_what_it_does_not_take() -> None:
    model, _, _ = model_of("nemo")
    accelerate(model, strict=True)
    with pytest.raises(RuntimeError, match=r"torch\.jit\.script does not take an accelerated model.*restore\(model\)"):
        torch.jit.script(model)


@pytest.mark.parametrize("name", ["nemo", "wav2vec2-conformer", "t5"])
def test_forward_mode_of_a_frozen_model_is_refused(name: str) -> None:
    case = make(name, "none")
    case.module.eval().requires_grad_(False)
    accelerate(case.module, strict=True)
    with pytest.raises(NotImplementedError, match="no forward-mode AD"):
        torch.func.linearize(lambda x: case.call(case.module, x), case.x)
