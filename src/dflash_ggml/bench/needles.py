"""The suite `needles`: whether questions about long documents are still answered when only a part is prefilled.

Four kinds of question, since a single needle hardly distinguishes scorers: in the document's own words, paraphrased, over two
hops, and counting. Documents consist of our own sentences with seeded names, which are not in any training set.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import fmean

from ..session.prompts import Prepared
from ..session.requests import ChatRequest, PromptScorer
from ..session.session import Session
from .measure import Job, Run
from .prompts import Prompt
from .runner import Bench
from .sections import Row, Section, columns

EXACT, KEEPS = "exact", (0.1, 0.3)
LENGTHS = (8000, 32000, 128000)  # tokens of a prompt; of shorter ones nearly all is protected
ANSWER = 24  # tokens
_NAMES, _TOWNS, _THINGS, _WORDS = (
    line.split()
    for line in (
        "Adler Boyle Castro Dunn Egede Falk Greer Holt Jansen Kerr Lund Moreau Novak",
        "Arden Bexhill Corwen Dunmore Elgin Fowey Girvan Helmsley Ilkley Kelso Louth",
        "anvil basket candle drum easel flute globe harp jar kettle lantern mirror oar",
        "amber birch copper delta ember fjord garnet heron indigo juniper krill lilac",
    )
)
COLUMNS = columns(
    "kind=question; length=prompt:0; setting=prefilled; right=right %:0; read=tokens read:0; ttft_ms=first token ms:0; "
    "texts=runs:0"
)

Question = tuple[list[str], str, str]  # hidden sentences, the question, the answer


def _asked(hidden: Sequence[str], question: str, answer: str) -> Callable[[random.Random], Question]:
    """A kind of question about one of several named things."""

    def made(rng: random.Random) -> Question:
        drawn = {
            "name": _NAMES,
            "town": _TOWNS,
            "thing": _THINGS,
            "word": _WORDS,
            "number": range(1000, 9999),
        }
        names = {key: rng.choice(choices) for key, choices in drawn.items()}
        return [line.format(**names) for line in hidden], question.format(**names), str(names[answer])

    return made


def _counting(rng: random.Random) -> Question:
    n, town = rng.randrange(3, 8), rng.choice(_TOWNS)
    hidden = [f"A red lorry passed the gate of {town} on day {day}." for day in rng.sample(range(1, 31), n)]
    return hidden, f"How many red lorries passed the gate of {town}?", str(n)


KINDS: dict[str, Callable[[random.Random], Question]] = {
    "own words": _asked(
        ["The password of the archive in {town} is {word}."],
        "What is the password of the archive in {town}?",
        "word",
    ),
    "other words": _asked(
        ["Physician {name} conceals the spare latchkey beneath the {thing}."],
        "Under which object does doctor {name} hide an extra key?",
        "thing",
    ),
    "two hops": _asked(
        ["Parcel {number} belongs to {name}.", "All that {name} owns is kept in {town}."],
        "In which town is parcel {number} kept?",
        "town",
    ),
    "counting": _counting,
}


def _sentence(rng: random.Random) -> str:
    """A filler sentence."""
    name, town, thing = rng.choice(_NAMES), rng.choice(_TOWNS), rng.choice(_THINGS)
    return rng.choice(
        (
            f"In the spring {name} sold a {thing} to a trader from {town}.",
            f"The road to {town} was closed while {name} repaired a {thing}.",
            f"{name} wrote a letter about the {thing} that was never answered.",
            f"Nobody in {town} remembered who had brought the {thing}.",
            f"It rained for {rng.randrange(2, 40)} days, and the {thing} of {name} rusted.",
        )
    )


def document(kind: str, n: int, seed: int) -> tuple[str, str]:
    """A document of about n sentences with a question after it, and the answer."""
    rng = random.Random(f"{kind} {seed}")
    hidden, question, answer = KINDS[kind](rng)
    lines = [_sentence(rng) for _ in range(n)]
    for sentence in hidden:
        lines.insert(rng.randrange(len(lines) // 8, 7 * len(lines) // 8), sentence)
    return "\n".join(lines) + f"\n\n{question} Answer in one word.", answer


def needle_jobs(bench: Bench) -> list[Job]:
    """Every kind of question at every length that fits, with the whole document prefilled and with parts of it, chosen by words
    and by the scorer that was loaded. Raises ConfigError where the extra `selection` is not installed."""
    session = Session(bench.engine, cache_bytes=0, prompt_keep=min(KEEPS))
    by: dict[str, PromptScorer | None] = {"lexical": "lexical"}
    if bench.engine.scorer is not None:
        by[bench.engine.scorer.name] = None
    ways = [
        (EXACT, None, None),
        *((f"{name} {keep:g}", keep, way) for name, way in by.items() for keep in KEEPS),
    ]
    per_sentence = len(bench.engine.tokenizer.encode(document("own words", 200, 0)[0], special=False)) / 200
    found = []
    for length in (n for n in LENGTHS if n + ANSWER <= bench.engine.n_ctx):
        for kind in KINDS:
            for turn in range(bench.size.prompts):
                text, answer = document(kind, int(length / per_sentence), bench.seed + turn)
                request = ChatRequest(messages=[{"role": "user", "content": text}], enable_thinking=False)
                prompt = Prompt(f"{kind}, {length}, {turn + 1}", kind, text, True)
                for label, keep, way in ways:
                    asked = replace(request, prompt_keep=keep, prompt_scorer=way)
                    prepared = finished(session, session.prompts.make(asked))
                    # names may take more tokens than others
                    if len(prepared.ids) + ANSWER > bench.engine.n_ctx:
                        continue
                    score_ms = 0.0 if prepared.selection is None else prepared.selection.score_ms
                    setting = bench.setting(label, bench.mode, bench.budget, 0.0)
                    job = Job(prompt, prepared.ids, text, setting, ANSWER, bench.seed, answer=answer)
                    found.append(replace(job, score_ms=score_ms))
    return found


def finished(session: Session, prepared: Prepared) -> Prepared:
    """The prompt with its selection made."""
    scoring = session.chosen(prepared)
    while True:
        try:
            next(scoring)
        except StopIteration as end:
            return end.value


def needle_report(bench: Bench, runs: Sequence[Run]) -> Section:
    """A row per kind, length and part that was prefilled."""
    groups: dict[tuple[str, int, str], list[Run]] = {}
    for run in runs:
        length = int(run.prompt.split(", ")[1])
        groups.setdefault((run.style, length, run.setting), []).append(run)
    rows: list[Row] = [
        {
            "kind": kind,
            "length": length,
            "setting": setting,
            "right": 100 * fmean(bool(run.answered) for run in found),
            "read": fmean(run.prompt_n for run in found),
            "ttft_ms": fmean(run.ttft_ms for run in found),
            "texts": len(found),
        }
        for (kind, length, setting), found in groups.items()
    ]
    notes = [
        "An answer counts as right when it has the word or the number in it. All but `exact` are --prompt-keep: lossy.",
        "The time to the first token has what choosing took.",
        "Stay within the lengths that the model was trained for: beyond, a part seems better than the whole.",
    ]
    if not rows:
        notes.append(f"No document fits: -c {LENGTHS[0] + ANSWER} and more is needed.")
    return Section(
        "needles", "Questions on long documents, read in part", COLUMNS, rows, notes, [], list(runs)
    )
