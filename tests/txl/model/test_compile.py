"""torch.compile around the model: no graph breaks, operators in the graphs, few graphs, the same
values; torch.jit.trace."""

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from model_helpers import small_config, small_model
from torch import Tensor
from torch._dynamo import config as dynamo
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch._functorch.aot_autograd import make_boxed_func

from txl import TransformerXL
from txl.evaluation.evaluate import sliding_losses
from txl.training.segments import SegmentTraining

OPERATOR, BACKWARD = "txl_kernels.rel_attention.default", "txl_kernels.rel_attention_backward.default"
BINS: dict[str, Any] = {"cutoffs": (10, 20)}
WHOLE: dict[str, Any] = BINS | {"div_val": 2, "n_layer": 2, "untie_r": True, "pre_norm": True, "final_norm": True}
BANDED: dict[str, Any] = {"window": 9, "clamp_len": 4, "second_target": True}
MORE: list[dict[str, Any]] = [
    {"n_layer": 2},
    BINS | {"div_val": 2},
    {"encoding": "shaw", "table_len": 5},
    {"encoding": "shaw-released", "table_len": 5},
    {"encoding": "sinusoid"},
    {"encoding": "learned", "table_len": 6},
    BINS,
]
SLOW, NIGHTLY = pytest.mark.slow, pytest.mark.nightly
# Dynamo asks every tensor for its gradient, and means to ignore what torch says to that.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")


class Graphs:
    """A backend that runs what it is given and keeps a count of the operators of each graph,
    forward and backward."""

    def __init__(self) -> None:
        self.operators: list[Counter[str]] = []
        self.backend = aot_autograd(fw_compiler=self._keep, bw_compiler=self._keep)

    def _keep(self, graph: torch.fx.GraphModule, inputs: Any) -> Any:
        self.operators.append(Counter(str(node.target) for node in graph.graph.nodes if node.op == "call_function"))
        return make_boxed_func(graph.forward)


@pytest.fixture
def graphs() -> Iterator[Graphs]:
    """A backend; more recompilations than torch's limit raise."""
    torch.compiler.reset()
    counters.clear()
    with dynamo.patch(fail_on_cache_limit_hit=True):
        yield Graphs()
    torch.compiler.reset()


def model(**options: Any) -> TransformerXL:
    torch.manual_seed(0)
    made = TransformerXL(small_config(**({"n_layer": 1} | options))).train()
    for p in made.parameters():
        torch.nn.init.normal_(p, 0.0, 0.3)
    return made


def segments(lengths: list[int]) -> list[Tensor]:
    """Return tokens and targets of segments, [2, 2, L] each."""
    return [torch.randint(31, (2, 2, length)) for length in lengths]


def step(network: TransformerXL, tokens: Tensor, targets: Tensor, memory: Any) -> tuple[Tensor, Any]:
    """Compute the loss of a segment as training does."""
    loss = SegmentTraining(network)(tokens, targets, memory)
    return loss.total, loss.memory


def trained(
    network: TransformerXL, parts: list[Tensor], run: Callable[..., Any] = step, memory: Any = None
) -> list[Tensor]:
    """Return the losses of the segments and the gradients of their sum."""
    losses = []
    for tokens, targets in parts:
        loss, memory = run(network, tokens, targets, memory)
        losses.append(loss)
    network.zero_grad()
    torch.stack(losses).sum().backward()
    return [*losses, *(p.grad for p in network.parameters() if p.grad is not None)]


@pytest.mark.parametrize(
    "options",
    [pytest.param(x, marks=SLOW) for x in ({}, WHOLE, BANDED)] + [pytest.param(x, marks=NIGHTLY) for x in MORE],
    ids=str,
)
def test_segment_is_one_graph(options: dict[str, Any], graphs: Graphs) -> None:
    """Forward with memory, softmax and loss, with any number of rows in a bin."""
    network, (before, part) = model(**options), segments([6, 6])
    _, memory = step(network, *before, None)
    want = trained(network, [part], step, memory)
    whole = torch.compile(step, fullgraph=True, dynamic=True, backend=graphs.backend)
    for a, b in zip(trained(network, [part], whole, memory), want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    assert counters["stats"]["unique_graphs"] == 1
    layers = 0 if network.config.absolute else network.config.n_layer
    forward, backward = graphs.operators
    assert (forward[OPERATOR], backward[BACKWARD]) == (layers, layers)


@SLOW
@pytest.mark.parametrize("change", ["none", pytest.param("untied", marks=NIGHTLY), "recomputed", "autocast"])
def test_layers_share_three_graphs(change: str, graphs: Graphs) -> None:
    """`txl train --compile` has graphs without memory, with one as long as the segment, and with
    any other. In two epochs the memory grows, and the last segment is shorter."""
    network, parts = model(n_layer=6, mem_len=30, untie_r=change == "untied"), segments([6] * 7 + [4])
    seen = []
    for block in network.layers:
        block.recompute = change == "recomputed"
        block.compile(dynamic=True, fullgraph=True, backend=graphs.backend)
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16, enabled=change == "autocast"):
            trained(network, parts)
        seen.append(counters["stats"]["unique_graphs"])
    assert seen == [3, 3]
    assert not counters["graph_break"]
    assert sum(OPERATOR in found for found in graphs.operators) == (6 if change == "recomputed" else 3)
    assert sum(BACKWARD in found for found in graphs.operators) == 3


class WithExport(torch.nn.Module):
    """A model with a method for TorchScript, with which torch.jit.trace compiles the properties of
    all modules inside."""

    def __init__(self, network: torch.nn.Module) -> None:
        super().__init__()
        self.network = network

    @torch.jit.export
    def next(self, tokens: Tensor) -> Tensor:
        return tokens + 1

    def forward(self, tokens: Tensor) -> Tensor:
        scores: Tensor = self.network(tokens)[0]
        return scores


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:.*torch.jit.*is deprecated")
@pytest.mark.parametrize("options", [BINS | {"div_val": 2}, {"encoding": "shaw-released", "table_len": 5}])
def test_jit_trace_of_a_model_with_exported_methods(options: dict[str, Any]) -> None:
    network, tokens = small_model(**options), torch.randint(31, (1, 6))
    with torch.no_grad():
        traced = torch.jit.trace(WithExport(network), tokens)
        torch.testing.assert_close(traced(tokens), network(tokens)[0])


@SLOW
def test_evaluation_between_updates_stays_below_the_limit(graphs: Graphs) -> None:
    """Windows of a model without recurrence grow at the start of the split."""
    network, parts = model(encoding="sinusoid", mem_len=0), segments([16, 16])
    for block in network.layers:
        block.compile(dynamic=True, fullgraph=True, backend=graphs.backend)
    for _ in range(2):
        trained(network.train(), parts)
        for _ in sliding_losses(network, torch.randint(31, (90,)).numpy(), 0, 16, 3, 4):
            pass
    assert counters["stats"]["unique_graphs"] <= 6
