"""The cases of all libraries' layers (`peer_cases`) and of Inkling's models as tests use them:
names, outputs and gradients, comparisons."""

import contextlib
import importlib.util
import inspect
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import inkling_models
import torch
from torch import Tensor, nn

from implementations import bare_peers
from implementations.peer_cases import MAKERS, STACKS, PeerCase, Sizes, make
from txl_kernels.integrations import Report, accelerate

ALONE = tuple(name for name in MAKERS if name not in STACKS)  # single attention modules
ALL = (*MAKERS, *inkling_models.NAMES)
# A case for each adapter that calls parts of its module: XLNet's has none, WavLM's are not called.
EACH_ADAPTER = (
    "wav2vec2-conformer", "w2v-bert relative_key", "parakeet", "fastspeech2", "nemo", "nemo local", "nemo transformer",
    "granite", "granite 5", "gemma", "gemma 4", "t5", "t5 decoder", "umt5", "longt5 local", "mpnet", "mpt",
    "speecht5", "speechbrain beats", "enformer", "cosyvoice", "fireredasr", "espnet", "espnet legacy",
    "espnet transducer", "speechbrain", "ding", "rllib", "zipformer",
)  # fmt: skip
WITHOUT_MASKS = ("ding", "rllib", "enformer", "granite", "granite plus", "nemo transformer")
NO_GRADIENTS = ("nemo transformer",)  # its original's FlexAttention has none on a CPU
ZIPFORMERS = {
    "zipformer": bare_peers.zipformer,
    "zipenhancer": bare_peers.zipenhancer,
    "modelscope zipenhancer": bare_peers.modelscope,
}


def case_of(
    name: str, masks: str = "", dropout: float = 0.0, sizes: Sizes | None = None, **options: object
) -> PeerCase:
    """Return a case in evaluation mode. masks: of `make`; by default padding on the right, if the
    layer supports it."""
    if name in inkling_models.NAMES:
        return inkling_models.case_of(name)
    case = make(name, masks or ("none" if name in WITHOUT_MASKS else "right"), dropout, sizes, **options)
    case.module.eval()
    return case


def both(
    case: PeerCase,
    module: nn.Module | None = None,
    dtype: torch.dtype = torch.float32,
    gradients: bool = True,
    random: bool = True,
) -> dict[str, Tensor]:
    """Return the output where it is valid, and the gradients of the input and of all parameters of
    a fixed functional of it.

    module: replaces the case's module. random: whether the functional's weights are random; else
    they are the same for all frames.
    """
    module = case.module if module is None else module
    torch.manual_seed(5)  # dropout
    x = case.x.to(dtype, copy=True).requires_grad_(gradients)
    with torch.set_grad_enabled(gradients):
        out = case.call(module, x)
    found = {"out": out.detach()[case.valid]}
    if gradients:
        weight = torch.linspace(-1, 1, out.size(-1))
        if random:
            weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
        module.zero_grad()
        (out * weight * case.valid.unsqueeze(-1)).sum().backward()
        named = {"x": x, **dict(module.named_parameters())}
        found |= {n: p.grad for n, p in named.items() if p.grad is not None}
    return {n: getattr(g, "full_tensor", lambda g=g: g)() for n, g in found.items()}


def compare(found: Any, want: Any, tolerance: float = 2e-4) -> None:
    """Compare tensors, lists or dictionaries of them, relative to the largest value of each tensor,
    or of all tensors if it is zero but for rounding, as the gradient of a bias of keys."""
    found, want = ({"output": x} if isinstance(x, Tensor) else x for x in (found, want))
    found, want = (x if isinstance(x, dict) else dict(enumerate(x)) for x in (found, want))
    assert found.keys() == want.keys()
    largest = max(float(x.abs().max()) for x in want.values())
    for name, x in want.items():
        assert found[name].shape == x.shape, name
        scale = max(float(x.abs().max()), 1e-3 * largest)
        assert float((found[name] - x).abs().max()) <= tolerance * scale, name


def compare_seeds(ours: PeerCase, theirs: PeerCase) -> None:
    """Compare outputs and gradients of two cases with 30 seeds of `random`, and what they draw."""
    for seed in range(30):
        found, states = [], []
        for case in (theirs, ours):
            random.seed(seed)
            found.append(both(case))
            states.append(random.getstate())
        compare(found[1], found[0])
        assert states[0] == states[1]


def check(
    module: nn.Module, run: Callable[[], Any], fallbacks: dict[str, int] | None = None, tolerance: float = 2e-4,
    change: Callable[[Any], object] = lambda module: None, **options: Any,
) -> Report:  # fmt: skip
    """Accelerate a module, check that run() gives what it gave before, and how many calls the
    original answered by reason, and return the report.

    change: applied to the accelerated module. options: of `accelerate`.
    """
    want = run()
    report = accelerate(module, **{"strict": True} | options)
    change(module)
    compare(run(), want, tolerance)
    assert report.fallbacks == (fallbacks or {})
    return report


def in_float64(name: str) -> contextlib.AbstractContextManager[Any]:
    """Return a context in which originals compute in float64: SpeechBrain and Gemma 3n have a
    softmax in float32, Zipformer its gradient, Gemma 4 all of its attention. FlexAttention refuses
    gradients on a CPU, which its plain code has."""
    if name in ZIPFORMERS:
        return mock.patch.object(ZIPFORMERS[name](), "softmax", torch.softmax)
    if name == "nemo transformer":
        return mock.patch("torch.nn.attention.flex_attention._validate_device")
    if name not in ("speechbrain", "gemma", "gemma 4"):
        return contextlib.nullcontext()
    softmax, patches = torch.nn.functional.softmax, contextlib.ExitStack()
    patches.enter_context(mock.patch("torch.nn.functional.softmax", lambda x, dim, dtype: softmax(x, dim)))
    if name == "gemma 4":
        patches.enter_context(mock.patch("torch.Tensor.float", lambda x: x))
    return patches


def vendored(original: type, folder: Path, change: Callable[[str], str]) -> Any:
    """Return a copy of a class in another package, with changed source."""
    beside = sys.modules[original.__module__]
    source = change(inspect.getsource(beside)).replace("Path(__file__)", f"Path({beside.__file__!r})")
    (folder / "mine.py").write_text(source)
    name = f"{beside.__package__}.mine"  # beside it, for relative imports
    spec = importlib.util.spec_from_file_location(name, folder / "mine.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return getattr(module, original.__name__)
