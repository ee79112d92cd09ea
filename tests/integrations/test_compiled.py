"""Accelerated modules under torch.compile, torch.export, torch.fx, ONNX and TorchScript."""

import copy
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
from inkling_models import NAMES
from layer_helpers import EACH_ADAPTER, WITHOUT_MASKS, case_of
from torch import Tensor, nn

from implementations import bare_peers
from implementations.peer_cases import PeerCase, answer
from txl_kernels.integrations import accelerate

pytestmark = pytest.mark.filterwarnings(
    "ignore:Dynamo detected a call to a `functools.lru_cache`-wrapped function",
    "ignore:an accelerated model is exported",
)
# The encoder of "speechbrain beats" draws from NumPy; the others are like those of T5 and of
# x-transformers, and slow to compile.
COMPILED = [name for name in EACH_ADAPTER if name not in ("speechbrain beats", "mpt", "speecht5")]
ADAPTERS = (*COMPILED, "seamless v2", "nemotron", "xlnet", "wavlm")
CASES = [
    *((name, "none" if name in WITHOUT_MASKS else "right") for name in ADAPTERS),
    *((name, "left") for name in NAMES[:1]),
    *(pytest.param(name, "none", marks=pytest.mark.nightly) for name in ADAPTERS
      if name not in WITHOUT_MASKS and name != "longt5 local"),  # nor its original
    *(pytest.param(name, "left", marks=pytest.mark.nightly) for name in NAMES[1:]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "masks"), CASES)
def test_compiles_without_a_graph_break(name: str, masks: str) -> None:
    case = case_of(name, masks)
    report = accelerate(case.module, strict=True, weights="none")
    want = answer(case)
    torch.compiler.reset()
    backend = "eager" if name in NAMES else "aot_eager"  # which takes long for experts
    compiled = torch.compile(case.module, fullgraph=True, backend=backend)
    with torch.no_grad():
        found = case.call(compiled, case.x)
    torch.testing.assert_close(found[case.valid], want[case.valid], atol=2e-6, rtol=1e-5)
    assert not report.fallbacks


class Twice(nn.Module):
    """A case's attention after another."""

    def __init__(self, case: PeerCase) -> None:
        super().__init__()
        self.first, self.second = case.module, copy.deepcopy(case.module)
        self._call = case.call

    def forward(self, x: Tensor) -> Tensor:
        return self._call(self.second, self._call(self.first, x))


def model_of(name: str) -> tuple[nn.Module, Tensor, Tensor]:
    """Return a model, its input, and its output before it is accelerated."""
    case = case_of(name)
    model = Twice(case).eval()
    with torch.no_grad():
        return model, case.x, model(case.x)


def test_export_operator() -> None:
    model, x, want = model_of("wav2vec2-conformer")
    accelerate(model, strict=True, export="operator")
    program = torch.export.export(model, (x,))
    assert "txl_kernels.rel_attention" in str(program.graph)
    torch.testing.assert_close(program.module()(x), want, atol=1e-5, rtol=1e-4)


def test_export_original_with_one_warning() -> None:
    model, x, want = model_of("nemo")
    theirs = [str(node.target) for node in torch.export.export(model, (x,)).graph.nodes]
    report = accelerate(model, strict=True)
    with pytest.warns(UserWarning, match="its original attention is written down") as warned:
        program = torch.export.export(model, (x,))
    assert sum("is exported" in str(w.message) for w in warned) == 1
    assert [str(node.target) for node in program.graph.nodes] == theirs
    assert torch.equal(program.module()(x), want)
    with torch.no_grad():
        torch.testing.assert_close(model(x), want, atol=1e-5, rtol=1e-4)
    assert not report.fallbacks


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("export", "dynamo"), [("original", True), ("original", False), ("operator", False)])
def test_onnx_gets_the_original(export: Any, dynamo: bool, tmp_path: Path) -> None:
    """The file runs without this package. The operator is in onnx/test_export.py."""
    onnxruntime = pytest.importorskip("onnxruntime")
    model, x, want = model_of("nemo")
    accelerate(model, strict=True, export=export)
    torch.onnx.export(model, (x,), tmp_path / "model.onnx", dynamo=dynamo, verbose=False)
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    (out,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    torch.testing.assert_close(torch.from_numpy(out), want, atol=2e-6, rtol=1e-5)


SYMBOLIC = ("nemo", "gemma 4", "fireredasr", "espnet transducer", "funasr chunk", "speechbrain")


class Once(nn.Module):
    """A case's attention, and its call."""

    def __init__(self, case: PeerCase) -> None:
        super().__init__()
        self.module, self._call = case.module, case.call

    def forward(self, x: Tensor) -> Tensor:
        return self._call(self.module, x)


def symbolically_traced(case: PeerCase) -> Any:
    """Return the output of a case that torch.fx.symbolic_trace has traced, or the error, with the
    lines of the original's package that it comes from."""
    try:
        graph = torch.fx.symbolic_trace(Once(case))
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        lines = [(x.filename, x.lineno) for x in frames if x.filename.startswith(str(bare_peers.FOLDER))]
        return type(error), str(error), lines
    with torch.no_grad():
        return graph(case.x)


@pytest.mark.parametrize("name", [*EACH_ADAPTER, "funasr chunk", "xlnet", "wavlm"])
def test_symbolic_trace_gets_the_original(name: str) -> None:
    """Where the original cannot be traced, the error is its own."""
    case = case_of(name)
    want = symbolically_traced(case)
    report = accelerate(case.module, strict=True)
    found = symbolically_traced(case)
    if name in SYMBOLIC:
        assert torch.equal(found, want)
        assert report.fallbacks == {"exported or traced": 1}
    else:
        assert found == want


def test_export_of_a_window_raises() -> None:
    model, x, _ = model_of("nemo")
    accelerate(model, strict=True, window=(4, 4))
    with pytest.raises(RuntimeError, match=r"window=\(4, 4\)\) holds for the kernels alone"):
        torch.export.export(model, (x,))


@pytest.mark.filterwarnings("ignore:.*torch.jit.*is deprecated")
def test_jit_script_raises() -> None:
    model, _, _ = model_of("nemo")
    accelerate(model, strict=True)
    with pytest.raises(RuntimeError, match=r"torch\.jit\.script does not take an accelerated model.*restore\(model\)"):
        torch.jit.script(model)


class WithExport(Once):
    """With such a method, as Zipformer's models have, torch.jit.trace compiles the properties of
    all modules inside, except those that their classes name."""

    @torch.jit.export
    def twice(self, x: Tensor) -> Tensor:
        return 2 * x


@pytest.mark.filterwarnings("ignore:.*torch.jit.*is deprecated", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("name", ["nemo", "zipformer"])
def test_jit_trace_of_a_model_with_exported_methods(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = case_of(name)
    want = answer(case)
    report = accelerate(case.module, strict=True)
    for row in report.accelerated:
        original: Any = type(row.module).original  # type: ignore[union-attr]
        monkeypatch.setattr(original, "own", property(lambda self: {*()}), raising=False)
        monkeypatch.setattr(original, "__jit_unused_properties__", ["own"], raising=False)
    with torch.no_grad():
        traced = torch.jit.trace(WithExport(case), case.x, check_trace=False)
        assert torch.equal(traced(case.x), want)
    assert list(report.fallbacks) == ["exported or traced"]


@pytest.mark.parametrize("name", ["nemo", "wav2vec2-conformer", "t5"])
def test_forward_mode_of_a_frozen_model_raises(name: str) -> None:
    case = case_of(name, "none")
    case.module.requires_grad_(False)
    accelerate(case.module, strict=True)
    with pytest.raises(NotImplementedError, match="no forward-mode AD"):
        torch.func.linearize(lambda x: case.call(case.module, x), case.x)
