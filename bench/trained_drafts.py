"""Accepted tokens per step of each trained draft: as a chain, as a tree, with prompt lookup, and as a chain of llama.cpp's.

    python bench/trained_drafts.py NAME=DRAFT.gguf.. [--target FILE] [--sets humaneval,gsm8k,chat] [--budgets 7 15 31]
        [--head TARGET_WITH_HEAD.gguf] [--source LLAMA_CPP --libs FOLDER]

Output is the target's own, behind prompts of these sets (as of dflash-bench): greedy, and at temperature 0.7. Every source
proposes at every position; chains and trees are then walked along it as steps do. So all sources see the same tokens, and
figures measure acceptance alone. Greedy output of so small a target repeats itself, which flatters every source: both are
reported. `--source` and `--libs` as of upstream_drafts.py, for which a draft's file must hold the vocabulary.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from common import Solo, header, save
from replay import proposals, replay
from upstream_drafts import acceptance, compile_driver, theirs

from dflash_ggml.bench.prompts import Prompt, choose, spread
from dflash_ggml.config import EngineConfig
from dflash_ggml.decode.accept import walk
from dflash_ggml.decode.candidates import Candidates
from dflash_ggml.decode.sampling import Sampler, SamplingParams
from dflash_ggml.decode.tree import spine
from dflash_ggml.drafts.prompt_lookup import PromptLookup
from dflash_ggml.files.pairs import EMBEDDED_TARGET
from dflash_ggml.policy.plan import Plan
from dflash_ggml.text.template import ChatTemplate

MOODS = {"greedy": 0.0, "sampled": 0.7}


@dataclass(frozen=True, slots=True)
class Written:
    """A generation of the target: ids, of which the first n_prompt are the prompt."""

    style: str
    ids: list[int]
    n_prompt: int


def prompt_ids(engine: Solo, prompt: Prompt, form: str | None) -> list[int]:
    """Tokens of a prompt; a request is in the chat form, if there is one."""
    if prompt.chat and form:
        messages = [{"role": "user", "content": prompt.text}]
        return engine.tokenizer.encode(ChatTemplate(form).render(messages, add_generation_prompt=True))
    return [*engine.tokenizer.bos_ids, *engine.tokenizer.encode(prompt.text, special=False)]


def outputs(target: Path, prompts: list[Prompt], tokens: int) -> dict[str, list[Written]]:
    """Per mood what the target writes behind each prompt; requests in its chat form."""
    found: dict[str, list[Written]] = {mood: [] for mood in MOODS}
    config = EngineConfig(target, n_ctx=2048, n_threads=1, mode="plain", calibrate="never")
    with Solo.load(config) as engine:
        tokenizer = engine.tokenizer
        form = tokenizer.chat_template if target != EMBEDDED_TARGET else None  # it was trained on code alone
        for number, prompt in enumerate(prompts):
            ids = prompt_ids(engine, prompt, form)
            for mood, temperature in MOODS.items():
                engine.reset()
                engine.prefill(ids)
                sampler = Sampler(SamplingParams(temperature=temperature, seed=number), engine.n_vocab)
                steps = engine.generate(
                    sampler, max_tokens=tokens, mode="plain", stop=tokenizer.eog_ids.__contains__
                )
                answer = [t for step in steps for t in step.tokens]
                if len(answer) > 1:
                    found[mood].append(Written(prompt.style, [*ids, *answer], len(ids)))
    return found


def walked(text: Written, drafted: list[Candidates], plan: Plan) -> tuple[int, int]:
    """Tokens and passes of a sequence when every step follows `plan`."""
    ids, n_prompt = text.ids, text.n_prompt
    at, passes = n_prompt + 1, 0
    while at < len(ids):
        tree = plan.build(ids[at - 1], drafted[at - 1 - n_prompt])
        following = iter([*ids[at:], *[-1] * plan.budget])
        at += len(walk(tree, lambda node, following=following: next(following)).tokens)
        passes += 1
    return len(ids) - n_prompt - 1, passes


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("drafts", nargs="*", metavar="NAME=FILE")
    parser.add_argument("--target", type=Path, default=EMBEDDED_TARGET)
    parser.add_argument("--head", type=Path, help="the target with a prediction head")
    parser.add_argument("--beside", help="NAME of a draft that also proposes beside the head, in one tree")
    parser.add_argument("--sets", default="python", help="as dflash-bench --prompts")
    parser.add_argument("--prompts", type=int, default=24, help="of all sets together")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument(
        "--budgets", type=int, nargs="+", default=[31], help="of trees; the last beside copies"
    )
    parser.add_argument("--draft-max", type=int, default=4)
    parser.add_argument("--source", type=Path)
    parser.add_argument("--libs", type=Path)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    written = outputs(args.target, spread(choose(args.sets.split(",")), args.prompts), args.tokens)
    files = {name: Path(path) for name, _, path in (d.partition("=") for d in args.drafts)}
    sources: dict[str, tuple[Path, Path | None]] = {name: (args.target, path) for name, path in files.items()}
    if args.head:
        sources["mtp"] = (args.head, None)
        if args.beside:
            sources[f"{args.beside}+mtp"] = (args.head, files[args.beside])
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if args.source:
            compile_driver(args.source, args.libs, folder / "driver")
        for source, (target, draft) in sources.items():
            found[source] = one(args, source, target, draft, written, folder)
    if args.json:
        about = {
            "weights": "trained",
            "prompts": args.prompts,
            "tokens": args.tokens,
            "budgets": args.budgets,
        }
        about |= {"sets": args.sets, "target": args.target.name}
        save(str(args.json), header() | about | {"sources": found})


def one(args, source: str, target: Path, draft: Path | None, written: dict, folder: Path) -> dict[str, Any]:
    """All figures of one source, tokens a step; and a line for each mood."""
    both = "+" in source
    kind = "mtp" if draft is None else "dspark" if "dspark" in source else "dflash"
    config = EngineConfig(
        target,
        draft,
        n_ctx=2048,
        n_threads=1,
        budget=args.budgets[-1],
        calibrate="never",
        own_draft=draft is None or both,
        draft_max=args.draft_max,
        spec=(source.partition("+")[0], "mtp", "suffix") if both else None,
    )
    rows: dict[str, Any] = {}
    with Solo.load(config) as engine:
        assert engine.drafter is not None
        depth, budget = engine.drafter.depth, args.budgets[-1]
        for mood, all_of_it in written.items():
            drafted = {id(t): proposals(engine, t.ids, t.n_prompt, budget) for t in all_of_it}
            styles = list(dict.fromkeys(t.style for t in all_of_it))
            for style in [*styles, "all"] if len(styles) > 1 else styles:
                every = [t for t in all_of_it if style in (t.style, "all")]
                plans = {"chain": Plan("chain", depth)} | {f"tree {b}": Plan("tree", b) for b in args.budgets}
                sums = {}
                for name, plan in plans.items():
                    passes = [walked(t, drafted[id(t)], plan) for t in every]
                    sums[name] = sum(t for t, _ in passes) / sum(p for _, p in passes)
                for name in ("suffix", "merged"):
                    lookup = PromptLookup(budget)  # rates are learned across sequences, as in a session
                    counts = [replay(name, t.ids, t.n_prompt, drafted[id(t)], lookup, budget) for t in every]
                    sums[name] = sum(r["tokens"] for r in counts) / sum(r["passes"] for r in counts)
                line = f"{source:12} {mood:8} {style:10} " + ", ".join(
                    f"{k} {v:.3f}" for k, v in sums.items()
                )
                if args.source and not both:
                    sums |= beside(args, kind, target, draft, every, drafted, depth, folder)
                    line += f"; llama.cpp chain {sums['upstream']:.3f}, ours there {sums['ours']:.3f}, same {sums['same']:.4f}"
                rows.setdefault(mood, {})[style] = sums
                print(line, flush=True)
    return {"depth": depth, **rows}


def beside(
    args, kind: str, target: Path, draft: Path | None, every, drafted, depth: int, folder: Path
) -> dict[str, float]:
    """llama.cpp's chains of the same files on the same tokens: mean acceptance of both, and the share that is equal."""
    ours, other, same = [], [], []
    files = [target] if draft is None else [target, draft]
    for text in every:
        ids, n, candidates = text.ids, text.n_prompt, drafted[id(text)]
        mine = [spine(t, c, depth).tokens[1:].tolist() for t, c in zip(ids[n:], candidates)]
        chains = theirs(folder / "driver", args.libs, folder, files, f"draft-{kind}", depth, ids, n)[
            : len(mine)
        ]
        same += [a == b for a, b in zip(mine, chains, strict=True)]
        ours.append(acceptance(mine, ids, n))
        other.append(acceptance(chains, ids, n))
    return {
        "ours": float(np.mean(ours)),
        "upstream": float(np.mean(other)),
        "largest_difference": float(np.abs(np.subtract(ours, other)).max()),
        "same": float(np.mean(same)),
    }


if __name__ == "__main__":
    main()
