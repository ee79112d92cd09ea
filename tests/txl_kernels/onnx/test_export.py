"""Graphs that torch.onnx.export writes with `translations`: their results are those of the model,
for other sizes than those of the export, and what the operator cannot express is refused."""

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from builds import ROOT
from cases import CASES, COMPOSED, TERMS, Case, as_call, detached, make_inputs
from torch import Tensor, nn

pytest.importorskip("onnxruntime", reason="needs the extra `onnx`")
pytest.importorskip("onnxscript", reason="needs the extra `onnx`")
from internals import TRACED
from onnx_models import can_express, export, nodes_of, outputs_of, session_of

from txl_kernels import LearnedRelativeAttention, RelAttention, intervals, rel_attention

pytestmark = [
    pytest.mark.usefixtures("quiet_torch_onnx"),
    # torch.onnx's own
    pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated"),
    pytest.mark.filterwarnings("ignore:# The axis name. batch will not be used, since"),
    pytest.mark.filterwarnings("ignore:# The axis name. length will not be used, since"),
]
WIDTH, HEADS = 16, 2
BATCH, LENGTH, MEMORY = (torch.export.Dim(name) for name in ("batch", "length", "memory"))
EXPRESSED = [case for case in [*CASES, *TERMS, *COMPOSED] if can_express(case)][::3]  # all take 20 s


def agree(model: nn.Module, program: Any, args: Sequence[Any], atol: float = 2e-6) -> None:
    with torch.no_grad():
        want = model(*args)
    for found, wanted in zip(outputs_of(program, args), (want,) if isinstance(want, Tensor) else want, strict=True):
        np.testing.assert_allclose(found, wanted.numpy(), atol=atol, rtol=1e-5)


class Calls(nn.Module):
    """A call of `rel_attention` for each case, with the tensors of all, one after another."""

    def __init__(self, cases: Sequence[Case]) -> None:
        super().__init__()
        made = [detached(make_inputs(case, torch.float32)) for case in cases]
        self.given = [{name: x for name, x in case.items() if not isinstance(x, Tensor)} for case in made]
        self.tensors = [{name: x.contiguous() for name, x in case.items() if isinstance(x, Tensor)} for case in made]

    def args(self) -> list[Tensor]:
        return [x for tensors in self.tensors for x in tensors.values()]

    def forward(self, *args: Tensor) -> list[Tensor]:
        rest = iter(args)
        return [
            rel_attention(**as_call(given | {name: next(rest) for name in tensors}), backend="native")
            for given, tensors in zip(self.given, self.tensors, strict=True)
        ]


def test_inputs_and_attributes() -> None:
    """The same bits, in one graph of constant sizes."""
    model = Calls(EXPRESSED)
    program = export(model, model.args())
    assert len(nodes_of(program)) == len(EXPRESSED)
    for case, found, want in zip(EXPRESSED, outputs_of(program, model.args()), model(*model.args()), strict=True):
        np.testing.assert_array_equal(found, want.numpy(), err_msg=str(case))


class Layers(nn.Module):
    """Layers that read one segment and one memory, but for those that have none."""

    def __init__(self) -> None:
        super().__init__()
        options: list[dict[str, Any]] = [
            {}, {"n_kv_head": 1, "clamp_len": 6, "window": 5}, {"causal": False}, {"causal": False, "window": (4, 2)},
            {"causal": False, "chunk": (4, 1)},
        ]  # fmt: skip
        layers: list[nn.Module] = [RelAttention(WIDTH, HEADS, **given) for given in options]
        self.layers = nn.ModuleList(
            [*layers, LearnedRelativeAttention(WIDTH, HEADS, extent=9, qk_norm=True, sink=True)]
        )
        for p in self.parameters():
            nn.init.normal_(p, 0.0, 0.3)

    def forward(self, x: Tensor, memory: Tensor, end: Tensor) -> list[Tensor]:
        return [layer(x, memory, end=end) for layer in self.layers] + [layer(x) for layer in self.layers[2:4]]


def test_layers_of_any_batch_length_and_memory() -> None:
    torch.manual_seed(0)
    model = Layers().eval()

    def args_of(batch: int, length: int, memory_len: int) -> tuple[Tensor, ...]:
        x = torch.randn(batch, memory_len + length, WIDTH)
        end = torch.randint(memory_len + 1, memory_len + length + 1, (batch, 1), dtype=torch.int32)
        return x[:, memory_len:].clone(), x[:, :memory_len].clone(), end

    shapes = ({0: BATCH, 1: LENGTH}, {0: BATCH, 1: MEMORY}, {0: BATCH})
    program = export(model, args_of(2, 12, 7), shapes)
    assert len(nodes_of(program)) == 8
    assert dict(program.model.opset_imports)["txl"] == 1
    assert not any("zero_row" in node.attributes for node in nodes_of(program) if node.attributes["causal"].value == 0)
    for sizes in ((2, 12, 7), (1, 1, 3), (3, 40, 20), (2, 5, 1)):
        agree(model, program, args_of(*sizes))


def test_output_shape_has_the_names_of_the_inputs_axes() -> None:
    class Plain(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor, r: Tensor) -> Tensor:
            return rel_attention(q, k, v, r)

    q, k, v = torch.randn(3, 2, HEADS, 12, 8)
    axes = {0: BATCH, 2: LENGTH}
    program = export(Plain(), (q, k, v, torch.randn(HEADS, 100, 8)), (axes, axes, axes, None))
    [out] = session_of(program.model_proto).get_outputs()
    assert out.shape == ["batch", HEADS, "length", 8]
    [node] = nodes_of(program)
    assert {name: x.value for name, x in node.attributes.items()} == {"causal": 1, "zero_row": 0}
    assert (node.domain, len(node.inputs)) == ("txl", 4)


def test_graph_cuts_a_table_whose_sizes_torch_onnx_does_not_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    TRACED.replace(monkeypatch, lambda value: None)
    model = RelAttention(WIDTH, HEADS, causal=False).eval()
    program = export(model, (torch.randn(2, 12, WIDTH),), ({0: BATCH, 1: LENGTH},))
    assert nodes_of(program, "Pad")
    agree(model, program, (torch.randn(3, 20, WIDTH),))


class Table(nn.Module):
    """A call whose table has a row of distance 0 that depends on the length in another way."""

    def __init__(self, before: int, rows: tuple[int, int], **settings: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.before, self.rows, self.settings = before, rows, settings
        self.r, self.bias = torch.randn(HEADS, 200, 8), torch.randn(HEADS, 200)

    def forward(self, q: Tensor, k_mem: Tensor) -> Tensor:
        length, memory_len = q.size(2), k_mem.size(2)
        rows = self.rows[0] * length + self.rows[1] * memory_len + self.before
        return rel_attention(
            q, q, q, self.r[:, :rows], memory=(k_mem, k_mem), zero_row=length - 1 + self.before, r_bias=self.bias[:, :rows],
            **self.settings,
        )  # fmt: skip


def queries(batch: int, length: int, memory_len: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(length)
    x = torch.randn(batch, HEADS, memory_len + length, 8, generator=generator)
    return x[:, :, memory_len:].contiguous(), x[:, :, :memory_len].contiguous()


AXES = ({0: BATCH, 2: LENGTH}, {0: BATCH, 2: MEMORY})
SIZES = ((2, 12, 7), (1, 2, 3), (3, 40, 20))
BOTH: dict[str, Any] = {"causal": False}


@pytest.mark.parametrize(
    "model",
    [Table(3, (2, 1), **BOTH), Table(2, (2, 1)), Table(2, (2, 1), window=(4, 3), **BOTH),
     Table(-1, (1, 0), outside="zero", **BOTH), Table(0, (1, 1), window=(0, None), **BOTH),
     Table(0, (1, 0), window=(4, 3), outside="zero", **BOTH), Table(0, (1, 0), outside="clamp", **BOTH),
     Table(0, (2, 0), outside="zero", window=5)],
    ids=lambda model: f"{model.before}, {model.rows}, {model.settings}",
)  # fmt: skip
def test_table_whose_row_of_distance_0_depends_on_the_length(model: Table) -> None:
    """The graph cuts it, because the operator's row is a constant."""
    program = export(model, queries(*SIZES[0]), AXES)
    for sizes in SIZES:
        agree(model, program, queries(*sizes))


def test_table_without_a_row_that_is_seen_is_refused_when_the_graph_runs() -> None:
    model = Table(0, (1, 1), **BOTH)  # as many rows as the example needs, and no more
    model.rows = (0, 0)
    model.r = model.r[:, : 2 * 12 - 1 + 7]
    for settings in (BOTH, BOTH | {"window": (20, 20)}):
        model.settings = settings
        program = export(_Whole(model), queries(*SIZES[0]), AXES)
        agree(_Whole(model), program, queries(*SIZES[0]))
        with pytest.raises(Exception, match=r"zero_row must be given|T must be enough"):
            outputs_of(program, queries(2, 30, 7))


class _Whole(nn.Module):
    """The call of a `Table` with all rows of r."""

    def __init__(self, table: Table) -> None:
        super().__init__()
        self.r, self.settings = table.r, table.settings

    def forward(self, q: Tensor, k_mem: Tensor) -> Tensor:
        return rel_attention(q, q, q, self.r, memory=(k_mem, k_mem), zero_row=q.size(2) - 1, **self.settings)


class Call(nn.Module):
    """A call with settings of `rel_attention`."""

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self.settings = settings

    def forward(self, q: Tensor, r: Tensor) -> Any:
        return rel_attention(q, q, q, r, **self.settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"dropout_p": 0.5}, "dropout_p must be 0 for txl::RelAttention, got 0.5: call model.eval() before the export"),
     ({"return_lse": True}, "return_lse must be False for txl::RelAttention"),
     ({"prefix": 2, "window": 3}, "return_lse must be False for txl::RelAttention"),
     ({"scale": 0.0}, "scale must not be 0 in float32 for txl::RelAttention"),
     ({"position_scale": 1e-60}, "position_scale must not be 0 in float32 for txl::RelAttention"),
     ({"dtype": torch.bfloat16}, "q must be float32 for txl::RelAttention, as all tensors but bounds, got BFLOAT16")],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)  # fmt: skip
def test_what_the_operator_does_not_have_is_refused(settings: dict[str, Any], message: str) -> None:
    dtype = settings.get("dtype", torch.float32)
    model = Call(**{name: x for name, x in settings.items() if name != "dtype"}, backend="native")
    with pytest.raises(Exception, match=re.escape(message)):
        export(model, (torch.randn(1, HEADS, 6, 8, dtype=dtype), torch.randn(HEADS, 20, 8, dtype=dtype)))


def test_settings_that_depend_on_a_size_are_refused() -> None:
    class Half(nn.Module):
        def forward(self, q: Tensor, r: Tensor) -> Tensor:
            return rel_attention(q, q, q, r, window=(q.size(2) // 2, None))

    with pytest.raises(Exception, match="left must be a constant for txl::RelAttention, got a value that depends"):
        export(Half(), (torch.randn(1, HEADS, 6, 8), torch.randn(HEADS, 20, 8)), ({2: LENGTH}, None))


def test_prefix_of_a_causal_call_and_a_table_for_each_batch_row() -> None:
    """Both are plain calls: the operator expresses them."""
    q, r = torch.randn(3, HEADS, 6, 8), torch.randn(3, HEADS, 20, 8)
    program = export(model := Call(prefix=4, zero_row=8), (q, r))
    agree(model, program, (q, r))
    assert len(nodes_of(program)) == 3


class Masked(nn.Module):
    """A call with the keys that a mask, bool [B, L, S], shows or hides."""

    def __init__(self, visible: bool, check: bool) -> None:
        super().__init__()
        self.given = {"visible": visible, "check": check}
        self.r = torch.randn(HEADS, 200, 8)

    def forward(self, q: Tensor, mask: Tensor) -> Tensor:
        start, end = intervals(mask, **self.given)
        return rel_attention(q, q, q, self.r, causal=False, start=start, end=end, zero_row=q.size(2) - 1)


@pytest.mark.parametrize("visible", [True, False])
def test_masks(visible: bool) -> None:
    """A mask with holes stops the graph, unless the model does not check it."""
    shapes = ({0: BATCH, 2: LENGTH}, {0: BATCH, 1: LENGTH, 2: LENGTH})

    def args_of(batch: int, length: int, holes: bool = False) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(length)
        first, last = torch.randint(0, length + 1, (2, batch, length, 1), generator=generator)
        at = torch.arange(length)
        seen = (at >= first) & (at < last)
        if holes:
            seen[-1, -1] = at % 2 == 0
        return torch.randn(batch, HEADS, length, 8, generator=generator), seen == visible

    for check in (True, False) if visible else (True,):
        model = Masked(visible, check)
        program = export(model, args_of(2, 12), shapes)
        for sizes in ((2, 12), (1, 1), (3, 40)):
            agree(model, program, args_of(*sizes))
        if check:
            with pytest.raises(Exception, match=r"start must hold key indices in \[0, M \+ L\] = \[0, 7\], got -1"):
                outputs_of(program, args_of(2, 7, holes=True))
        else:
            agree(model, program, args_of(2, 7, holes=True))


def test_a_hole_of_a_mask_whose_end_alone_is_used() -> None:
    class End(nn.Module):
        def forward(self, q: Tensor, r: Tensor, mask: Tensor) -> Tensor:
            return rel_attention(q, q, q, r, end=intervals(mask, visible=True)[1])

    args = torch.randn(1, HEADS, 6, 8), torch.randn(HEADS, 20, 8), torch.arange(6)[None] < 4
    program = export(End(), args)
    agree(End(), program, args)
    args[2][0, 1] = False
    with pytest.raises(Exception, match=r"end must hold key indices in \[0, M \+ L\] = \[0, 6\], got -1"):
        outputs_of(program, args)


def test_program_of_torch_export() -> None:
    """It can be given in place of a model. Without torch.onnx's optimizer."""
    model = RelAttention(WIDTH, HEADS, causal=False).eval()
    shapes = ({0: BATCH, 1: LENGTH},)
    program = torch.export.export(model, (torch.randn(2, 12, WIDTH),), dynamic_shapes=shapes)
    agree(model, export(program, (), optimize=False), (torch.randn(3, 20, WIDTH),))


def test_example_of_the_documentation() -> None:
    _, code, _ = re.findall(r"```py\n(.*?)```", (ROOT / "docs" / "how-to" / "onnx.md").read_text(), flags=re.DOTALL)
    exec(compile(code, "onnx.md", "exec"), {})
