"""`txl train`: a model from a recipe and options, or a run that goes on."""

import math
from pathlib import Path
from typing import Annotated, Any

import typer

from txl import recipes
from txl.commands.header import header
from txl.commands.options import Device, in_panel, say
from txl.commands.processes import Devices, processes, start_processes
from txl.commands.runs import Options, new_run, run_to_go_on
from txl.commands.training import draw_loss, restated, run_training
from txl.errors import TxlError
from txl.model.config import ENCODINGS, ModelConfig
from txl.training.config import TrainConfig
from txl.training.timing import timed, with_precision
from txl.training.trainer import Trainer

_MODEL, _REGULAR, _SOFTMAX = "Model", "Regularisation", "Vocabulary"
_TRAINING, _OPTIMIZER, _KEEPING = "Training", "Optimizer", "Evaluation and checkpoints"


def _option(panel: str, text: str, *names: str, **kind: Any) -> Any:
    return in_panel(panel, *names, help=text, show_default=False, **kind)


def train(
    run: Annotated[Path, typer.Option("--run", "-r", help="Folder of the run: log, checkpoints, corpus.")],
    source: Annotated[
        Path | None,
        typer.Option("--data", help="A prepared corpus, a text file or a folder. Default: the standard library."),
    ] = None,
    recipe: Annotated[
        str | None, typer.Option(help=f"Model and training to start from (`txl recipes`); default {recipes.DEFAULT}.")
    ] = None,
    init: Annotated[
        Path | None,
        typer.Option(
            help="A checkpoint or run to begin with: its parameters, sizes and vocabulary. Options that change no size may "
            "differ; training is the recipe's.",
            show_default=False,
        ),
    ] = None,
    minutes: Annotated[
        float | None, typer.Option(help="Train about so long: sets --steps by a short trial.", show_default=False)
    ] = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Continue the run, bit for bit, with its options. --steps may be changed: the schedule is then that of "
            "the new number from here on.",
        ),
    ] = False,
    device: Device = "auto",
    devices: Devices = None,
    shard: Annotated[
        bool,
        typer.Option("--shard", help="Share parameters, gradients and optimizer state out over the processes (FSDP2)."),
    ] = False,
    tensorboard: Annotated[bool, typer.Option("--tensorboard", help="Also log for TensorBoard.")] = False,
    n_layer: Annotated[int | None, _option(_MODEL, "Layers.")] = None,
    d_model: Annotated[int | None, _option(_MODEL, "Width of the hidden states.")] = None,
    n_head: Annotated[int | None, _option(_MODEL, "Attention heads.")] = None,
    d_head: Annotated[int | None, _option(_MODEL, "Width of a head.")] = None,
    d_inner: Annotated[int | None, _option(_MODEL, "Width of the feed-forward net.")] = None,
    mem_len: Annotated[int | None, _option(_MODEL, "Tokens of memory; 0: no recurrence.")] = None,
    encoding: Annotated[str | None, _option(_MODEL, f"Of positions: {', '.join(ENCODINGS)}.")] = None,
    table_len: Annotated[int | None, _option(_MODEL, "Rows of a learned encoding.")] = None,
    window: Annotated[int | None, _option(_MODEL, "Keys a token sees, itself included; default: all.")] = None,
    clamp_len: Annotated[int | None, _option(_MODEL, "Largest distance told apart; default: no limit.")] = None,
    pre_norm: Annotated[bool | None, _option(_MODEL, "Where layer norms stand.", "--pre-norm/--post-norm")] = None,
    final_norm: Annotated[
        bool | None, _option(_MODEL, "A layer norm after the last layer.", "--final-norm/--no-final-norm")
    ] = None,
    untie_r: Annotated[bool | None, _option(_MODEL, "Biases u, v a layer, or shared.", "--untie-r/--tie-r")] = None,
    init_std: Annotated[float | None, _option(_MODEL, "Of the initial weights.")] = None,
    cutoffs: Annotated[
        str | None, _option(_SOFTMAX, "Bins of adaptive input and softmax, as 20000,40000; none: one bin.")
    ] = None,
    div_val: Annotated[int | None, _option(_SOFTMAX, "Each bin so many times narrower than the one before.")] = None,
    d_embed: Annotated[int | None, _option(_SOFTMAX, "Width of the first bin's embeddings.")] = None,
    tie_projs: Annotated[
        str | None, _option(_SOFTMAX, "Bins whose projections are shared, too: none, tail or all.")
    ] = None,
    tie_weight: Annotated[
        bool | None, _option(_SOFTMAX, "Whether softmax and input share tables.", "--tie-weight/--untie-weight")
    ] = None,
    dropout: Annotated[float | None, _option(_REGULAR, "Dropout.")] = None,
    attn_dropout: Annotated[float | None, _option(_REGULAR, "Dropout on attention weights.")] = None,
    word_dropout: Annotated[float | None, _option(_REGULAR, "Words dropped from the input, whole.")] = None,
    variational_dropout: Annotated[
        bool | None, _option(_REGULAR, "One mask a segment.", "--variational-dropout/--plain-dropout")
    ] = None,
    weight_decay: Annotated[float | None, _option(_REGULAR, "AdamW's, of the layers' matrices; 0 is Adam.")] = None,
    steps: Annotated[int | None, _option(_TRAINING, "Updates.")] = None,
    batch: Annotated[int | None, _option(_TRAINING, "Parallel streams of text.")] = None,
    batch_chunk: Annotated[int | None, _option(_TRAINING, "Parts the batch is computed in, to save memory.")] = None,
    tgt_len: Annotated[int | None, _option(_TRAINING, "Tokens of a segment.")] = None,
    ext_len: Annotated[int | None, _option(_TRAINING, "Tokens before it that are read again.")] = None,
    loss: Annotated[str | None, _option(_TRAINING, "full, or half: only a segment's later half is scored.")] = None,
    accumulate: Annotated[int | None, _option(_TRAINING, "Segments an update.")] = None,
    intermediate_losses: Annotated[
        bool | None, _option(_TRAINING, "Lower layers predict, too, at first.", "--intermediate-losses")
    ] = None,
    second_target: Annotated[
        bool | None, _option(_TRAINING, "A softmax for the token after the next, too.", "--second-target")
    ] = None,
    precision: Annotated[
        str | None,
        _option(_TRAINING, "auto (bf16 where a GPU has it, or a CPU is measured faster in it), fp32 or bf16."),
    ] = None,
    compile_layers: Annotated[bool | None, _option(_TRAINING, "The layers by torch.compile.", "--compile")] = None,
    recompute: Annotated[
        bool | None, _option(_TRAINING, "Activations in backward, to save memory.", "--recompute")
    ] = None,
    seed: Annotated[
        int | None, _option(_TRAINING, "Of initialisation, dropout and shuffling.", min=0, max=2**63 - 1)
    ] = None,
    optimizer: Annotated[
        str | None, _option(_OPTIMIZER, "adam, or muon (torch >= 2.9) for the layers' matrices.")
    ] = None,
    lr: Annotated[float | None, _option(_OPTIMIZER, "Peak learning rate.")] = None,
    warmup: Annotated[int | None, _option(_OPTIMIZER, "Updates of linear warm-up.")] = None,
    schedule: Annotated[str | None, _option(_OPTIMIZER, "cosine, cosine-released or constant.")] = None,
    min_lr_ratio: Annotated[float | None, _option(_OPTIMIZER, "Last learning rate over the peak.")] = None,
    clip: Annotated[float | None, _option(_OPTIMIZER, "Largest norm of the gradient.")] = None,
    average: Annotated[str | None, _option(_OPTIMIZER, "Of the weights: none, ema or triggered.")] = None,
    ema_decay: Annotated[float | None, _option(_OPTIMIZER, "Of the exponential average.")] = None,
    eval_every: Annotated[int | None, _option(_KEEPING, "Updates between evaluations.")] = None,
    eval_tokens: Annotated[int | None, _option(_KEEPING, "Tokens scored at each; 0: the whole split.")] = None,
    save_every: Annotated[int | None, _option(_KEEPING, "Updates between checkpoints.")] = None,
    log_every: Annotated[int | None, _option(_KEEPING, "Updates between lines of the log.")] = None,
) -> None:
    """Train a model, or continue a run. Ctrl-C writes a checkpoint and exits with 130.

    The schedule of the learning rate ends with the last of --steps.
    """
    named = {name: value for name, value in locals().items() if value is not None}
    named["compile"] = named.pop("compile_layers", None)
    if cutoffs is not None:
        named["cutoffs"] = _cutoffs(cutoffs)
    own_model = {k: v for k, v in named.items() if k in ModelConfig.__dataclass_fields__ and v is not None}
    own_train = {k: v for k, v in named.items() if k in TrainConfig.__dataclass_fields__ and v is not None}
    if eval_tokens == 0:
        own_train["eval_tokens"] = None
    given = Options(source, recipe, init, own_model, own_train)
    if minutes is not None and (steps is not None or resume or not 0 < minutes < math.inf):
        raise TxlError("--minutes must be > 0 and finite, and goes neither with --steps nor with --resume")
    if devices is not None:
        start_processes(devices, device)
        return
    with processes(device, group=shard) as (world, where):
        with world.together():
            asked = run_to_go_on(run, given) if resume else new_run(run, given, world)
        config = asked.train
        if not resume:
            config, measured = with_precision(asked.corpus, asked.model, config, where, world, shard)
            if measured is not None:
                say(measured)
        if minutes is not None:
            config = timed(minutes, asked.corpus, asked.model, config, where, world, shard)
        trainer = Trainer(
            run, asked.corpus, asked.model, config, resume=resume, device=where, tensorboard=tensorboard, init=asked.init,
            world=world, shard=shard,
        )  # fmt: skip
        _tell_schedule(trainer, asked.steps_before)
        say(header(trainer))
        run_training(trainer, restated(device, tensorboard, shard, world))
        if world.first:
            not_drawn = draw_loss(trainer)
            say(f"done: {trainer.last}{'' if not_drawn else ', loss.png'}")
            if not_drawn:
                say(f"loss.png was left out: {not_drawn}")


def _tell_schedule(trainer: Trainer, before: int | None) -> None:
    """Says where the learning rate will not be what one may think; before: the run's steps when it
    was last begun."""
    config = trainer.config
    if before is not None and config.steps != before:
        say(
            f"steps: {config.steps}, was {before}; from update {trainer.step + 1} on the learning rate follows the schedule "
            f"of {config.steps} updates, so the run differs from one that had them from the start"
        )
    if config.warmup_updates >= config.steps:
        say(
            f"warm-up takes {config.warmup_updates:,} updates and the run has {config.steps:,}: its learning rate never "
            "reaches --lr; --warmup sets another"
        )


def _cutoffs(text: str) -> tuple[int, ...]:
    try:
        return () if text == "none" else tuple(int(part) for part in text.split(","))
    except ValueError:
        raise TxlError(f"--cutoffs takes whole numbers separated by commas, or none, got {text!r}") from None
