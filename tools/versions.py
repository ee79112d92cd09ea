"""Tables of the models that `accelerate` takes, in releases of transformers and of other libraries.

    python tools/versions.py FOLDER [--write] [NAME==RELEASE ..]

By default all releases of the tables; NAME alone is its newest release. `--write` puts the tables
into docs/how-to/accelerate.md. Each release is put into a folder in FOLDER by pip, without torch.

A process for each release compares small random models with accelerated copies of them: outputs in
evaluation, outputs and gradients in training without dropout; with and without padding, with each
attention implementation, with caches, and attention weights. Prints why a model is not taken, and
the hashes of sources that no adapter knows. Exits with 1 if a value is wrong, or if a release that
is in no table has a model that is not taken.
"""

import copy
import dataclasses
import datetime
import importlib
import inspect
import json
import os
import random
import re
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from email.parser import HeaderParser
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "how-to" / "accelerate.md"
TRANSFORMERS = (
    "4.36.2", "4.40.2", "4.44.2", "4.46.3", "4.48.3", "4.51.3", "4.53.3", "4.55.4", "4.56.2", "4.57.6", "5.0.0",
    "5.2.0", "5.5.4", "5.9.0", "5.13.1", "5.15.1", "5.17.0", "5.19.0", "5.20.2", "5.22.2", "5.23.0", "5.24.0",
)  # fmt: skip
ON_PAGE = ("4.36.2", "4.46.3", "4.53.3", "4.55.4", "4.57.6", "5.0.0", "5.5.4", "5.13.1", "5.19.0", "5.23.0", "5.24.0")
START, END = "<!-- versions: written by tools/versions.py -->", "<!-- end of versions -->"
OTHERS = {
    "nemo-toolkit": ("1.23.0", "2.0.0", "2.2.1", "3.0.0"),
    "espnet": ("202209", "202301", "202402", "202412", "202509", "202511"),
    "speechbrain": ("0.5.16", "1.0.0", "1.0.3", "1.1.2"),
    "funasr": ("1.0.30", "1.4.16"),
    "modelscope": ("1.20.1", "1.40.2"),
}
NEEDED = ("huggingface-hub", "tokenizers", "safetensors")  # by transformers, each in its own releases
KEYS = {
    "R": "taken, equal", "p": "a part is taken", "x": "left alone", ".": "not in the release",
    "?": "the original does not run", "W!": "a wrong value",
}  # fmt: skip
EXPECTED = re.compile("attention weights asked for|penalty")  # such calls fall back
MASKED_BY_LENGTH = ("fastspeech2", "granite 5")  # layers that take no other masks
TOLERANCE = 3e-4
SMALL = {"vocab_size": 40, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4,
         "relative_attention_num_buckets": 8, "relative_attention_max_distance": 12, "decoder_start_token_id": 0,
         "pad_token_id": 0}  # fmt: skip


# Getting releases.


def pip(*arguments: str) -> None:
    subprocess.run(
        [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check", "install", *arguments], check=True
    )


def get(root: Path, name: str, release: str) -> Path:
    """Put a release into a folder of its own, unless it is there, and return the folder."""
    folder = root / f"{name}-{release or 'newest'}"
    if not (folder / "complete").exists():
        pip("--no-deps", "--no-compile", "--target", str(folder), f"{name}=={release}" if release else name)
        if name == "transformers":
            (metadata,) = folder.glob("transformers-*.dist-info/METADATA")
            found = HeaderParser().parsestr(metadata.read_text(encoding="utf-8")).get_all("Requires-Dist") or []
            needs = [re.sub(r"[ ()]", "", x) for x in found if x.startswith(NEEDED) and ";" not in x]
            pip("--no-compile", "--target", str(folder), *needs)  # what they need, too: none needs torch
        (folder / "complete").touch()
    return folder


# The models of a release, in a process of its own.

Run = Callable[[Any], list[Any]]


@dataclasses.dataclass
class Family:
    """A family of models.

    Attributes:
        make: makes a model with options of its configuration: {} or {"attn_implementation": ..}.
        runs: functions of a model that return its valid outputs, by name.
        steps: like runs, for evaluation alone: caches; what a release cannot run is left out.
    """

    make: Callable[[dict[str, str]], Any]
    runs: dict[str, Run]
    steps: dict[str, Run] = dataclasses.field(default_factory=dict)


def families() -> dict[str, Family]:
    """Return all families of transformers."""
    import small_models as small
    import torch

    def weights(**given: Any) -> Run:
        def run(m: Any) -> list[Any]:
            out = m(**given, output_attentions=True, return_dict=True)
            return [x for key in sorted(out) if key.endswith("attentions") for x in out[key]]

        return run

    def encoder(name: str, **options: Any) -> Family:
        given = small.arguments_of(name)
        mask = list(given)[1]
        whole = given | {mask: torch.full_like(given[mask], name != "Gemma 3n")}
        if not name.startswith("Gemma"):
            del whole[mask]

        runs = {"whole": lambda m: [m(**whole)[0]], "padding": lambda m: small.valid_parts(m(**given)[0])}
        steps = {} if name.startswith("Gemma") else {"weights": weights(**whole)}
        return Family(lambda of: small.model_of(name, **options, **of), runs, steps)

    def xlnet() -> Family:
        family, tokens = encoder("XLNet"), small.arguments_of("XLNet")["input_ids"]

        def segments(m: Any) -> list[Any]:
            kinds = (torch.arange(60) > 33).long().expand_as(tokens)
            first = m(tokens, token_type_ids=kinds, use_mems=True)
            return [first[0], m(tokens, mems=list(first[1]), token_type_ids=kinds, use_mems=True)[0]]

        return dataclasses.replace(family, runs=family.runs | {"segments and memory": segments})

    def seq2seq(folder: str, prefix: str, **sizes: Any) -> Family:
        tokens = torch.randint(1, 40, (2, 33), generator=torch.Generator().manual_seed(1))
        tokens[1, 20:] = 0
        targets = torch.randint(1, 40, (2, 19), generator=torch.Generator().manual_seed(2))
        source: dict[str, Any] = {"input_ids": tokens}
        if prefix == "Pop2Piano":
            source = {"input_features": torch.randn(2, 33, 32, generator=torch.Generator().manual_seed(3))}
        padded = source | {"attention_mask": (tokens != 0).long()}

        def make(of: dict[str, str]) -> Any:
            m = importlib.import_module(f"transformers.models.{folder}.modeling_{folder}")
            return getattr(m, f"{prefix}ForConditionalGeneration")(
                getattr(m, f"{prefix}Config")(**SMALL, **sizes, **of)
            )

        def steps(m: Any) -> list[Any]:
            name = "cache" if "cache" in inspect.signature(m.forward).parameters else "past_key_values"
            given = padded if prefix != "Pop2Piano" else {"inputs_embeds": source["input_features"]} | padded
            hidden = m.get_encoder()(**{n: x for n, x in given.items() if n != "input_features"})
            given = {"encoder_outputs": hidden, "attention_mask": padded["attention_mask"], "use_cache": True}
            out = m(**given, decoder_input_ids=targets[:, :3])
            found = [out.logits]
            for n in range(3, 9):
                out = m(**given, **{name: out[name]}, decoder_input_ids=targets[:, n : n + 1])
                found.append(out.logits)
            return found

        def forward(**given: Any) -> Run:
            return lambda m: [(out := m(**given, decoder_input_ids=targets)).logits, out.encoder_last_hidden_state]

        def with_padding(m: Any) -> list[Any]:
            logits, hidden = forward(**padded)(m)
            return [logits, hidden[0], hidden[1, :20]]

        more = {"cache": steps, "weights": weights(**padded, decoder_input_ids=targets)}
        return Family(make, {"whole": forward(**source), "padding": with_padding}, more)

    def inkling(name: str) -> Family:
        import inkling_models as models

        def whole(**given: Any) -> Run:
            return lambda m: [m(models.TOKENS, **given).logits[models.valid(given)]]

        def steps(m: Any) -> list[Any]:
            key = "cache" if "cache" in inspect.signature(m.forward).parameters else "past_key_values"
            out = m(models.TOKENS[:, :7], use_cache=True)
            found = [out.logits]
            for n in range(7, 13):
                out = m(models.TOKENS[:, n : n + 1], use_cache=True, **{key: out[key]})
                found.append(out.logits)
            return found

        runs = {
            label: whole(**given)
            for label, given in models.GIVEN.items()
            if label in ("whole", "left padding", "packed rows")
        }
        own = "sdpa" if name == "Inkling" else "eager"
        return Family(lambda of: models.model_of(name, of.get("attn_implementation", own)), runs, {"cache": steps})

    stable = {"do_stable_layer_norm": True}
    return {
        **{name: encoder(name) for name in ("Wav2Vec2-Conformer", "w2v-BERT relative", "w2v-BERT relative_key",
                                            "SeamlessM4T", "SeamlessM4Tv2", "Parakeet", "Nemotron")},
        "FastSpeech2": layer("fastspeech2"),
        "XLNet": xlnet(),
        "T5": seq2seq("t5", "T5"),
        "mT5": seq2seq("mt5", "MT5"),
        "UMT5": seq2seq("umt5", "UMT5"),
        "Switch": seq2seq("switch_transformers", "SwitchTransformers", num_experts=2, num_decoder_layers=2,
                          num_sparse_encoder_layers=1, num_sparse_decoder_layers=1, expert_capacity=40),
        "LongT5 local": seq2seq("longt5", "LongT5", encoder_attention_type="local", local_radius=6),
        "Pop2Piano": seq2seq("pop2piano", "Pop2Piano"),
        "WavLM": encoder("WavLM"),
        "WavLM, norm first": encoder("WavLM", **stable),
        "MPNet": encoder("MPNet"),
        "Granite": layer("granite"),
        "Granite Plus": layer("granite plus"),
        "Granite 5": layer("granite 5"),
        "Gemma 3n": encoder("Gemma 3n"),
        "Gemma 4": encoder("Gemma 4"),
        "Inkling": inkling("Inkling"),
        "Inkling 2": inkling("Inkling2"),
        "Inkling 2 loop": inkling("Inkling2Loop"),
    }  # fmt: skip


def layers(name: str) -> dict[str, Family]:
    """Return the layers of another library."""
    names = {"nemo-toolkit": ("nemo", "nemo sdpa", "nemo local", "nemo transformer"),
             "espnet": ("espnet", "espnet zero_triu", "espnet legacy", "espnet transducer", "espnet beats"),
             "speechbrain": ("speechbrain", "speechbrain beats"), "modelscope": ("modelscope zipenhancer",),
             "funasr": ("funasr", "funasr legacy", "funasr chunk")}[name]  # fmt: skip

    return {name: layer(name) for name in names}


def layer(name: str) -> Family:
    """Return a layer, with the masks that its library's encoders make."""
    from layer_helpers import NO_GRADIENTS, WITHOUT_MASKS

    from implementations.peer_cases import MAKERS, make, sinusoids

    def cached(m: Any) -> list[Any]:
        """A step of NeMo's streaming, with 20 frames in its cache."""
        import torch

        m.cache_drop_size = 0
        frames, held = (torch.randn(3, n, 64, generator=torch.Generator().manual_seed(n)) for n in (25, 20))
        return list(m(frames, frames, frames, None, sinusoids(44, -44, 64), held))

    options = {"sdpa": True} if name == "nemo sdpa" else {}
    maker = name if name in MAKERS else "nemo"
    masks = ["none", "right"] if "beats" in name or name in MASKED_BY_LENGTH else ["none", "right", "limited"]
    cases: dict[str, Any] = {}

    def run(mask: str) -> Run:
        def outputs(m: Any) -> list[Any]:
            case = cases.setdefault(mask, make(maker, mask, **options))
            return [case.call(m, case.x)[case.valid]]

        return outputs

    runs = {mask: run(mask) for mask in (masks[:1] if maker in WITHOUT_MASKS else masks)}
    trained, steps = ({}, runs) if maker in NO_GRADIENTS else (runs, {"cache": cached} if maker == "nemo" else {})
    return Family(lambda of: make(maker, "none", **options).module, trained, steps)


def prepared(model: Any) -> Any:
    """Return a model without dropout, whose scores differ enough for positions to matter."""
    import torch
    from small_models import randomized

    torch.manual_seed(0)
    for name, p in randomized(model).named_parameters():
        if p.dim() > 1:
            wide = (
                1.0 if re.search("relative_attention_bias|rel_attn_embed|embed|shared", name) else p[0].numel() ** -0.5
            )
            torch.nn.init.normal_(p, 0, wide)
    for part in model.modules():
        for holder in (part, getattr(part, "config", None)):
            for key, value in list(vars(holder).items()) if holder is not None else ():
                if isinstance(value, float) and (
                    "drop" in key or "jitter" in key or (key == "p" and "Drop" in type(part).__name__)
                ):
                    setattr(holder, key, 0.0)
    return model


def measured(model: Any, family: Family) -> dict[str, dict[str, Any]]:
    """Return a model's valid outputs and gradients, by mode and run."""
    import torch

    found: dict[str, dict[str, Any]] = {}
    for mode, runs in (("evaluation", family.runs | family.steps), ("training", family.runs)):
        for label, run in runs.items():
            model.train(mode == "training").zero_grad()
            torch.manual_seed(1)
            random.seed(1)
            try:
                with torch.set_grad_enabled(mode == "training"):
                    out = run(model)
            except Exception as error:
                if label not in family.steps:
                    raise
                print(f"{label}: {type(error).__name__}: {error}", file=sys.stderr)
                continue
            found[f"{mode}, {label}"] = values = {f"output {n}": x.detach() for n, x in enumerate(out)}
            if mode == "training":
                generator = torch.Generator().manual_seed(2)
                sum((x * torch.randn(x.shape, generator=generator)).sum() for x in out).backward()
                values |= {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return found


def difference(want: dict[str, dict[str, Any]], got: dict[str, dict[str, Any]]) -> str | None:
    """Return where values differ, relative to the largest of each tensor, or None. A gradient that
    is zero but for rounding is measured by those of the other parameters."""
    for run, values in want.items():
        if run not in got:
            return f"{run}: does not run"
        if values.keys() != got[run].keys():
            return f"{run}: other gradients: {sorted(values.keys() ^ got[run].keys())[:3]}"
        largest = {True: 0.0, False: 0.0}
        for name, x in values.items():
            largest[name.startswith("output ")] = max(largest[name.startswith("output ")], float(x.abs().max()))
        for name, x in values.items():
            error, size = float((x - got[run][name]).abs().max()), float(x.abs().max())
            if not error <= TOLERANCE * max(size, 1e-2 * largest[name.startswith("output ")]):
                return f"{run}: {name} is off by {error:.1g}, of at most {size:.1g}"
    return None


def attempt(model: Any, family: Family, want: dict[str, dict[str, Any]]) -> tuple[Any, str, str | None]:
    """Accelerate a copy of a model; return the report, why its original code answered calls, and
    how its values differ."""
    from txl_kernels.integrations import accelerate

    other = copy.deepcopy(model)
    report = accelerate(other)
    try:
        why = difference(want, measured(other, family))
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
    fallbacks = "; ".join(f"{n} x {reason}" for reason, n in report.fallbacks.items() if not EXPECTED.search(reason))
    return report, fallbacks, why


def cell(family: Family) -> tuple[str, str]:
    """Return a family's key in the table, and the reason for any but R."""
    key, reason, own = "?", "", "no"
    for implementation in (None, "eager", "sdpa"):
        if implementation == own:
            continue
        try:
            model = prepared(family.make({} if implementation is None else {"attn_implementation": implementation}))
            own = (
                own
                if implementation
                else getattr(getattr(model, "config", None), "_attn_implementation", None) or "eager"
            )
            want = measured(copy.deepcopy(model), family)
            if not all(x.isfinite().all() for values in want.values() for x in values.values()):
                raise ValueError("its values are not finite")
        except Exception as error:  # an implementation that the model does not have, for example
            missing = isinstance(error, (ModuleNotFoundError, AttributeError)) or "unexpected keyword" in str(error)
            if implementation is None:
                return "." if missing else "?", f"{type(error).__name__}: {error}"
            continue
        report, fallbacks, why = attempt(model, family, want)
        if why is not None:
            return "W!", f"{implementation or 'default'}: {why}"
        if implementation is None and (report.left_alone or not report.accelerated):
            key = "p" if report.accelerated else "x"
            reason = "; ".join(sorted({f"{row.kind.rpartition('.')[2]}: {row.reason}" for row in report.left_alone}))
        elif implementation is None:
            key, reason = "p" if fallbacks else "R", fallbacks
    return key, reason


def work(name: str) -> None:
    """Print the cells and the unknown hashes of the release that is on the path, as JSON."""
    import torch

    from txl_kernels.integrations import peers, source_hash

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    cells, found = {}, families() if name == "transformers" else layers(name)
    only = os.environ.get("ONLY")
    for label, family in found.items():
        if only and not re.search(only, label):
            continue
        cells[label] = cell(family)
    hashes = {}
    for peer in peers():
        if peer.distribution != name:
            continue
        try:
            original = peer.original()
        except (ImportError, AttributeError):
            continue
        if peer.unknown_source(original) is not None:
            hashes[peer.name] = source_hash(original)
    print(json.dumps({"cells": cells, "hashes": hashes}))


def results(root: Path, name: str, releases: Sequence[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each release with what `work` printed of it; "" is the newest release."""
    for wanted in releases:
        folder = get(root, name, wanted)
        (metadata,) = folder.glob(f"{name.replace('-', '?')}-*.dist-info")
        release = wanted or metadata.name.removesuffix(".dist-info").rpartition("-")[2]
        path = [str(folder), str(ROOT), str(ROOT / "benchmarks"), str(ROOT / "tests" / "integrations")]
        env = os.environ | {"PYTHONPATH": os.pathsep.join(path), "PEERS": str(folder), "HF_HUB_OFFLINE": "1"}
        done = subprocess.run([sys.executable, __file__, "--work", name], env=env, capture_output=True, text=True)
        if done.returncode != 0:
            sys.exit(f"{name} {release}: the process failed:\n{done.stderr}")
        yield release, json.loads(done.stdout.splitlines()[-1])


def markdown(name: str, found: dict[str, dict[str, Any]], releases: Iterable[str]) -> str:
    """Return the table of a library's releases."""
    shown = [release for release in releases if release in found]
    rows = list(dict.fromkeys(row for release in shown for row in found[release]["cells"]))
    lines = [[name, *shown], ["---"] * (len(shown) + 1)]
    lines += [[row, *(found[release]["cells"].get(row, ["."])[0] for release in shown)] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main(folder: Path, wanted: Sequence[str], write: bool) -> int:
    asked: dict[str, list[str]] = {}
    for name, _, release in (x.partition("==") for x in wanted):
        asked.setdefault(name, []).append(release)
    everything = {"transformers": TRANSFORMERS} | OTHERS
    tables, faults = {}, 0
    for name, releases in (asked or everything).items():
        found: dict[str, dict[str, Any]] = {}
        for release, result in results(folder, name, releases):
            found[release] = result
            for row, (key, reason) in result["cells"].items():
                faults += key == "W!" or (release not in everything[name] and key not in ("R", "."))
                if key not in ("R", "."):
                    print(f"{name} {release}, {row}: {key} ({KEYS[key]}): {reason}", flush=True)
            for peer, code in result["hashes"].items():
                print(f'{name} {release}, source unknown: {peer} "{release}": "{code}"', flush=True)
        tables[name] = found
        print(markdown(name, found, found), flush=True)
    if write:
        text = PAGE.read_text(encoding="utf-8")
        before, _, rest = text.partition(START)
        parts = [f"`python tools/versions.py FOLDER --write`, {datetime.datetime.now(datetime.UTC).date()}."]
        parts += [markdown(name, found, ON_PAGE if name == "transformers" else found) for name, found in tables.items()]
        body = "\n\n".join(parts)
        PAGE.write_text(f"{before}{START}\n\n{body}\n\n{END}{rest.partition(END)[2]}", encoding="utf-8")
    return 1 if faults else 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--work"]:
        work(sys.argv[2])
    elif len(sys.argv) < 2:
        sys.exit(__doc__)
    else:
        sys.exit(main(Path(sys.argv[1]), [x for x in sys.argv[2:] if x != "--write"], "--write" in sys.argv))
