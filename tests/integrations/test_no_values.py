"""Tensors whose values cannot be read: those that torch.func.vmap maps over, those on "meta", and
fake ones."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from inkling_models import LEFT, TOKENS, model_of
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call, grad, stack_module_state, vmap

from txl_kernels.integrations import accelerate

pytestmark = pytest.mark.peers
SMALL = {"vocab_size": 40, "initializer_range": 0.3}
FRAMES = torch.randn(2, 96, 16, generator=torch.Generator().manual_seed(2))
FRAME_MASK = torch.ones(2, 96, dtype=torch.long)
FRAME_MASK[1, 64:] = 0
SIZES: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}


def xlnet(seed: int = 0) -> Any:
    import transformers

    torch.manual_seed(seed)
    config = transformers.XLNetConfig(d_model=32, n_layer=2, n_head=4, d_inner=48, **SMALL)
    return transformers.XLNetLMHeadModel(config).eval()


def parakeet() -> Any:
    import transformers

    torch.manual_seed(0)
    config = SIZES | {
        "num_mel_bins": 16,
        "subsampling_conv_channels": 8,
        "conv_kernel_size": 5,
        "initializer_range": 0.3,
    }
    return transformers.ParakeetForCTC(
        transformers.ParakeetCTCConfig(vocab_size=20, encoder_config=config, pad_token_id=0)
    ).eval()


def t5() -> Any:
    import transformers

    config = transformers.T5Config(d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, **SMALL)
    return transformers.T5EncoderModel(config).eval()


def bert() -> Any:
    import transformers

    config = transformers.Wav2Vec2BertConfig(feature_projection_input_dim=16, **SIZES)
    return transformers.Wav2Vec2BertModel(config).eval()


TOKENS_OF = ("input_ids", TOKENS, LEFT)
FRAMES_OF = ("input_features", FRAMES, FRAME_MASK)
MODELS: dict[str, tuple[Callable[[], Any], tuple[str, Tensor, Tensor]]] = {
    "xlnet": (xlnet, TOKENS_OF),
    "parakeet": (parakeet, FRAMES_OF),
    "t5": (t5, TOKENS_OF),
    "w2v-bert": (bert, FRAMES_OF),
    "inkling": (lambda: model_of("Inkling", mlp_layer_types=["dense"] * 4), TOKENS_OF),  # experts read values
}


@pytest.mark.parametrize("masked", [False, True])
def test_an_ensemble_of_stacked_parameters(masked: bool) -> None:
    models = [xlnet(0), xlnet(1)]
    given = {"attention_mask": LEFT} if masked else {}
    with torch.no_grad():
        want = torch.stack([m(TOKENS, **given).logits for m in models])
    reports = [accelerate(m, strict=True) for m in models]
    parameters, buffers = stack_module_state(models)
    with torch.no_grad():
        found = vmap(lambda p, b: functional_call(models[0], (p, b), (TOKENS,), given).logits)(parameters, buffers)
    torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-4)
    assert not reports[0].fallbacks


def test_gradients_of_each_sample() -> None:
    """With a mask for each; those of one call for each sample, by the original."""

    def of_samples(model: Any) -> tuple[dict[str, Tensor], list[dict[str, Tensor]]]:
        parameters = {name: p.detach() for name, p in model.named_parameters()}

        def loss(p: dict[str, Tensor], x: Tensor, mask: Tensor) -> Tensor:
            named = {"input_features": x[None], "attention_mask": mask[None]}
            logits: Tensor = functional_call(model, p, (), named).logits
            return logits[:, :8].square().sum()

        together: dict[str, Tensor] = vmap(grad(loss), (None, 0, 0))(parameters, FRAMES, FRAME_MASK)
        return together, [grad(loss)(parameters, FRAMES[n], FRAME_MASK[n]) for n in range(2)]

    model = parakeet()
    _, want = of_samples(model)
    report = accelerate(model, strict=True)
    found, _ = of_samples(model)
    assert report.fallbacks == {"a mask that torch.func.vmap maps over": 2}
    largest = max(float(g.abs().max()) for g in want[0].values())
    for name in found:
        for n in range(2):
            assert float((found[name][n] - want[n][name]).abs().max()) < 1e-5 * largest, name


@pytest.mark.parametrize("masked", [False, True], ids=["no mask", "a mask"])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("where", ["meta", "fake"])
def test_shapes_without_values(where: str, name: str, masked: bool) -> None:
    """On "meta" by the original, of fake tensors by the operator's fake kernel."""
    make, (argument, x, mask) = MODELS[name]

    def output(accelerated: bool) -> tuple[Tensor, dict[str, int]]:
        fallbacks: dict[str, int] = {}
        mode: Any = torch.device("meta")
        if where == "meta":
            with mode:
                model = make()
        else:
            model, mode = make(), FakeTensorMode(allow_non_fake_inputs=True)
        report = accelerate(model, strict=True) if accelerated else None
        device = "meta" if where == "meta" else "cpu"
        with mode, torch.no_grad():
            given = {argument: x.to(device)} | ({"attention_mask": mask.to(device)} if masked else {})
            found = model(**given)[0]
        if report is not None:
            fallbacks = report.fallbacks
        return found, fallbacks

    try:
        want, _ = output(False)
    except RuntimeError as error:
        pytest.skip(f"the original reads values: {error}")
    found, fallbacks = output(True)
    assert (found.shape, found.dtype, found.device) == (want.shape, want.dtype, want.device)
    assert bool(fallbacks) == (where == "meta")
