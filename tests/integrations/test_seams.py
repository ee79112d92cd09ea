"""What wraps a part of an attention module acts on it accelerated as it does on the original:
adapters, hooks, parametrizations, quantization, offload and sharding of every linear layer and
embedding in it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from layer_helpers import both, compare
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune

from implementations.peer_cases import PeerCase, make
from txl_kernels.integrations import Accelerated, accelerate, restore

pytestmark = [
    pytest.mark.peers,
    pytest.mark.usefixtures("one_process"),
    pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile"),
    pytest.mark.filterwarnings("ignore:.*torch.ao.quantization is deprecated"),
    pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor, torch.quantize_per_channel"),
    pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated"),
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view"),
]
ONE_EACH = (
    "wav2vec2-conformer",
    "w2v-bert relative_key",
    "parakeet",
    "fastspeech2",
    "nemo",
    "nemo local",
    "nemo transformer",
    "granite",
    "granite 5",
    "gemma",
    "gemma 4",
    "t5",
    "t5 decoder",
    "umt5",
    "longt5 local",
    "mpnet",
    "speechbrain beats",
    "enformer",
    "cosyvoice",
    "fireredasr",
    "espnet",
    "espnet legacy",
    "espnet transducer",
    "speechbrain",
    "ding",
    "rllib",
)  # of each adapter; XLNet has no layers in it, WavLM's are not called: test_shared_bias.py
UNMASKED = ("ding", "rllib", "enformer", "granite", "granite plus", "nemo transformer")
NO_GRADIENTS = ("nemo transformer",)  # of the original, on a CPU


def parts(module: nn.Module) -> list[str]:
    """Names of layers, but those of T5's feed-forward part, whose weights the original reads."""
    return [
        name
        for name, m in module.named_modules()
        if isinstance(m, (nn.Linear, nn.Embedding)) and "DenseReluDense" not in name
    ]


class Halved(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x / 2


def lora(module: nn.Module) -> None:
    from peft import LoraConfig, inject_adapter_in_model

    if names := parts(module):
        inject_adapter_in_model(LoraConfig(r=4, target_modules=names, init_lora_weights=False), module)


def hooks(module: nn.Module) -> None:
    for name in parts(module):
        module.get_submodule(name).register_forward_hook(lambda m, given, out: out * 1.5)


def parametrizations(module: nn.Module) -> None:
    """New and old ways in turns, the parameters no longer those of the weight that they make."""
    for n, name in enumerate(parts(module)):
        layer: Any = module.get_submodule(name)
        if n % 5 == 0:
            parametrize.register_parametrization(layer, "weight", Halved())
        elif n % 5 == 1:
            torch.nn.utils.parametrizations.weight_norm(layer)
            layer.parametrizations.weight.original0.data.mul_(1.5)
        elif n % 5 == 2:
            torch.nn.utils.weight_norm(layer)
            layer.weight_g.data.mul_(1.5)
        elif n % 5 == 3:
            prune.l1_unstructured(layer, "weight", 0.4)
        else:
            torch.nn.utils.parametrizations.spectral_norm(layer)


def torchao(module: nn.Module) -> None:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    quantize_(module, Int8WeightOnlyConfig())


def dynamic(module: nn.Module) -> None:
    torch.ao.quantization.quantize_dynamic(module, {nn.Linear}, inplace=True)


def sharded(module: nn.Module) -> None:
    from torch.distributed.fsdp import fully_shard

    for name in parts(module):
        fully_shard(module.get_submodule(name))


SEAMS: dict[str, Callable[[nn.Module], None]] = {
    f.__name__: f for f in (lora, hooks, parametrizations, torchao, dynamic, sharded)
}
READING = "speechbrain beats"  # reads the device of its table's weight


def on_the_cpu(module: nn.Module, folder: Path) -> None:
    from accelerate import cpu_offload

    cpu_offload(module, execution_device=torch.device("cpu"), offload_buffers=True)


def dispatched(module: nn.Module, folder: Path) -> None:
    from accelerate import dispatch_model

    holder = nn.ModuleDict({"attention": module, "other": nn.Linear(2, 2)})
    dispatch_model(
        holder, {"attention": "disk", "other": "cpu"}, main_device="cpu", offload_dir=folder, force_hooks=True
    )


OFFLOADS = {f.__name__: f for f in (on_the_cpu, dispatched)}


def case_of(name: str) -> PeerCase:
    case = make(name, "none" if name in UNMASKED else "right")
    case.module.eval()
    return case


@pytest.mark.parametrize("seam", SEAMS)
@pytest.mark.parametrize("name", ONE_EACH)
def test_wrapped_parts(name: str, seam: str) -> None:
    """Accelerated afterwards or before, the same as the original wrapped so."""
    if (name, seam) == ("enformer", "dynamic"):
        pytest.skip("the original reads its layer's weight")
    tolerance = 1e-2 if seam == "dynamic" else 2e-4  # which rounds what it is given to bytes
    gradients = name not in NO_GRADIENTS and seam != "dynamic"
    theirs, after, before = (case_of(name) for _ in range(3))
    accelerate(before.module, strict=True, weights="none")
    plain = both(before, gradients=False)["out"]
    for case in (theirs, after, before):
        torch.manual_seed(3)
        SEAMS[seam](case.module)
    report = accelerate(after.module, strict=True, weights="none")
    want = both(theirs, gradients=gradients, random=False)
    assert seam == "sharded" or not torch.allclose(plain, want["out"], rtol=1e-2)
    compare(both(after, gradients=gradients, random=False), want, tolerance)
    compare(both(before, gradients=False), {"out": want["out"]}, tolerance)
    assert not report.fallbacks, str(report)
    assert restore(after.module) > 0
    compare(both(after, gradients=False), {"out": want["out"]}, tolerance)


@pytest.mark.parametrize("offload", OFFLOADS)
@pytest.mark.parametrize("name", [*(name for name in ONE_EACH if name != READING), "xlnet"])
def test_offload(name: str, offload: str, tmp_path: Path) -> None:
    """Parameters are nowhere until their module is called; accelerate's hooks hold the bound
    forward that they found."""
    from accelerate.hooks import remove_hook_from_module

    first, last = case_of(name), case_of(name)
    want = both(first, gradients=False)
    report = accelerate(first.module, strict=True, weights="none")
    for case in (first, last):
        OFFLOADS[offload](case.module, tmp_path / str(case is first))
    found = [both(first, gradients=False)]
    later = accelerate(last.module, strict=True, weights="none")
    found += [both(last, gradients=False)]
    assert not report.fallbacks
    assert not later.fallbacks
    for case in (first, last):
        assert restore(case.module) == len(report.accelerated)
        found += [both(case, gradients=False)]
        remove_hook_from_module(case.module, recurse=True)
    for each in found:
        compare(each, want)


@pytest.mark.parametrize("name", ["nemo", "gemma", "xlnet", "t5"])
def test_offload_ends_before_the_kernels_do(name: str) -> None:
    """The bound forward that accelerate's hooks leave is the class' own: the kernels answer, before
    and after another call of `accelerate`, and it goes with `restore`."""
    from accelerate import cpu_offload
    from accelerate.hooks import remove_hook_from_module

    case, later = case_of(name), case_of(name)
    want = both(case, gradients=False)
    report = accelerate(case.module, strict=True)
    for it in (case, later):
        cpu_offload(it.module, execution_device=torch.device("cpu"))
        remove_hook_from_module(it.module, recurse=True)
    compare(both(case, gradients=False), want)
    assert not report.fallbacks
    report = accelerate(later.module, strict=True)
    compare(both(later, gradients=False), want)
    assert not report.fallbacks
    for it in (case, later):
        for module in it.module.modules():
            if isinstance(module, Accelerated):
                restore(module)
                assert "forward" not in vars(module)
        compare(both(it, gradients=False), want)


def test_restore_refuses_a_forward_replaced_since() -> None:
    case = case_of("nemo")
    accelerate(case.module, strict=True)
    inner = case.module.forward
    case.module.forward = lambda *args: inner(*args)  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="the model has a forward of the instance's, replaced since"):
        restore(case.module)
    del case.module.forward
    assert restore(case.module) == 1


def test_sharding_reads_no_weights() -> None:
    """FSDP's own hooks are no reason for the original of a class that stores its weights."""
    from torch.distributed.fsdp import fully_shard

    case = case_of("espnet")
    want = both(case, gradients=False)
    report = accelerate(case.module, strict=True)
    fully_shard(case.module)
    compare(both(case, gradients=False), want)
    assert not report.fallbacks
