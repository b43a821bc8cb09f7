"""Command-line options that name and load the models, shared by all commands."""

from __future__ import annotations

import argparse
import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

from ..config import (
    ALL_LAYERS,
    FILES,
    MAX_AHEAD,
    MAX_BUDGET,
    SOURCES,
    CacheType,
    DraftType,
    EngineConfig,
    Mode,
)
from ..errors import ConfigError, ModelFileError
from ..files.gguf import GGUFFile
from ..files.hub import Hub, RepoSpec
from ..files.named import NAMED, fetch_named, find_named, looks_like_repository
from ..files.pairs import EMBEDDED_TARGET
from .llama_cpp import add_llama_cpp_options
from .option_table import add_table
from .parser import ListPairs, Version
from .wording import count

log = logging.getLogger(__name__)

_MODEL = """
-m --model GGUF|NAME | target model: a file, NAMES (downloaded once), or a repository as with -hf (default: the embedded
    demonstration pair)
-md --model-draft PATH | DFlash draft: GGUF, or a safetensors folder (default: found beside the target)
-hf -hfr --hf-repo USER/REPO[:QUANT] | download the target from the Hugging Face hub, and its draft if one is published
-hff --hf-file FILE | use this file of the -hf repository
-hfd --hf-repo-draft USER/REPO[:QUANT] | download the draft from the hub
--list-pairs _ pairs | print which draft belongs to which target, and exit
-hft --hf-token TOKEN | token for the hub (default: HF_TOKEN, or the stored login)
--offline | use only what the hub's cache already holds
-c --ctx-size N int {n_ctx} | context in tokens, 0: the trained length, or what fits into the memory (default {n_ctx})
--gpu-memory SIZE size | limit of GPU memory: 23GiB, 90%% (default: all free)
-b --batch-size N int 0 | tokens per prefill pass (default 0: automatic)
-t --threads N int | CPU threads (default: physical cores, fewer on a busy machine)
-ngl --gpu-layers --n-gpu-layers N layers -1 | 0: stay on the CPU; else use a GPU if present
-mg --main-gpu I int 0 | which GPU, or which of --device (default 0)
-dev --device NAME,... names | devices to use, as named by dflash-doctor; several split the layers; none: the CPU (default: one
    GPU, all with -sm layer)
-sm --split-mode MODE split | layer: split the layers among the devices; tensor: halve every layer between two; none: use one
    (default: layer if --device names several or -ts is given)
-ts --tensor-split N,... parts | proportions of the split by layers (default: by free memory)
--prompt-keep SHARE float | prefill only this share of long prompts, such as 0.1, selected by the question: LOSSY. On the
    server, the smallest share that requests may set with dflash.prompt_keep (default: off, prompts are prefilled whole)
-mp --prompt-scorer PATH|lexical | scorer of --prompt-keep: a GGUF file of Qwen3.5-0.8B, or lexical, by the question's words
    (default: such a file beside the target, else lexical)
-devd --device-draft NAME | the device of the draft (default: that of the target's last layers)
"""
_EXPERTS = """
-cmoe --cpu-moe _ all | keep the experts of all layers in host memory and compute them on the CPU
-ncmoe --n-cpu-moe N int | the same for the first N layers only (default: 0, or the fewest with which the model fits the GPU)
"""
_CACHES = """
--cache-type TYPE cache | type of keys and values, unless -ctk or -ctv is given
-ctk --cache-type-k TYPE cache | type of the keys in the K/V cache: KNOWN (default auto: f16 on a GPU, f32 on the CPU, where it
    is faster)
-ctv --cache-type-v TYPE cache | type of its values: KNOWN (default auto: f16 on a GPU, f32 on the CPU, where it is faster)
-ctkd --cache-type-k-draft TYPE cache | type of the keys in the draft's cache: KNOWN (default as the target's)
-ctvd --cache-type-v-draft TYPE cache | type of its values: KNOWN (default as the target's)
"""
_DECODING = f"""
--mode _ mode auto | how to draft: auto decides at each step, plain does not draft, chain drafts one continuation, tree a tree
    (default auto)
--spec NAME,... sources | sources of drafts: some of {", ".join(SOURCES)}, or none (default: all that are available; suffix is
    prompt lookup, which needs no model)
--budget B int 31 | tree nodes without the root, 1..{MAX_BUDGET} (default 31)
--candidates K int | candidate tokens per drafted position (default 8, for a budget above 15: 16; for DFlash2 as in its file)
--chain-seed | put the most likely chain into the tree first
--draft-window N int | attention window of the draft's window layers in tokens, for a draft whose file does not declare it,
    0: none (default: as in the file)
--draft-max N int 3 | tokens that the target's prediction head (MTP), if it has one, drafts ahead, at most {MAX_AHEAD}
    (default 3); other drafts have a fixed block
--draft-type TYPE weights | convert the draft's float weights while loading, to one of {", ".join(get_args(DraftType))}
    (default: as published; q8_0 if that does not fit the GPU)
--fa-window N int 0 | attend only to the last N tokens and the first 64 while decoding, 0: all; faster in long contexts, and
    CHANGES THE OUTPUT (default 0)
--prefill-fp8 | prefill with 8-bit floats on a Hopper GPU: faster, LOSSY, and CHANGES THE OUTPUT (default: off)
--no-calibrate | do not measure pass times at the first start; auto then learns them while decoding
--reproducible | no decision depends on timing: auto is a tree of --budget nodes on a GPU, plain on the CPU
"""
# options shown by `--help`; `--help-all` shows all
USUAL = (
    "-m -md -hf -hfd --list-pairs -c --gpu-memory -t -ngl --mode --budget --temp --top-k --top-p --min-p -s"
)


def add_model_options(parser: argparse.ArgumentParser, n_ctx: int = 0) -> None:
    """Add --version and the options that `engine_config` reads, with llama.cpp's names where it has one.

    Args:
        n_ctx: Default context in tokens (0: as trained).
    """
    parser.add_argument("--version", action=Version, nargs=0, help="print the version and exit")
    names = " or ".join(model.name for model in NAMED)
    model, cache = parser.add_argument_group("model"), {"choices": get_args(CacheType)}
    pairs = {"action": ListPairs, "nargs": 0}
    add_table(
        model.add_argument,
        _MODEL.format(n_ctx=n_ctx).replace("NAMES", names),
        size=memory_size,
        layers=gpu_layers,
        pairs=pairs,
        names=_names,
        split={"choices": ("none", "layer", "row", "tensor")},
        parts=_parts,
    )
    experts = model.add_mutually_exclusive_group()
    add_table(
        experts.add_argument,
        _EXPERTS,
        all={"dest": "n_cpu_moe", "action": "store_const", "const": ALL_LAYERS},
    )
    known = ", ".join(get_args(CacheType)[1:])
    add_table(model.add_argument, _CACHES.replace("KNOWN", known), cache=cache)
    kinds: dict[str, Any] = {
        "mode": {"choices": get_args(Mode)},
        "sources": _sources,
        "weights": {"choices": get_args(DraftType)},
    }
    add_table(parser.add_argument_group("decoding").add_argument, _DECODING, **kinds)
    add_llama_cpp_options(parser)


def memory_size(text: str) -> int | float:
    """Parse 23GiB or 23G (2^30 each), 24GB (10^9 each) or a number as bytes; 90% as the share 0.9.

    Raises:
        ArgumentTypeError: It is not a size.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?) *(?:(%)|([KMGT]?)(B?|iB))", text.strip(), re.IGNORECASE)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 23GiB, 24GB or 90%")
    number, percent, prefix, unit = float(found[1]), *found.groups()[1:]
    if percent and not 0 < number <= 100:
        raise argparse.ArgumentTypeError(f"{text!r} is outside 0%..100%")
    if percent:
        return number / 100
    base = 1000 if unit.upper() == "B" else 1024
    size = int(number * base ** " KMGT".index(prefix.upper() or " "))
    if size <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is an invalid size; for example 23GiB or 90%")
    return size


def gpu_layers(text: str) -> int:
    """A number of layers; "all" and "auto" are -1, the default.

    Raises:
        ValueError: It is no number.
    """
    return -1 if text in ("all", "auto") else int(text)


def _names(text: str) -> tuple[str, ...]:
    """Comma-separated names."""
    return tuple(name for name in map(str.strip, text.split(",")) if name)


def _parts(text: str) -> tuple[float, ...]:
    """Numbers separated by commas or slashes. Raises ValueError."""
    return tuple(float(part) for part in text.replace("/", ",").split(","))


# llama.cpp's names of sources
_LLAMA_SOURCES = {
    "draft-dflash": ("dflash", "dflash2"),
    "draft-dspark": ("dspark",),
    "draft-mtp": ("mtp",),
    "none": (),
}


def _sources(text: str) -> tuple[str, ...]:
    """The names in --spec, ours or llama.cpp's."""
    found: dict[str, None] = {}
    for name in map(str.strip, text.split(",")):
        if name in SOURCES:
            found[name] = None
        elif name.startswith("ngram-"):
            found["suffix"] = None
        elif name in _LLAMA_SOURCES:
            found.update(dict.fromkeys(_LLAMA_SOURCES[name]))
        else:
            raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(SOURCES)}, none")
    return tuple(found)


def token_limit(text: str) -> int | None:
    """Limit of an answer's tokens; None for -1 (and llama.cpp's -2): until the context is full."""
    limit = int(text)
    if limit in (-1, -2):
        return None
    if limit < 1:
        raise argparse.ArgumentTypeError(f"{limit} is neither -1 nor a count")
    return limit


def file_metadata(model: Path) -> Mapping[str, Any]:
    """The keys of a model file before loading; empty for a bad file, which loading will report."""
    try:
        with GGUFFile(model) as file:
            return file.metadata
    except ModelFileError:
        return {}


def warn_of_threads(n_threads: int | None) -> None:
    """Warn if there are more threads than cores; invalid values are refused elsewhere."""
    from ..ggml.device import physical_cores

    cores = physical_cores()
    if n_threads is not None and cores < n_threads <= 512:
        log.warning(
            "-t %d: here are %s, and threads that share one wait for each other",
            n_threads,
            count(cores, "core"),
        )


# options with the same name in the engine's configuration
_SAME = """gpu_memory fa_window main_gpu device tensor_split n_cpu_moe mode budget candidates chain_seed reproducible
    draft_window draft_type spec prompt_keep prefill_fp8"""


def engine_config(args: argparse.Namespace) -> EngineConfig:
    """Fetch models from the hub, find the draft, and build the configuration.

    Raises:
        HubError: A model cannot be fetched.
        ConfigError: Options exclude each other.
    """
    if without := getattr(args, "no_effect", None):
        log.warning("without effect here: %s", ", ".join(without))
    if args.hf_repo is None and args.hf_file is not None:
        raise ConfigError("-hff names a file of a repository: give -hf too")
    if args.hf_repo is not None and args.model is not None:
        raise ConfigError("give one target only: -m or -hf")
    if args.model_draft is not None and args.hf_repo_draft is not None:
        raise ConfigError("give one draft only: -md or -hfd")
    if args.model is not None and looks_like_repository(args.model):
        args.hf_repo, args.model = args.model, None
    # check everything possible before fetching gigabytes
    target_spec = None if args.hf_repo is None else RepoSpec.parse(args.hf_repo)
    draft_spec = None if args.hf_repo_draft is None else RepoSpec.parse(args.hf_repo_draft)
    by_name = None if args.model is None or Path(args.model).exists() else find_named(args.model)
    model = EMBEDDED_TARGET if args.model is None or by_name else _existing("-m", args.model)
    draft = None if args.model_draft is None else _existing("-md", args.model_draft)
    scorer = None
    if args.prompt_scorer not in (None, "lexical"):
        scorer = _existing("-mp", args.prompt_scorer)
    if args.prompt_scorer is not None and args.prompt_keep is None:
        raise ConfigError("-mp: it chooses what --prompt-keep lets be read; give that too")
    named = draft is not None or draft_spec is not None
    wants_draft = args.mode != "plain" and (args.spec is None or any(name in FILES for name in args.spec))
    if named and args.mode != "plain" and not wants_draft:
        raise ConfigError("--spec: it leaves out the draft that -md or -hfd names")
    hub = (
        None if target_spec is None and draft_spec is None else Hub(offline=args.offline, token=args.hf_token)
    )
    if by_name is not None:
        model = fetch_named(by_name, offline=args.offline)
    if hub is not None and target_spec is not None:
        model, found = hub.target(target_spec, args.hf_file, want_draft=wants_draft and not named)
        draft = draft or found
    if hub is not None and draft_spec is not None and wants_draft:
        draft = hub.draft(draft_spec)
    if wants_draft and draft is None and not named and args.hf_repo is None:
        draft = _beside(model, args.mode)
    if args.prompt_keep is not None and args.prompt_scorer is None:
        scorer = _scorer_beside(model)
    same: dict[str, Any] = {name: getattr(args, name) for name in _SAME.split()}
    split = args.split_mode
    if split == "row":
        log.warning("-sm row: it is not built, layers are shared out instead (-sm layer)")
        split = "layer"
    return EngineConfig(
        model=model,
        draft=draft if wants_draft else None,
        n_ctx=args.ctx_size,
        n_batch=args.batch_size,
        n_threads=None if args.threads == -1 else args.threads,
        n_gpu_layers=args.gpu_layers,
        split_mode=split,
        draft_device=None if args.device_draft == "none" else args.device_draft,
        type_k=args.cache_type_k or args.cache_type or "auto",
        type_v=args.cache_type_v or args.cache_type or "auto",
        draft_type_k=args.cache_type_k_draft or "auto",
        draft_type_v=args.cache_type_v_draft or "auto",
        calibrate="never" if args.no_calibrate else "cached",
        draft_found=not named,
        scorer=scorer,
        scorer_found=args.prompt_scorer is None,
        draft_max=min(args.draft_max, MAX_AHEAD),
        **same,
    )


def _existing(flag: str, name: str) -> Path:
    """The path of an option. Raises ConfigError."""
    if not name:
        raise ConfigError(f"{flag}: the name is empty")
    path = Path(name)
    if not path.exists():
        raise ConfigError(f"{flag}: {path} does not exist")
    return path


def _scorer_beside(model: Path) -> Path | None:
    """The scorer in the target's folder; warns if there is none."""
    from ..engine.scorer import USUAL, scorer_beside  # needs the compiled binding

    found = scorer_beside(model)
    if found is None:
        log.warning("--prompt-keep: no %s beside %s (-mp names one), selection is lexical", USUAL, model)
    return found


def _beside(model: Path, mode: str) -> Path | None:
    """The draft in the target's folder; warns if there is none. Loading reports a bad target."""
    from ..drafts.beside import draft_beside  # imported here, since it needs the compiled binding

    try:
        found = draft_beside(model)
    except ModelFileError:
        return None
    if found.path is None and found.own:
        log.info("%s; %s", found.why, found.own)
    elif found.path is None and mode == "auto":
        log.warning("%s, decoding without a draft model; %s", found.why, found.advice)
    elif found.path is None and found.is_useless:
        raise ConfigError(f"mode {mode}: {found.why}; {found.advice}")
    return found.path
