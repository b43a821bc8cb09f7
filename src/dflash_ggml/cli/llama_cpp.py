"""Options of llama.cpp's programs (`common/arg.cpp` there), so that their command lines work unchanged.

Each is one of four kinds: an alias of an option of ours; an option without effect on answers, which is accepted and reported in
one line; an unsupported option that would affect answers or access, which is refused by name unless its value has no effect; or
an option of the command itself, which takes precedence.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from typing import Any

from .option_table import entries

# Our option -> llama.cpp's further names of it.
ALIASES = {
    "--help": "--usage",
    "--verbose": "--log-verbose",
    "--model-draft": "--spec-draft-model",
    "--hf-repo-draft": "--spec-draft-hf -hfrd",
    "--cache-type-k-draft": "--spec-draft-type-k",
    "--cache-type-v-draft": "--spec-draft-type-v",
    "--device-draft": "--spec-draft-device",
    "--draft-max": "--spec-draft-n-max --draft --draft-n",
    "--spec": "--spec-type",
    "--think": "--reasoning -rea",
    "--system": "--system-prompt",
    "--chat": "--conversation -cnv",
    "--cache-mb": "--cache-ram -cram",
    "--cors-origin": "--cors-origins",
}

# Memory, devices and threads, which are chosen automatically; logs; features that are always on; speed.
FLAGS = """
    --jinja --no-jinja --mmap --no-mmap --mlock --direct-io -dio --no-direct-io -ndio --kv-offload -kvo
    --no-kv-offload -nkvo --swa-full --repack --no-repack -nr --no-host --op-offload --no-op-offload
    --warmup --no-warmup --cont-batching -cb --no-cont-batching -nocb --kv-unified -kvu --no-kv-unified
    -no-kvu --context-shift --no-context-shift --cache-idle-slots --no-cache-idle-slots --cache-prompt
    --no-cache-prompt --metrics --slots --no-slots --props --ui --no-ui --webui --no-webui --ui-mcp-proxy
    --no-ui-mcp-proxy --webui-mcp-proxy --no-webui-mcp-proxy --agent -ag --no-agent -no-ag --reuse-port
    --cors-credentials --no-cors-credentials --embedding --embeddings --models-autoload
    --no-models-autoload --mmproj-auto --no-mmproj-auto --no-mmproj --mmproj-offload --no-mmproj-offload
    --prefill-assistant --no-prefill-assistant --no-skip-chat-parsing --check-tensors --perf --no-perf
    --show-timings --no-show-timings --backend-sampling -bs --spec-draft-backend-sampling
    --no-spec-draft-backend-sampling --spec-draft-cpu-moe --cpu-moe-draft -cmoed --spec-default
    --log-disable --log-prefix --no-log-prefix --log-timestamps --no-log-timestamps --log-jsonl
    --no-log-jsonl --verbose-prompt --display-prompt --no-display-prompt --simple-io --single-turn -st
    --conversation -cnv --no-conversation -no-cnv --prompt-cache-all --prompt-cache-ro --escape -e
    --no-escape
"""
VALUES = """
    --parallel -np --cache-ram -cram --ubatch-size -ub --threads-batch -tb --spec-draft-threads
    --threads-draft -td --spec-draft-threads-batch --threads-batch-draft -tbd --cpu-mask -C --cpu-range
    -Cr --cpu-strict --cpu-mask-batch -Cb --cpu-range-batch -Crb --cpu-strict-batch --prio --prio-batch
    --poll --poll-batch --spec-draft-cpu-mask --cpu-mask-draft -Cd --spec-draft-cpu-range
    --cpu-range-draft -Crd --spec-draft-cpu-strict --cpu-strict-draft --spec-draft-prio --prio-draft
    --spec-draft-poll --poll-draft --spec-draft-cpu-mask-batch --cpu-mask-batch-draft -Cbd
    --cpu-range-batch-draft -Crbd --spec-draft-cpu-strict-batch --cpu-strict-batch-draft
    --spec-draft-prio-batch --prio-batch-draft --spec-draft-poll-batch --poll-batch-draft --numa
    --load-mode -lm --lazy-mode -lzm --rpc
    --override-tensor -ot --spec-draft-override-tensor --override-tensor-draft -otd --spec-draft-n-cpu-moe
    --spec-draft-ncmoe --n-cpu-moe-draft -ncmoed --spec-draft-ngl
    --gpu-layers-draft --n-gpu-layers-draft -ngld --ctx-size-draft -cd --moe-cache-mib --n-cpu-ffn -ncffn
    --fit-target -fitt --fit-ctx -fitc --defrag-thold -dt --keep --ctx-checkpoints --swa-checkpoints
    -ctxcp --checkpoint-min-step -cms --kv-unified-per-slot --cache-reuse --slot-save-path
    --slot-prompt-similarity -sps --lookup-cache-static -lcs --lookup-cache-dynamic -lcd --draft-min
    --draft-n-min --spec-draft-n-min --spec-draft-p-min --draft-p-min --spec-draft-p-split --draft-p-split
    --spec-draft-sampling --spec-ngram-size-n --spec-ngram-size-m --spec-ngram-min-hits
    --spec-ngram-mod-n-min --spec-ngram-mod-n-max --spec-ngram-mod-n-match --spec-ngram-simple-size-n
    --spec-ngram-simple-size-m --spec-ngram-simple-min-hits --spec-ngram-map-k-size-n
    --spec-ngram-map-k-size-m --spec-ngram-map-k-min-hits --spec-ngram-map-k4v-size-n
    --spec-ngram-map-k4v-size-m --spec-ngram-map-k4v-min-hits --mmproj -mm --mmproj-url -mmu
    --mmproj-device -mmdev --image-min-tokens --image-max-tokens --mtmd-batch-max-tokens --video-fps
    --video-timestamp-interval --video-ffmpeg-dir --media-path --hf-repo-v -hfv -hfrv --hf-file-v -hffv
    --tags --path --cors-methods --cors-headers --ui-config --webui-config --ui-config-file
    --webui-config-file --tools --tools-runtime --mcp-servers-config --mcp-servers-json --timeout -to
    --threads-http --sse-ping-interval --sleep-idle-seconds --models-max --verbosity --log-verbosity -lv
    --log-file --log-prompts-dir --print-token-count -ptc --prompt-cache --xtc-threshold --dry-base
    --dry-allowed-length --dry-penalty-last-n --dry-sequence-breaker --adaptive-decay --dynatemp-exp
    --grp-attn-w -gaw
"""
# followed by one of STATES, or nothing
SWITCHES = ("-fa", "--flash-attn", "-fit", "--fit", "-co", "--color", "--log-colors")
STATES = ("on", "off", "auto", "1", "0", "true", "false", "enabled", "disabled")

# Names, number of values, values without effect, and the reason for refusing others.
REFUSED = """
--lora --lora-scaled 1 | adapters are not supported: merge it into the model file
--lora-init-without-apply 0 | adapters are not supported: merge it into the model file
--control-vector --control-vector-scaled 1 | control vectors are not supported
--control-vector-layer-range 2 | control vectors are not supported
--override-kv 1 | the model file's keys are taken as they are; for a template there is --chat-template-file
--rope-scaling 1 | positions are taken as the model file has them
--rope-scale --grp-attn-n -gan 1 =1 | positions are taken as the model file has them
--rope-freq-base --rope-freq-scale --yarn-orig-ctx 1 =0 | positions are taken as the model file has them
--yarn-ext-factor --yarn-attn-factor --yarn-beta-slow --yarn-beta-fast 1 =-1 | positions are taken as the model file
    has them
--samplers 1 =penalties;dry;top_n_sigma;top_k;typ_p;top_p;min_p;xtc;temperature | samplers run in one order here
--sampler-seq --sampling-seq 1 =edskypmxt | samplers run in one order here
--top-nsigma --top-n-sigma --adaptive-target 1 =-1 | there is no such sampler here
--xtc-probability --dry-multiplier --dynatemp-range 1 =0 | there is no such sampler here
--grammar --grammar-file --json-schema -j --json-schema-file -jf --reverse-prompt -r 1 = | not a default of this
    command; requests can ask for it
--ignore-eos 0 | not a default of this command; requests can ask for it
--system-prompt -sys --system-prompt-file -sysf 1 = | messages of requests have it
--special -sp 0 | control tokens are never part of a text here
--skip-chat-parsing 0 | answers are parsed; --reasoning-format none leaves thoughts in the text
--reasoning-budget-message 1 = | a thought is closed with the template's own end
--reasoning-preserve --no-reasoning-preserve 0 | set the variable that the template has for it, with
    --chat-template-kwargs
--pooling 1 =mean | an embedding is the mean over its tokens
--embd-normalize 1 =2 | not a default of this command; requests can ask for it
--rerank --reranking 0 | there is no such endpoint here
--spm-infill 0 | the prefix comes first here
--api-prefix 1 = | put a reverse proxy in front
--ssl-key-file --ssl-cert-file 1 = | there is no TLS here: put a reverse proxy in front
--models-dir --models-preset 1 = | one model is served; name it with -m
--spec-synth-len --spec-synth-rates 1 | drafts are real here
--server-base 1 = | commands load the model themselves
--image --audio --video 1 | this model reads text only
--binary-file -bf 1 | give the prompt as UTF-8 text, with -f
--output --output-file -o 1 = | redirect standard output
--in-prefix --in-suffix 1 = | the chat template writes what stands around a message
--in-prefix-bos 0 | the chat template writes what stands around a message
--prompt -p --file -f 1 | dflash-run completes one prompt, dflash-chat is interactive, dflash-serve serves
--interactive -i --interactive-first -if 0 | dflash-run completes one prompt, dflash-chat is interactive, dflash-serve
    serves
--multiline-input -mli 0 | lines between \"\"\" are one message
--model-url -mu --docker-repo -dr 1 | name the model with -hf, or fetch it and name the file with -m
--embd-gemma-default --fim-qwen-1.5b-default --fim-qwen-3b-default --fim-qwen-7b-default --fim-qwen-7b-spec
    --fim-qwen-14b-spec --fim-qwen-30b-default --gpt-oss-20b-default --gpt-oss-120b-default --vision-gemma-4b-default
    --vision-gemma-12b-default 0 | name the model with -hf, or fetch it and name the file with -m
--list-devices 0 | dflash-doctor lists the devices
--cache-list -cl 0 | the hub's own command lists its cache: hf cache ls
--completion-bash --license 0 | there is none here
"""


class _Noted(argparse.Action):
    """Records that the option was given."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: Any = None
    ) -> None:
        namespace.no_effect = [*getattr(namespace, "no_effect", ()), option]


class _Refused(_Noted):
    """Refuses the option, unless the value has no effect."""

    def __init__(self, *args: Any, why: str, neutral: Sequence[str], **more: Any) -> None:
        super().__init__(*args, **more)
        self.why, self.neutral = why, neutral

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: Any = None
    ) -> None:
        """Exit code 2, with the option's name and the reason."""
        if not any(_same(values, value) for value in self.neutral):
            parser.error(f"{option}: {self.why}")
        super().__call__(parser, namespace, values, option)


def add_llama_cpp_options(parser: argparse.ArgumentParser) -> None:
    """Add llama.cpp's options that the command lacks; given options without effect are listed in `no_effect` of the parsed
    arguments. Add the command's own options first."""
    known = parser._option_string_actions
    for own, names in ALIASES.items():
        known.update({name: known[own] for name in names.split() if own in known and name not in known})

    def add(names: str, **options: Any) -> None:
        for name in names.split():
            if name not in known:
                parser.add_argument(name, default=argparse.SUPPRESS, help=argparse.SUPPRESS, **options)

    add(FLAGS, action=_Noted, nargs=0)
    add(VALUES, action=_Noted)
    add(" ".join(SWITCHES), action=_Noted, nargs="?", type=_state)
    for flags, (n, *neutral), why in entries(REFUSED):
        refused = partial(_Refused, why=why, neutral=[value[1:] for value in neutral])
        add(" ".join(flags), action=refused, nargs=None if n == "1" else int(n))


def join_states(words: Sequence[str]) -> list[str]:
    """The command line with `-fa on` as `-fa=on`, and `-fa` before any other word as `-fa=`, so that it does not consume it."""
    joined: list[str] = []
    for i, word in enumerate(words):
        if word == "--":
            return [*joined, *words[i:]]
        if joined and joined[-1].removesuffix("=") in SWITCHES and word.lower() in STATES:
            joined[-1] += word
        else:
            joined.append(f"{word}=" if word in SWITCHES else word)
    return joined


def _state(word: str) -> str:
    if word and word.lower() not in STATES:
        raise argparse.ArgumentTypeError(f"{word!r} is none of {', '.join(STATES)}")
    return word


def _same(value: Any, neutral: str) -> bool:
    """Whether two words are equal, as numbers if they are numbers."""
    try:
        return float(value) == float(neutral)
    except (TypeError, ValueError):
        return bool(value == neutral)
