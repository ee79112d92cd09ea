"""`txl train`: a model from a recipe and options, or a run that goes on."""

import dataclasses
import math
import shutil
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer

from txl import recipes
from txl.commands.header import header
from txl.commands.options import Device, in_panel, pick_device, say
from txl.commands.training import draw_loss, restated, run_training
from txl.errors import TxlError
from txl.model.config import ENCODINGS, ModelConfig
from txl.model.networks import Config, config_from_json
from txl.text import corpus as data
from txl.text.rules import PrepareOptions
from txl.training import checkpoint as checkpoints
from txl.training.config import TrainConfig
from txl.training.run_folder import read_record, refuse_used_folder
from txl.training.trainer import Trainer, updates_in

_MODEL, _REGULAR, _SOFTMAX = "Model", "Regularisation", "Vocabulary"
_TRAINING, _OPTIMIZER, _KEEPING = "Training", "Optimizer", "Evaluation and checkpoints"


def _option(panel: str, text: str, *names: str, **kind: Any) -> Any:
    return in_panel(panel, *names, help=text, show_default=False, **kind)


def train(
    run: Annotated[Path, typer.Option(help="Folder of the run: log, checkpoints, corpus.")],
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
    precision: Annotated[str | None, _option(_TRAINING, "auto (bf16 on a GPU that has it), fp32 or bf16.")] = None,
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
    given = {name: value for name, value in locals().items() if value is not None}
    given["compile"] = given.pop("compile_layers", None)
    if cutoffs is not None:
        given["cutoffs"] = _cutoffs(cutoffs)
    own_model = {k: v for k, v in given.items() if k in ModelConfig.__dataclass_fields__ and v is not None}
    own_train = {k: v for k, v in given.items() if k in TrainConfig.__dataclass_fields__ and v is not None}
    if eval_tokens == 0:
        own_train["eval_tokens"] = None
    if minutes is not None and (steps is not None or resume or not 0 < minutes < math.inf):
        raise TxlError("--minutes must be > 0 and finite, and goes neither with --steps nor with --resume")
    where = pick_device(device)
    if resume:
        if init is not None:
            raise TxlError("--resume continues the run with its own parameters; leave --init out")
        trainer = _resumed(run, source, recipe, own_model, own_train, where, tensorboard)
    else:
        chosen = recipes.load(recipe or recipes.DEFAULT)
        refuse_used_folder(run)
        begun = None if init is None else checkpoints.load(init)
        if begun is None:
            corpus = data.open_corpus(source, run / "corpus", chosen.prepare_options())
            _tell_other_data(chosen, corpus)
            model_config = config_from_json(chosen.model_with(own_model) | {"vocab_size": len(corpus.vocabulary)})
        else:
            if recipe is not None and chosen.network != getattr(begun.config, "network", None):
                raise TxlError(
                    f"--recipe {recipe} is of another kind of network than {begun.path}, whose sizes --init takes; give a "
                    "recipe of its kind, or none"
                )
            rule = "words" if begun.vocabulary.unit == "words" else "auto"
            corpus = data.open_corpus(source, run / "corpus", PrepareOptions(rule), begun.vocabulary)
            model_config = config_from_json(begun.config.to_json() | own_model)
        config = TrainConfig(**(chosen.train | own_train))
        if minutes is not None:
            config = timed(minutes, corpus, model_config, config, where)
        trainer = Trainer(run, corpus, model_config, config, device=where, tensorboard=tensorboard, init=begun)
    if trainer.config.warmup_updates >= trainer.config.steps:
        say(
            f"warm-up takes {trainer.config.warmup_updates:,} updates and the run has {trainer.config.steps:,}: its "
            "learning rate never reaches --lr; --warmup sets another"
        )
    say(header(trainer))
    run_training(trainer, restated(device, tensorboard))
    not_drawn = draw_loss(trainer)
    say(f"done: {trainer.last}{'' if not_drawn else ', loss.png'}")
    if not_drawn:
        say(f"loss.png was left out: {not_drawn}")


def _tell_other_data(recipe: recipes.Recipe, corpus: data.Corpus) -> None:
    """Says where a prepared corpus is not what the recipe's figures are of."""
    wanted = recipe.data.get("vocab_size")
    if wanted is not None and (corpus.rule != recipe.data["rule"] or len(corpus.vocabulary) != wanted):
        say(
            f"recipe {recipe.name} is for {recipe.data['rule']} with {wanted:,} symbols; this corpus is {corpus.rule} with "
            f"{len(corpus.vocabulary):,}, so its published figures do not apply"
        )


def timed(minutes: float, corpus: data.Corpus, model: Config, config: TrainConfig, device: Any) -> TrainConfig:
    """The configuration with as many updates as fill the time, evaluated and saved four times;
    warm-up is a thirtieth of them at most."""
    folder = Path(tempfile.mkdtemp(prefix="txl-trial-"))
    try:
        steps = updates_in(minutes, Trainer(folder, corpus, model, config, device=device))
    finally:
        shutil.rmtree(folder)
    every = -(-steps // 4)
    warmup = config.warmup if config.warmup is None else min(config.warmup, steps // 30)
    return dataclasses.replace(config, steps=steps, warmup=warmup, eval_every=every, save_every=every)


def _cutoffs(text: str) -> tuple[int, ...]:
    try:
        return () if text == "none" else tuple(int(part) for part in text.split(","))
    except ValueError:
        raise TxlError(f"--cutoffs takes whole numbers separated by commas, or none, got {text!r}") from None


def _resumed(
    run: Path, source: Path | None, recipe: str | None, own_model: dict[str, Any], own_train: dict[str, Any], device: Any,
    tensorboard: bool,
) -> Trainer:  # fmt: skip
    if recipe is not None:
        raise TxlError("--resume continues the model of the run; leave --recipe out")
    record = read_record(run)
    if source is not None and source.resolve() != record.corpus.resolve():
        raise TxlError(f"{run}: a run is resumed on its own text, {record.corpus}; leave --data out")
    corpus = data.load(record.corpus)
    model_config = config_from_json(record.model | own_model | {"vocab_size": len(corpus.vocabulary)})
    config = TrainConfig.from_json(record.train | own_train)
    trainer = Trainer(run, corpus, model_config, config, resume=True, device=device, tensorboard=tensorboard)
    if config.steps != record.train["steps"]:
        say(
            f"steps: {config.steps}, was {record.train['steps']}; from update {trainer.step + 1} on the learning rate "
            f"follows the schedule of {config.steps} updates, so the run differs from one that had them from the start"
        )
    return trainer
