"""ONNX graphs of the operator, of accelerated models: what the models return, for any batch and
length and with padding, and no graph with the operator where the original answers."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from small_models import arguments_of, model_of, valid_parts
from torch import Tensor, nn

pytest.importorskip("onnxruntime", reason="needs the extra `onnx`")
pytest.importorskip("onnxscript", reason="needs the extra `onnx`")
from onnx_models import export, nodes_of, outputs_of

from implementations.peer_cases import make, sinusoids
from txl_kernels.integrations import accelerate

pytestmark = [pytest.mark.usefixtures("quiet_torch_onnx"), pytest.mark.filterwarnings("ignore")]  # the exporter's own
BATCH, LENGTH = torch.export.Dim("batch"), torch.export.Dim("length")


class Whole(nn.Module):
    """A model of `small_models` that takes a batch and its mask of padding."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.model, self.names = model_of(name), list(arguments_of(name))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        out: Tensor = self.model(**dict(zip(self.names, (x, mask), strict=True)))[0]
        return out


class Layer(nn.Module):
    """A layer of a case of `peer_cases`, called with a mask of padding, bool [B, T]."""

    def __init__(self, name: str, call: Callable[..., Tensor]) -> None:
        super().__init__()
        self.model, self.call = make(name).module, call

    def forward(self, x: Tensor, real: Tensor) -> Tensor:
        length = x.size(1)
        return self.call(self.model, x, real, sinusoids(length - 1, 1 - length, x.size(2)))


AXES = ({0: BATCH, 1: LENGTH},) * 2


def run(program: Any, args: Sequence[Tensor]) -> Tensor:
    return torch.from_numpy(outputs_of(program, args)[0])


def agree(model: nn.Module, program: Any, args: Sequence[Tensor]) -> None:
    with torch.no_grad():
        want = model(*args)
    torch.testing.assert_close(run(program, args), want, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("name", "layers"), [("Parakeet", 2), ("w2v-BERT relative_key", 2), ("MPNet", 3)])
def test_whole_models(name: str, layers: int) -> None:
    """MPNet has additive masks, Parakeet encodings for each batch row."""
    model, (x, mask) = Whole(name), arguments_of(name).values()
    with torch.no_grad():
        originals = valid_parts(model(x, mask))
    report = accelerate(model, strict=True, export="operator")
    program = export(model, (x, mask), AXES)
    assert len(nodes_of(program)) == layers
    torch.testing.assert_close(valid_parts(run(program, (x, mask))), originals, atol=1e-4, rtol=1e-4)
    half = x.size(1) // 2 + 1
    agree(model, program, (x[:1, :half], mask[:1, :half]))
    agree(model, program, (torch.cat([x, x], 1), torch.cat([torch.ones_like(mask), mask], 1)))
    assert not report.fallbacks


LAYERS: dict[str, Callable[..., Tensor]] = {
    "nemo": lambda f, x, real, table: f(x, x, x, ~(real.unsqueeze(1) & real.unsqueeze(2)), table),
    "espnet legacy": lambda f, x, real, table: f(x, x, x, table[:, : x.size(1)], real.unsqueeze(1)),
}


def inputs(batch: int, length: int, padding: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(batch, length, 64, generator=torch.Generator().manual_seed(length))
    return x, torch.arange(length) < length - padding * torch.arange(batch).unsqueeze(1)


@pytest.mark.parametrize(("name", "window"), [("nemo", None), ("nemo", (6, 3)), ("espnet legacy", None)])
def test_layers(name: str, window: Any) -> None:
    model = Layer(name, LAYERS[name]).eval()
    with torch.no_grad():
        original = model(*inputs(3, 20, 4))
    accelerate(model, strict=True, export="operator", window=window)
    program = export(model, inputs(3, 20, 4), AXES)
    assert len(nodes_of(program)) == 1
    if window is None:
        torch.testing.assert_close(run(program, inputs(3, 20, 4)), original, atol=1e-4, rtol=1e-4)
    for sizes in ((3, 20, 4), (1, 31, 0), (2, 9, 5)):
        agree(model, program, inputs(*sizes))


def test_mask_with_holes_stops_the_graph() -> None:
    model = Layer("nemo", LAYERS["nemo"])
    accelerate(model, strict=True, export="operator")
    program = export(model, inputs(3, 20, 4), AXES)
    x, real = inputs(3, 20, 0)
    real[1, 4] = False
    with pytest.raises(Exception, match=r"start must hold key indices in \[0, M \+ L\] = \[0, 20\], got -1"):
        run(program, (x, real))


class Given(nn.Module):
    """Parakeet's attention, whose encodings and additive mask are inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.model = make("parakeet").module

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        out: Tensor = self.model(x, table)[0]
        return out


def test_encodings_that_differ_between_batch_rows_stop_the_graph() -> None:
    model = Given().eval()
    accelerate(model, strict=True, export="operator")
    x, table = torch.randn(3, 20, 64), sinusoids(19, -19, 64).repeat(3, 1, 1)
    program = export(model, (x, table), ({0: BATCH},) * 2)
    agree(model, program, (x, table))
    table[1] += 1
    with pytest.raises(Exception, match="indices element out of data bounds"):
        run(program, (x, table))


def test_call_that_the_original_answers_is_exported_with_a_warning() -> None:
    model = Layer("speechbrain", lambda f, x, real, table: f(x, x, x, table, ~real)[0])  # which asks for weights
    accelerate(model, strict=True, export="operator")
    with pytest.warns(UserWarning, match="original's attention is exported.*: attention weights asked for"):
        program = export(model, inputs(3, 20, 4), AXES)
    assert len(nodes_of(program)) == 0
    agree(model, program, inputs(1, 31, 0))
